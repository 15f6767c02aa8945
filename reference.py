#!/usr/bin/env python3
"""One transformer decoder layer in PyTorch: the reference that every stage is held to.

Three forms of the same layer, and the tools that compare them:

* the eager form, 43 operations a step, each one kernel on a GPU (`python3 reference.py
  operations` lists them); it keeps the residual stream in bf16 and rounds after every
  operation, as PyTorch does;
* the float64 form, which rounds nothing but the new cache row;
* the C oracle, loaded from build/liboracle.so.

This file is itself a submission in the sense of the contract: it has build_layer,
layer_step and teardown. Runs on torch 1.13 (CPU) and torch 2.8 or later (CUDA).

Shapes throughout: x is (1, d), always two-dimensional, because a one-dimensional bf16
product is wrong on some CPUs; a cache is (1, n_kv, max_seq_len, hd), bf16; `rep` is
n_q / n_kv, the query heads that share a KV head; `keys` is pos + 1.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import typing

try:
    import torch
except ImportError:
    sys.exit(f"reference.py: {sys.executable} has no PyTorch; on Debian, after make deps, "
             "/usr/bin/python3 has")
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = pathlib.Path(__file__).resolve().parent
BF16 = torch.bfloat16


# ------------------------------------------------------------------ the shape of a layer

@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of its cache; the defaults are the contract's."""
    d: int = 8192            # width of the residual stream
    ffn: int = 28672         # width of the MLP
    n_q: int = 64            # query heads
    n_kv: int = 8            # KV heads
    hd: int = 128            # dimension of a head
    eps: float = 1e-5        # inside the square root of the RMSNorm
    theta: float = 500000.0  # base of the RoPE angles
    prefill: int = 4096      # cache rows that exist before the first step
    max_seq_len: int = 4224  # cache rows there is room for

    def cfg(self):
        """The dict that build_layer is given."""
        return dict(layers=1, d=self.d, ffn=self.ffn, n_q=self.n_q, n_kv=self.n_kv,
                    hd=self.hd, eps=self.eps, theta=self.theta, wdtype="bf16")

    def weight_bytes(self):
        """Bytes of the seven matrices (the contract leaves the two norms out)."""
        attention = 2 * self.n_q * self.hd * self.d + 2 * self.n_kv * self.hd * self.d
        return 2 * (attention + 3 * self.ffn * self.d)

    def floor_bytes(self, steps):
        """Bytes a step must move: the weights, and K and V after `steps` appends."""
        return self.weight_bytes() + 2 * self.n_kv * (self.prefill + steps) * self.hd * 2


SMALL = dict(d=2048, ffn=4096, n_q=16, n_kv=2, hd=128, prefill=512, max_seq_len=640)


# ------------------------------------------------------------------------------- inputs
# The same bytes as the C generator: integers from a counter, one fp32 multiplication,
# one rounding to bf16. Arithmetic modulo 2**64 is done in int64, which wraps.

GOLDEN = 0x9e3779b97f4a7c15
MIX_1, MIX_2 = 0xbf58476d1ce4e5b9, 0x94d049bb133111eb
TENSOR_ID = dict(in_norm=1, post_norm=2, q=3, k=4, v=5, o=6, gate=7, up=8, down=9,
                 k_cache=10, v_cache=11, x=1000)   # x of the step at pos: 1000 + pos
CHUNK = 1 << 22              # elements generated at a time; bounds the scratch memory


def as_int64(u):
    """The int64 with the bits of the unsigned 64-bit integer u."""
    u &= 2**64 - 1
    return u - 2**64 if u >= 2**63 else u


def logical_shift(z, n):
    """int64 tensor z shifted right by n with zeros coming in."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def mix64(z):
    """The finaliser of splitmix64 on an int64 tensor."""
    z = (z ^ logical_shift(z, 30)) * as_int64(MIX_1)
    z = (z ^ logical_shift(z, 27)) * as_int64(MIX_2)
    return z ^ logical_shift(z, 31)


def mix64_int(z):
    """The same on one Python integer."""
    mask = 2**64 - 1
    z = ((z ^ z >> 30) * MIX_1) & mask
    z = ((z ^ z >> 27) * MIX_2) & mask
    return z ^ z >> 31


def normal_times_65536(key, first, n, device):
    """int64 (n,): elements first ..., near N(0, 65536**2), as sums of twelve uniforms."""
    j = torch.arange(3 * first + 1, 3 * (first + n) + 1, dtype=torch.int64, device=device)
    bits = mix64(j * as_int64(GOLDEN) + as_int64(key))
    fields = sum((bits >> shift) & 0xffff for shift in (0, 16, 32, 48))
    return fields.view(n, 3).sum(1) - 393210


def to_fp32(value):
    """A Python float rounded to single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]


def generate(tensor, count, seed, offset=0, scale=1 / 65536, first=0, device="cpu"):
    """bf16 (count,): elements first ... of tensor number `tensor` under `seed`."""
    key = mix64_int((seed * GOLDEN + tensor) & (2**64 - 1))
    out = torch.empty(count, dtype=BF16, device=device)
    for at in range(0, count, CHUNK):
        n = min(CHUNK, count - at)
        integers = normal_times_65536(key, first + at, n, device) + offset
        out[at:at + n] = (integers.float() * to_fp32(scale)).to(BF16)
    return out


def weight_recipe(shape):
    """For each weight: its shape, and the offset and scale it is generated with."""
    def matrix(rows, columns):
        return (rows, columns), 0, 1.0 / (65536.0 * math.sqrt(columns))
    norm = (shape.d,), 655360, 0.1 / 65536.0
    heads, kv_heads = shape.n_q * shape.hd, shape.n_kv * shape.hd
    return dict(in_norm=norm, post_norm=norm,
                q=matrix(heads, shape.d), k=matrix(kv_heads, shape.d),
                v=matrix(kv_heads, shape.d), o=matrix(shape.d, heads),
                gate=matrix(shape.ffn, shape.d), up=matrix(shape.ffn, shape.d),
                down=matrix(shape.d, shape.ffn))


def make_weights(shape, seed, device="cpu"):
    """{"layers": [nine bf16 tensors by name]}; matrices ~ N(0, 1/fan-in), norms near 1."""
    layer = {}
    for name, (size, offset, scale) in weight_recipe(shape).items():
        flat = generate(TENSOR_ID[name], math.prod(size), seed, offset, scale, device=device)
        layer[name] = flat.view(size)
    return dict(layers=[layer])


def make_cache(shape, seed, device="cpu"):
    """[(k, v)], each (1, n_kv, max_seq_len, hd) bf16: rows < prefill N(0,1), then zero."""
    size = (1, shape.n_kv, shape.max_seq_len, shape.hd)
    pair = []
    for name in ("k_cache", "v_cache"):
        whole = generate(TENSOR_ID[name], math.prod(size), seed, device=device).view(size)
        whole[:, :, shape.prefill:] = 0
        pair.append(whole)
    return [tuple(pair)]


def make_x(shape, seed, pos, device="cpu"):
    """(1, d) bf16 ~ N(0, 1): the residual stream entering the step at pos."""
    return generate(TENSOR_ID["x"] + pos, shape.d, seed, device=device).view(1, shape.d)


def clone_cache(kv_cache):
    return [tuple(tensor.clone() for tensor in kv_cache[0])]


def bits(tensor):
    """The bytes of a tensor as integers, so that NaN compares equal to itself."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == BF16 else torch.int32)


def differing(a, b):
    """How many elements of two tensors differ in their bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    return int((bits(a) != bits(b)).sum())


def changed_weights(weights, shape, seed):
    """Elements of the weights that are not what the generator gives."""
    wrong = 0
    for name, (_, offset, scale) in weight_recipe(shape).items():
        flat = weights["layers"][0][name].reshape(-1)
        for at in range(0, flat.numel(), CHUNK):
            part = flat[at:at + CHUNK]
            wrong += differing(part, generate(TENSOR_ID[name], part.numel(), seed, offset,
                                              scale, first=at, device=flat.device))
    return wrong


# -------------------------------------------------------------------------- eager layer

class EagerLayer:
    """What a handle keeps: the caller's tensors, and the RoPE tables."""

    def __init__(self, weights, kv_cache, cfg, max_seq_len):
        self.w = weights["layers"][0]
        self.k_cache, self.v_cache = (t[0] for t in kv_cache[0])  # (n_kv, max_seq_len, hd)
        self.n_q, self.n_kv, self.hd = cfg["n_q"], cfg["n_kv"], cfg["hd"]
        self.eps, self.max_seq_len = cfg["eps"], max_seq_len
        self.cos, self.sin = rope_tables(self.hd, cfg["theta"], range(max_seq_len),
                                         self.k_cache.device, torch.float32)


def rope_angles(hd, theta, positions, device):
    """float64 (len(positions), hd/2), radians: pos * theta**(-2i/hd)."""
    i = torch.arange(hd // 2, dtype=torch.float64, device=device)
    pos = torch.tensor(list(positions), dtype=torch.float64, device=device)
    return pos[:, None] * torch.pow(torch.tensor(theta, dtype=torch.float64, device=device),
                                    -2.0 * i / hd)


def rope_tables(hd, theta, positions, device, dtype):
    """cos and sin, each (len(positions), hd) with both halves equal; float64, then cast."""
    angles = rope_angles(hd, theta, positions, device)
    return tuple(torch.cat((t, t), dim=-1).to(dtype) for t in (angles.cos(), angles.sin()))


def rms_norm(x, weight, eps):
    """bf16 (1, d) -> bf16 (1, d). Eight operations: float, pow, mean, + eps, rsqrt, mul,
    to bf16, * weight; the rounding comes before the weight."""
    x32 = x.float()
    mean_square = x32.pow(2).mean(-1, keepdim=True)
    return (x32 * torch.rsqrt(mean_square + eps)).to(BF16) * weight


def rope(heads, cos, sin):
    """bf16 (heads, hd) -> bf16, rotated in fp32 by cos, sin: fp32 (hd,). Five operations:
    mul, neg, cat, addcmul, to bf16; negating and joining bf16 halves is exact."""
    half = heads.shape[-1] // 2
    straight = heads * cos
    crossed = torch.cat((-heads[:, half:], heads[:, :half]), dim=-1)
    return torch.addcmul(straight, crossed, sin).to(BF16)


def scaled_scores(q, keys, scale):
    """bf16 (n_kv, rep, hd), bf16 (n_kv, keys, hd) -> fp32 (n_kv, rep, keys). One kernel
    on a GPU. The scores stay fp32: from bf16 a softmax to fp32 would take two kernels."""
    if q.is_cuda:
        scores = torch.empty(*q.shape[:2], keys.shape[1], dtype=torch.float32,
                             device=q.device)
        return torch.baddbmm(scores, q, keys.transpose(1, 2), torch.float32,
                             beta=0, alpha=scale, out=scores)
    return as_one_operation(
        "baddbmm", lambda a, b: (a.float() @ b.float().transpose(1, 2)) * scale, q, keys)


def weighted_values(p, values):
    """bf16 (n_kv, rep, keys), bf16 (n_kv, keys, hd) -> bf16 (n_kv, rep, hd). One kernel
    on a GPU; torch 1.13 on a CPU sums small batches in bf16, so there it is spelt out."""
    if p.is_cuda:
        return torch.bmm(p, values)
    return as_one_operation("bmm", lambda a, b: (a.float() @ b.float()).to(BF16), p, values)


def silu(x):
    """bf16 -> bf16, x / (1 + exp(-x)) in fp32, rounded once. One kernel on a GPU; torch
    1.13 on a CPU rounds after each of its steps, so there it is spelt out."""
    if x.is_cuda:
        return torch.nn.functional.silu(x)
    return as_one_operation(
        "silu", lambda a: torch.nn.functional.silu(a.float()).to(BF16), x)


def build_layer(weights, kv_cache, cfg, max_seq_len):
    """A handle for layer_step. The caches are used in place."""
    if kv_cache[0][0].is_cuda:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return EagerLayer(weights, kv_cache, cfg, max_seq_len)


def layer_step(handle, x, pos):
    """x: (1, d) bf16 -> (1, d) bf16, and row pos of both caches written."""
    if not 0 <= pos < handle.max_seq_len:
        raise ValueError(f"pos {pos} is outside [0, {handle.max_seq_len})")
    w, n_q, n_kv, hd = handle.w, handle.n_q, handle.n_kv, handle.hd
    cos, sin = handle.cos[pos], handle.sin[pos]
    h = rms_norm(x, w["in_norm"], handle.eps)
    q, k, v = h @ w["q"].T, h @ w["k"].T, h @ w["v"].T
    q = rope(q.view(n_q, hd), cos, sin)
    k = rope(k.view(n_kv, hd), cos, sin)
    handle.k_cache[:, pos].copy_(k)
    handle.v_cache[:, pos].copy_(v.view(n_kv, hd))
    keys, values = handle.k_cache[:, :pos + 1], handle.v_cache[:, :pos + 1]
    scores = scaled_scores(q.view(n_kv, n_q // n_kv, hd), keys, 1 / math.sqrt(hd))
    p = torch.softmax(scores, dim=-1).to(BF16)
    attended = weighted_values(p, values).view(1, n_q * hd)
    x = x + attended @ w["o"].T
    h = rms_norm(x, w["post_norm"], handle.eps)
    gate = silu(h @ w["gate"].T)
    return x + (gate * (h @ w["up"].T)) @ w["down"].T


def teardown(handle):
    """Drop the references; the caller's tensors stay the caller's."""
    handle.__dict__.clear()


# ------------------------------------------------------------------------- float64 layer

class ExactLayer:
    """The layer in float64 over the same stored bf16; only the new cache row is rounded.

    After a step, `k_row` and `v_row` are float64 (n_kv, hd): the row before rounding, and
    `pair_norm`, (n_kv, hd): the length of the rotated pair an element of K belongs to.
    """

    def __init__(self, weights, kv_cache, cfg, max_seq_len):
        self.w = weights["layers"][0]
        self.k_cache, self.v_cache = (t[0] for t in kv_cache[0])
        self.cfg, self.max_seq_len = cfg, max_seq_len

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean() + self.cfg["eps"]) * weight.double()

    def rotate(self, heads, cos, sin):
        half = heads.shape[-1] // 2
        return heads * cos + torch.cat((-heads[:, half:], heads[:, :half]), -1) * sin

    def step(self, x, pos):
        """x: (1, d) bf16 -> (d,) float64; row pos of both caches written."""
        w, hd = self.w, self.cfg["hd"]
        n_q, n_kv = self.cfg["n_q"], self.cfg["n_kv"]
        cos, sin = (t[0] for t in rope_tables(hd, self.cfg["theta"], [pos], x.device,
                                              torch.float64))
        x = x.view(-1).double()
        h = self.norm(x, w["in_norm"])
        q = self.rotate(product64(w["q"], h).view(n_q, hd), cos, sin)
        self.k_row = self.rotate(product64(w["k"], h).view(n_kv, hd), cos, sin)
        self.v_row = product64(w["v"], h).view(n_kv, hd)
        self.pair_norm = torch.hypot(*self.k_row.chunk(2, -1)).repeat(1, 2)
        self.k_cache[:, pos] = self.k_row.to(BF16)
        self.v_cache[:, pos] = self.v_row.to(BF16)
        keys, values = self.k_cache[:, :pos + 1].double(), self.v_cache[:, :pos + 1].double()
        scores = q.view(n_kv, -1, hd) @ keys.transpose(1, 2) / math.sqrt(hd)
        attended = torch.softmax(scores, -1) @ values
        x = x + product64(w["o"], attended.reshape(-1))
        h = self.norm(x, w["post_norm"])
        gate = product64(w["gate"], h)
        hidden = gate / (1 + torch.exp(-gate)) * product64(w["up"], h)
        return x + product64(w["down"], hidden)


def product64(matrix, vector, rows=2048):
    """bf16 (m, n) times float64 (n,) -> float64 (m,), widening `rows` rows at a time."""
    return torch.cat([part.double() @ vector for part in matrix.split(rows)])


# -------------------------------------------------------------------------------- oracle

class OracleConfig(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_int64) for name in
                 ("d", "ffn", "n_q", "n_kv", "hd", "max_seq_len")]
                + [("eps", ctypes.c_double), ("theta", ctypes.c_double),
                   ("max_blocks", ctypes.c_int32)])


class OracleWeights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in
                ("in_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")]


class Oracle:
    """The C oracle over tensors in host memory."""

    def __init__(self, weights, kv_cache, cfg, max_seq_len, library=None):
        self.library = library or load_oracle()
        self.w = weights["layers"][0]
        self.k_cache, self.v_cache = kv_cache[0]
        self.config = OracleConfig(cfg["d"], cfg["ffn"], cfg["n_q"], cfg["n_kv"], cfg["hd"],
                                   max_seq_len, cfg["eps"], cfg["theta"], 0)
        self.pointers = OracleWeights(**{name: self.w[name].data_ptr() for name in self.w})

    def step(self, x, pos):
        """x: (1, d) bf16 -> (d,) float64; row pos of both caches written."""
        out = torch.full((self.config.d,), math.nan, dtype=torch.float64)
        status = self.library.oracle_step(
            ctypes.byref(self.config), ctypes.byref(self.pointers),
            ctypes.c_void_p(self.k_cache.data_ptr()), ctypes.c_void_p(self.v_cache.data_ptr()),
            ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(pos), ctypes.c_void_p(out.data_ptr()))
        if status:
            raise RuntimeError(f"oracle_step returned {status}")
        return out


def load_oracle():
    path = ROOT / "build" / "liboracle.so"
    if not path.exists():
        sys.exit("build/liboracle.so is missing: make build/liboracle.so")
    return ctypes.CDLL(str(path))


def oracle_generate(library, tensor, count, seed, offset=0, scale=1 / 65536):
    """The C generator's bf16 (count,), to be compared with generate()."""
    out = torch.zeros(count, dtype=BF16)
    library.generate(ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(0), ctypes.c_int64(count),
                     ctypes.c_uint64(seed), ctypes.c_uint32(tensor), ctypes.c_int32(offset),
                     ctypes.c_float(scale))
    return out


# ------------------------------------------------------------- counting the operations

def norm_operations(name):
    return [(f"{name}: {step}", op) for step, op in (
        ("to fp32", "_to_copy"), ("square", "pow"), ("mean", "mean"), ("+ eps", "add"),
        ("1/sqrt", "rsqrt"), ("scale", "mul"), ("to bf16", "_to_copy"), ("* weight", "mul"))]


def rope_operations(name):
    return [(f"RoPE of {name}: {step}", op) for step, op in (
        ("* cos", "mul"), ("negate a half", "neg"), ("swap the halves", "cat"),
        ("+ swapped * sin", "addcmul"), ("to bf16", "_to_copy"))]


OPERATIONS = (  # (what it does, the name PyTorch has for it), in the order of a step
    norm_operations("norm 1") + [(f"{name} = h W_{name}", "mm") for name in "qkv"]
    + rope_operations("q") + rope_operations("k")
    + [("append k", "copy_"), ("append v", "copy_"), ("scores = scale q K", "baddbmm"),
       ("softmax", "_softmax"), ("p to bf16", "_to_copy"), ("p V", "bmm"),
       ("o = a W_o", "mm"), ("x + o", "add")]
    + norm_operations("norm 2")
    + [("gate = h W_gate", "mm"), ("silu", "silu"), ("up = h W_up", "mm"),
       ("silu * up", "mul"), ("down = . W_down", "mm"), ("x + down", "add")])


class Operation(typing.NamedTuple):
    name: str        # PyTorch's name without its namespace
    inputs: tuple    # a string such as "bf16 (1, 8192)" for each tensor
    output: str


def describe(tensor):
    short = {BF16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    return f"{short.get(tensor.dtype, str(tensor.dtype))} {tuple(tensor.shape)}"


class OperationLog(TorchDispatchMode):
    """Records each operation that computes something; views and allocations are not.

    With annotate, each is also a range of the profiler named "operation N", so that
    kernels can be attributed to operations."""
    active = None

    def __init__(self, annotate=False):
        super().__init__()
        self.operations, self.annotate, self.paused = [], annotate, False

    def __enter__(self):
        OperationLog.active = self
        return super().__enter__()

    def __exit__(self, *exception):
        OperationLog.active = None
        return super().__exit__(*exception)

    def record(self, name, tensors, output):
        self.operations.append(Operation(name, tuple(map(describe, tensors)),
                                         describe(output)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if self.paused or name.startswith("empty") or is_view(func._schema):
            return func(*args, **(kwargs or {}))
        span = contextlib.nullcontext()
        if self.annotate:
            span = torch.profiler.record_function(f"operation {len(self.operations)}")
        with span:
            output = func(*args, **(kwargs or {}))
        flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
        self.record(name, [t for t in flat if isinstance(t, torch.Tensor)], output)
        return output


def is_view(schema):
    """Whether an operation returns another look at its input."""
    alias = schema.returns[0].alias_info if schema.returns else None
    return alias is not None and not alias.is_write


def as_one_operation(name, function, *tensors):
    """Runs what a CPU needs several operations for, and logs it as the one it stands for."""
    log = OperationLog.active
    if log is None:
        return function(*tensors)
    log.paused = True
    output = function(*tensors)
    log.paused = False
    log.record(name, tensors, output)
    return output


def logged_operations(shape, seed=1, device="cpu"):
    """The operations of one eager step at pos = prefill."""
    handle = build_layer(make_weights(shape, seed, device), make_cache(shape, seed, device),
                         shape.cfg(), shape.max_seq_len)
    x = make_x(shape, seed, shape.prefill, device)
    with OperationLog() as log:
        layer_step(handle, x, shape.prefill)
    return log.operations


# ------------------------------------------------------------------------------ profiler

class Activity(typing.NamedTuple):
    """Something the GPU did."""
    name: str
    kind: str            # "kernel", "gpu_memcpy" or "gpu_memset"
    start: float         # us
    duration: float      # us
    correlation: int     # joins it with the call that launched it


HELPERS = ("splitkreduce", "splitk_reduce", "reduce_splitk")  # lower case, parts of names


def is_helper(name):
    """Whether a kernel only finishes what another began, inside a library call."""
    return any(part in name.lower() for part in HELPERS)


def complete_events(trace):
    return [e for e in trace.get("traceEvents", []) if e.get("ph") == "X"]


def activities(trace):
    """The device activities of a Chrome trace (a dict), in the order they started."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [Activity(e["name"], e["cat"], float(e["ts"]), float(e["dur"]),
                      int(e.get("args", {}).get("correlation", -1)))
             for e in complete_events(trace) if e.get("cat") in kinds]
    return sorted(found, key=lambda a: a.start)


def attribute(trace):
    """{number of an operation: its activities}: which range each was launched in."""
    ranges = [(float(e["ts"]), float(e["ts"]) + float(e["dur"]), int(e["name"].split()[1]))
              for e in complete_events(trace)
              if e.get("cat") == "user_annotation" and e["name"].startswith("operation ")]
    launched_at = {int(e["args"]["correlation"]): float(e["ts"])
                   for e in complete_events(trace)
                   if e.get("cat") in ("cuda_runtime", "cuda_driver")
                   and "correlation" in e.get("args", {})}
    owned = {}
    for a in activities(trace):
        at = launched_at.get(a.correlation, math.nan)
        number = next((n for start, end, n in ranges if start <= at <= end), -1)
        owned.setdefault(number, []).append(a)
    return owned


def device_trace(function):
    """The profiler's trace (a dict) of what `function` makes the GPU do."""
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


CONTROL = dict(kernel=16, gpu_memcpy=3, gpu_memset=2)


def control_region():
    """16 kernels, 3 copies and 2 fills on the current stream, no more and no less."""
    driver = ctypes.CDLL("libcuda.so.1")
    a, b = torch.ones(4096, device="cuda"), torch.ones(4096, device="cuda")
    size = ctypes.c_size_t(a.numel() * a.element_size())

    def run():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for _ in range(CONTROL["kernel"]):
            a.add_(1)
        for _ in range(CONTROL["gpu_memcpy"]):
            check_driver(driver.cuMemcpyDtoDAsync_v2(ctypes.c_uint64(b.data_ptr()),
                                                     ctypes.c_uint64(a.data_ptr()), size, stream))
        for _ in range(CONTROL["gpu_memset"]):
            check_driver(driver.cuMemsetD8Async(ctypes.c_uint64(b.data_ptr()),
                                                ctypes.c_ubyte(0), size, stream))
    return run


def check_driver(status):
    if status:
        raise RuntimeError(f"the CUDA driver returned {status}")


def count_kinds(found):
    return {kind: sum(a.kind == kind for a in found) for kind in CONTROL}


def prove_profiler():
    """What the profiler counts of the control region, after one run to warm it up."""
    run = control_region()
    device_trace(run)
    return count_kinds(activities(device_trace(run)))


# ------------------------------------------------------------------------------ measures

def relative_error(a, b):
    """||a - b|| / ||b||, in fp32 as the contract says; in float64 where b is."""
    dtype = torch.float64 if b.dtype == torch.float64 else torch.float32
    a, b = a.reshape(-1).to(dtype), b.reshape(-1).to(dtype)
    return float((a - b).norm() / b.norm())


def row_error(row, exact):
    """The worst relative error of a cache row (n_kv, hd) over its KV heads."""
    return worst([relative_error(a, b) for a, b in zip(row, exact)])


def half_ulp(exact):
    """Half a unit in the last place of bf16 at each element of a float64 tensor."""
    _, exponent = torch.frexp(exact)
    return torch.ldexp(torch.ones_like(exact), exponent - 9)


def element_excess(row, layer):
    """The largest error of an element of K over half an ulp + 2**-8 of its pair's length:
    at most 1 where K was computed and rotated in fp32 and rounded once."""
    bound = half_ulp(layer.k_row) + layer.pair_norm / 256
    return float(((row.double() - layer.k_row).abs() / bound).max())


def worst(values, count=None):
    """The largest value; NaN where one is NaN or there are not `count` of them."""
    values = list(values or [])
    if not values or (count is not None and len(values) != count):
        return math.nan
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def percentile(values, q):
    """By linear interpolation; q in [0, 1]."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


# --------------------------------------------------------------------------------- gates
# A gate looks at what was measured, a dict, and gives its name, its limit, the value and
# whether it passes. Nothing measured is NaN, and NaN passes nowhere.

class Gate(typing.NamedTuple):
    name: str
    limit: str
    value: float
    passed: bool


def number(value):
    return math.nan if value is None else float(value)


def at_most(name, value, limit, unit=""):
    value = number(value)
    return Gate(name, f"<= {limit:g}{unit}", value, bool(value <= limit))


def at_least(name, value, limit, unit=""):
    value = number(value)
    return Gate(name, f">= {limit:g}{unit}", value, bool(value >= limit))


def exactly(name, value, limit):
    value = number(value)
    return Gate(name, f"= {limit:g}", value, bool(value == limit))


TOLERANCE = 1.5e-2           # the contract's, against eager
EXACT_TOLERANCE = 5e-3       # against float64
COMPARED, PROFILED, TIMED, REPEATS, SETS = 8, 4, 32, 20, 3
SAMPLES = 9                  # of TIMED steps each


def gate_profiler(m):
    counted = m.get("control")
    wrong = sum(abs(counted.get(kind, 0) - CONTROL[kind]) for kind in CONTROL) if counted else None
    return exactly("profiler: control activities miscounted", wrong, 0)


def gate_compared(m):
    return at_most("compared steps: worst error against eager",
                   worst(m.get("compared_errors"), COMPARED), TOLERANCE)


def gate_output_form(m):
    return exactly("outputs of another shape, type or device", m.get("misshapen_outputs"), 0)


def gate_launches(m):
    value = number(m.get("launches_per_step"))
    return Gate("launches a step", "0 < n <= 2", value, bool(0 < value <= 2.0))


def gate_dominant(m):
    return at_least("share of device time in one kernel", m.get("dominant_share"), 0.95)


def gate_last_timed(m):
    return at_most("last timed step: error against eager", m.get("last_timed_error"), TOLERANCE)


def gate_timed_rows(m):
    return at_most("timed steps: worst cache row against eager",
                   worst(m.get("timed_row_errors"), TIMED), TOLERANCE)


def gate_copy(m):
    value = number(m.get("copy_tbs"))
    return Gate("copy bandwidth measured, TB/s", "> 0", value, bool(0 < value < math.inf))


def gate_time(m):
    value = number(m.get("us_median"))
    return Gate("time of a step measured, us", "> 0", value, bool(0 < value < math.inf))


def gate_exact(m):
    return at_most("compared steps: worst error against float64",
                   worst(m.get("exact_errors"), COMPARED), EXACT_TOLERANCE)


def gate_rows(m):
    return at_most("cache rows: worst error against float64",
                   worst(m.get("cache_row_errors"), COMPARED), EXACT_TOLERANCE)


def gate_other_rows(m):
    return exactly("other cache elements changed", m.get("other_cache_changes"), 0)


def gate_x(m):
    return exactly("elements of x changed", m.get("x_changes"), 0)


def gate_weights(m):
    return exactly("elements of the weights changed", m.get("weight_changes"), 0)


def gate_fresh(m):
    return exactly("outputs changed by later steps", m.get("overwritten_outputs"), 0)


def gate_repeats(m):
    return exactly(f"of {REPEATS} repeats, different in a bit", m.get("different_repeats"), 0)


def gate_late_x(m):
    return at_most("x written late on the caller's stream: error", m.get("late_x_error"),
                   TOLERANCE)


def gate_host_wait(m):
    return at_most("layer_step returns while the GPU is busy", m.get("busy_call_ms"), 20, " ms")


def gate_host_time(m):
    return at_most("host time of a call", m.get("host_us_median"), 15, " us")


def gate_rotation(m):
    return at_most(f"{SETS} weight sets in turn: worst error against eager",
                   worst(m.get("rotation_errors"), SETS), TOLERANCE)


def gate_failures(m):
    failures = m.get("failures")
    return exactly("parts that raised an exception", None if failures is None else len(failures),
                   0)


CONTRACT_GATES = (gate_profiler, gate_compared, gate_output_form, gate_launches,
                  gate_dominant, gate_last_timed, gate_copy, gate_time)
OTHER_GATES = (gate_exact, gate_rows, gate_other_rows, gate_timed_rows, gate_x, gate_weights,
               gate_fresh, gate_repeats, gate_late_x, gate_host_wait, gate_host_time,
               gate_rotation, gate_failures)


def judge(measured):
    """All gates on what was measured, and whether every one passes."""
    gates = [gate(measured) for gate in CONTRACT_GATES + OTHER_GATES]
    return gates, all(gate.passed for gate in gates)


# --------------------------------------------------------------------- grading a submission

def load_submission(path):
    """A submission is one Python file with build_layer and layer_step."""
    path = pathlib.Path(path).resolve()
    spec = importlib.util.spec_from_file_location("graded_submission", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for entry in ("build_layer", "layer_step"):
        if not callable(getattr(module, entry, None)):
            raise AttributeError(f"{path.name} has no {entry}")
    return module


def poison_allocator(shape, device):
    """Leaves NaN in the memory that the next small allocations are likely to get."""
    if torch.device(device).type == "cuda":
        together = [torch.full((1, shape.d), math.nan, dtype=dtype, device=device)
                    for dtype in (BF16, torch.float32) for _ in range(4)]
        together.clear()


class Grading:
    """One submission, one shape, one device; each measure_ method returns a part of what
    the gates look at. Those that need no GPU run on a CPU as well."""

    def __init__(self, submission, shape, seed, device):
        self.submission, self.shape, self.seed, self.device = submission, shape, seed, device
        self.weights = make_weights(shape, seed, device)
        self.cache = make_cache(shape, seed, device)     # never written
        self.first = shape.prefill                       # position of the first step

    def handle(self, module=None, weights=None, cache=None):
        """A new handle of a module (the submission unless another is given) on its own
        copy of the cache: (handle, that copy)."""
        module, cache = module or self.submission, clone_cache(cache or self.cache)
        return module.build_layer(weights or self.weights, cache, self.shape.cfg(),
                                  self.shape.max_seq_len), cache

    def drop(self, handle):
        if hasattr(self.submission, "teardown"):
            self.submission.teardown(handle)

    def x(self, pos, seed=None):
        return make_x(self.shape, seed or self.seed, pos, self.device)

    def good_form(self, out):
        return (isinstance(out, torch.Tensor) and tuple(out.shape) == (1, self.shape.d)
                and out.dtype in (BF16, torch.float32)
                and out.device.type == torch.device(self.device).type)

    def measure_steps(self):
        """COMPARED steps beside the eager and the float64 layer, each on its own cache;
        after each, every byte of the submission's cache is accounted for."""
        handle, cache = self.handle()
        packed = {}
        if hasattr(self.submission, "bytes_read"):   # one that does not read its weights in bf16
            packed["weight_bytes_read"] = self.submission.bytes_read(handle)
        eager, _ = self.handle(sys.modules[__name__])
        exact_cache = clone_cache(self.cache)
        exact = ExactLayer(self.weights, exact_cache, self.shape.cfg(), self.shape.max_seq_len)
        expected = clone_cache(self.cache)    # the initial cache with the rows written so far
        m = dict(packed, compared_errors=[], exact_errors=[], eager_exact_errors=[],
                 cache_row_errors=[], k_element_excess=[], other_cache_changes=0, x_changes=0,
                 misshapen_outputs=0, overwritten_outputs=0)
        kept = []                             # each output, and its copy when it was returned
        for pos in range(self.first, self.first + COMPARED):
            x = self.x(pos)
            x_given = x.clone()
            poison_allocator(self.shape, self.device)
            out = self.submission.layer_step(handle, x_given, pos)
            m["misshapen_outputs"] += not self.good_form(out)
            kept.append((out, out.clone()))
            eager_out, exact_out = layer_step(eager, x, pos), exact.step(x, pos)
            m["compared_errors"].append(relative_error(out, eager_out))
            m["exact_errors"].append(relative_error(out, exact_out))
            m["eager_exact_errors"].append(relative_error(eager_out, exact_out))
            m["x_changes"] += differing(x, x_given)
            k_row, v_row = (t[0, :, pos] for t in cache[0])
            m["cache_row_errors"].append(worst([row_error(k_row, exact.k_row),
                                                row_error(v_row, exact.v_row)]))
            m["k_element_excess"].append(element_excess(k_row, exact))
            for mine, theirs in zip(expected[0], cache[0]):
                mine[:, :, pos] = theirs[:, :, pos]
                m["other_cache_changes"] += differing(mine, theirs)
        m["k_element_excess"] = worst(m["k_element_excess"])
        m["overwritten_outputs"] = sum(differing(out, copy) > 0 for out, copy in kept)
        self.drop(handle)
        return m

    def measure_repeats(self):
        """The same step REPEATS times from the same handle, after the first."""
        handle, _ = self.handle()
        x = self.x(self.first)
        first = self.submission.layer_step(handle, x, self.first).clone()
        different = 0
        for _ in range(REPEATS):
            poison_allocator(self.shape, self.device)
            different += differing(first, self.submission.layer_step(handle, x, self.first)) > 0
        if bool(first.isnan().any()):
            different = REPEATS
        self.drop(handle)
        return dict(different_repeats=different)

    def measure_unchanged(self):
        return dict(weight_changes=changed_weights(self.weights, self.shape, self.seed))

    # What follows needs a GPU.

    def measure_profiler(self):
        return dict(control=prove_profiler())

    def measure_launches(self):
        """Everything the GPU does in PROFILED steps: kernels, copies and fills."""
        handle, _ = self.handle()
        xs = [self.x(self.first + i) for i in range(PROFILED)]
        kept = []

        def run():
            for i, x in enumerate(xs):
                kept.append(self.submission.layer_step(handle, x, self.first + i))
        run()
        found = activities(device_trace(run))
        self.drop(handle)
        return summarise_launches(found, PROFILED)

    def eager_run(self, weights, cache, seed):
        """The eager layer through TIMED steps with its own cache: (last output, cache)."""
        eager, own = self.handle(sys.modules[__name__], weights, cache)
        for pos in range(self.first, self.first + TIMED):
            out = layer_step(eager, self.x(pos, seed), pos)
        return out, own

    def measure_time(self):
        """One handle, one weight set: SAMPLES times TIMED steps; the last is validated."""
        handle, cache = self.handle()
        xs = [self.x(self.first + i) for i in range(TIMED)]

        def sample():
            for i, x in enumerate(xs):
                out = self.submission.layer_step(handle, x, self.first + i)
            return out
        times, last = timed_samples(sample)
        expected, expected_cache = self.eager_run(self.weights, self.cache, self.seed)
        rows = [worst([row_error(a[0, :, pos], b[0, :, pos])
                       for a, b in zip(cache[0], expected_cache[0])])
                for pos in range(self.first, self.first + TIMED)]
        self.drop(handle)
        return dict(summarise_times("us", [t / TIMED for t in times]), timed_row_errors=rows,
                    last_timed_error=relative_error(last, expected))

    def measure_rotation(self):
        """SETS handles on independently drawn weights and caches, stepped in turn, so
        that no weight is still in the L2 cache when its turn comes."""
        sets = []
        for i in range(SETS):
            seed = self.seed + 101 * i
            weights = self.weights if i == 0 else make_weights(self.shape, seed, self.device)
            cache = self.cache if i == 0 else make_cache(self.shape, seed, self.device)
            handle, _ = self.handle(None, weights, cache)
            xs = [self.x(self.first + j, seed) for j in range(TIMED)]
            sets.append((handle, weights, cache, seed, xs))

        def sample():
            for i in range(TIMED):
                last = [self.submission.layer_step(handle, xs[i], self.first + i)
                        for handle, _, _, _, xs in sets]
            return last
        times, last = timed_samples(sample)
        errors = [relative_error(out, self.eager_run(weights, cache, seed)[0])
                  for out, (_, weights, cache, seed, _) in zip(last, sets)]
        for handle, *_ in sets:
            self.drop(handle)
        return dict(summarise_times("us_rotation", [t / TIMED / SETS for t in times]),
                    rotation_errors=errors, clocks_after=clocks())

    def measure_host_time(self):
        """How long layer_step keeps the caller, in bursts of TIMED calls without waiting."""
        handle, _ = self.handle()
        xs = [self.x(self.first + i) for i in range(TIMED)]
        calls = []
        for burst in range(6):
            torch.cuda.synchronize()
            for i, x in enumerate(xs):
                start = time.perf_counter_ns()
                self.submission.layer_step(handle, x, self.first + i)
                calls.append((burst, (time.perf_counter_ns() - start) / 1000))
        torch.cuda.synchronize()
        self.drop(handle)
        warm = [us for burst, us in calls if burst > 0]
        return dict(host_us_median=statistics.median(warm), host_us_p90=percentile(warm, 0.9))

    def measure_stream(self):
        """x is written by work queued on the caller's own stream behind a long delay. A
        step that runs on another stream, or copies x early, sees the wrong x."""
        handle, _ = self.handle()
        eager, _ = self.handle(sys.modules[__name__])
        pos = self.first
        x_right, x_wrong = self.x(pos), self.x(pos + 1)
        x = x_wrong.clone()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.submission.layer_step(handle, x, pos)       # loads whatever loads lazily
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            poison_allocator(self.shape, self.device)
            torch.cuda._sleep(200_000_000)                   # cycles: about 0.1 s
            x.copy_(x_right)
            start = time.perf_counter()
            out = self.submission.layer_step(handle, x, pos)
            busy = time.perf_counter() - start
            seen = out.clone()                               # as the caller's next work would
        torch.cuda.synchronize()
        self.drop(handle)
        return dict(late_x_error=relative_error(seen, layer_step(eager, x_right, pos)),
                    busy_call_ms=busy * 1000)

    def measure_bandwidth(self):
        copy = copy_bandwidth(self.device)
        return dict(copy_tbs=copy, **read_bandwidth())


# The profiler comes late: once it has run, every launch of the process takes longer.
GPU_PARTS = ("steps", "host_time", "time", "rotation", "bandwidth", "repeats", "stream",
             "profiler", "launches", "unchanged")


def measure(grading, parts=GPU_PARTS, progress=lambda part: None):
    """What all parts measured, in one dict; a part that raises is named in `failures`."""
    measured = dict(failures={})
    for part in parts:
        progress(part)
        try:
            measured.update(getattr(grading, "measure_" + part)())
        except Exception as error:
            measured["failures"][part] = f"{type(error).__name__}: {error}"
    return measured


def summarise_launches(found, steps):
    """Counts and shares of the activities of `steps` steps; nothing found is a failure."""
    total = sum(a.duration for a in found)
    by_name = {}
    for a in found:
        by_name[a.name] = by_name.get(a.name, 0.0) + a.duration
    kernels = {name: time for name, time in by_name.items()
               if any(a.name == name and a.kind == "kernel" for a in found)}
    dominant = max(kernels, key=kernels.get) if kernels else None
    return dict(launches_per_step=len(found) / steps if found else math.nan,
                launch_kinds=count_kinds(found), dominant_kernel=dominant,
                dominant_share=kernels[dominant] / total if dominant and total > 0 else math.nan)


def timed_samples(sample):
    """([us of each sample], what the last one returned), after two to warm up."""
    for _ in range(2):
        last = sample()
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        last = sample()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return times, last


def summarise_times(name, times):
    return {f"{name}_median": statistics.median(times), f"{name}_p10": percentile(times, 0.1),
            f"{name}_p90": percentile(times, 0.9)}


def copy_bandwidth(device, size=1 << 31):
    """TB/s of a device-to-device copy of `size` bytes of random data, read + write."""
    source = torch.randint(0, 2**62, (size // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    times, _ = timed_samples(lambda: target.copy_(source))
    return 2 * size / statistics.median(times) / 1e6


def read_bandwidth():
    """TB/s of the best read-only stream, from stage 7's driver where it is built."""
    driver = ROOT / "build" / "gpu" / "stage7" / "driver"
    if not driver.exists():
        return dict(read_tbs=None)
    run = subprocess.run([str(driver), "--probe"], stdin=subprocess.DEVNULL, timeout=120,
                         capture_output=True, text=True, errors="replace")
    figures = parse_probe(run.stdout) if run.returncode == 0 else (None, None)
    return dict(zip(("probe_copy_tbs", "read_tbs"), figures))


def parse_probe(text):
    """(copy, read) in TB/s from the last line of nothing but two numbers, both positive;
    what the driver says before and after it (its verdict) does not matter."""
    found = re.findall(r"^[ \t]*(\d+\.\d+),(\d+\.\d+)[ \t\r]*$", text, re.M)
    copy, read = map(float, found[-1]) if found else (0.0, 0.0)
    return (copy, read) if copy > 0 and read > 0 else (None, None)


def derive(measured, shape):
    """Tokens/s and distances from the floor, from what was measured. The copy floor is over
    the contract's bytes; the read limit over the bytes that a step reads, which are fewer for
    a submission that packs its weights and says so by bytes_read(handle)."""
    size = read = shape.floor_bytes(TIMED)
    derived = dict(floor_bytes=size)
    if measured.get("weight_bytes_read"):
        read = size - shape.weight_bytes() - 4 * shape.d + measured["weight_bytes_read"]
        derived["read_bytes"] = read
        if read < size:
            derived["fewer_bytes"] = (
                f"a step reads {read} bytes, {read / size:.3f} of the {size} that the contract's "
                "formula counts; the copy floor is over the latter, the read limit over the former")
    for name in ("us", "us_rotation"):
        us = measured.get(f"{name}_median")
        if us:
            derived[f"tokens_per_s_{name}"] = 1e6 / us
            for limit in ("copy", "read"):
                if measured.get(f"{limit}_tbs"):
                    moved = read if limit == "read" else size
                    derived[f"x_{limit}_{name}"] = us / (moved / measured[f"{limit}_tbs"] / 1e6)
    if any(derived.get(f"x_read_{name}", 1) < 1 for name in ("us", "us_rotation")):
        derived["suspicious"] = "less time than reading the bytes takes: check the measurement"
    return derived


# ---------------------------------------------------------------------------- provenance

def output_of(*command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
        return run.stdout.strip() if run.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def clocks():
    """SM and memory clock now and at most, as the driver's tool gives them."""
    return output_of("nvidia-smi", "-i", str(torch.cuda.current_device()), "--format=csv,noheader",
                     "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem")


def commit():
    """The commit measured: $COMMIT where it is set, for a copied tree can have an older history
    beside it; else what git says, with + when files differ from it."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    known = output_of("git", "rev-parse", "--short=12", "HEAD")
    if not known:
        return "unknown"
    return known + ("+" if output_of("git", "status", "--porcelain", "-uno") else "")


def provenance(protocol):
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    now = datetime.datetime.now(datetime.timezone.utc)
    return dict(gpu=torch.cuda.get_device_name(), driver=driver.split("\n")[0] or "unknown",
                cuda=torch.version.cuda, torch=torch.__version__, clocks=clocks() or "unknown",
                commit=commit(), date=now.strftime("%Y-%m-%dT%H:%M:%SZ"), protocol=protocol)


def without_nan(value):
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_whole(path, write):
    """Calls write(file) on a temporary file beside path, then renames it."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path, content):
    text = json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


# ------------------------------------------------------------------------------ commands

def need_gpu(command):
    if not torch.cuda.is_available():
        print(f"{command}: no GPU that PyTorch can use", file=sys.stderr)
        sys.exit(2)


def shape_of(args, steps=0):
    """The shape that the options ask for; room for `steps` steps unless --max-seq says."""
    room = args.max_seq or max(args.prefill + steps + 3, 8)
    if args.prefill + steps > room:
        sys.exit(f"--max-seq {room} has no room for {steps} steps after {args.prefill} rows")
    if args.n_q % args.n_kv:
        sys.exit(f"--n-q {args.n_q} is not a multiple of --n-kv {args.n_kv}")
    return Shape(d=args.d, ffn=args.ffn, n_q=args.n_q, n_kv=args.n_kv, hd=args.hd,
                 theta=args.theta, prefill=args.prefill, max_seq_len=room)


def check_generator(shape, seed, library):
    """Elements in which the C generator and this file's differ, over all tensors."""
    wrong = 0
    for name, (size, offset, scale) in weight_recipe(shape).items():
        arguments = (TENSOR_ID[name], math.prod(size), seed, offset, scale)
        wrong += differing(generate(*arguments), oracle_generate(library, *arguments))
    size = shape.n_kv * shape.max_seq_len * shape.hd
    for tensor, count in ((10, size), (11, size), (1000 + shape.prefill, shape.d)):
        wrong += differing(generate(tensor, count, seed), oracle_generate(library, tensor, count,
                                                                          seed))
    return wrong


def check_steps(shape, seed, steps, device="cpu", library=None):
    """One dict of errors a step: eager, float64 form and C oracle, each on its own cache."""
    cfg, room = shape.cfg(), shape.max_seq_len
    weights, cache = make_weights(shape, seed), make_cache(shape, seed)
    oracle_cache = clone_cache(cache)
    oracle = Oracle(weights, oracle_cache, cfg, room, library)
    there = dict(layers=[{n: t.to(device) for n, t in weights["layers"][0].items()}])
    eager_cache, exact_cache = ([tuple(t.clone().to(device) for t in cache[0])]
                                for _ in range(2))
    eager, exact = build_layer(there, eager_cache, cfg, room), ExactLayer(there, exact_cache,
                                                                         cfg, room)
    for pos in range(shape.prefill, shape.prefill + steps):
        x = make_x(shape, seed, pos)
        e, f = layer_step(eager, x.to(device), pos).cpu(), exact.step(x.to(device), pos).cpu()
        o = oracle.step(x, pos)
        rows = [worst([row_error(a[0, :, pos].cpu(), b) for a, b in
                       zip(c[0], (exact.k_row.cpu(), exact.v_row.cpu()))])
                for c in (eager_cache, oracle_cache)]
        caches = sum(differing(a.cpu(), b) for a, b in zip(exact_cache[0], oracle_cache[0]))
        yield dict(pos=pos, eager_float64=relative_error(e, f), eager_oracle=relative_error(e, o),
                   float64_oracle=relative_error(f, o), eager_row=rows[0], oracle_row=rows[1],
                   cache_bits=caches)


CHECK_LIMITS = dict(eager_float64=TOLERANCE, eager_oracle=TOLERANCE, float64_oracle=1e-10,
                    eager_row=TOLERANCE, oracle_row=EXACT_TOLERANCE, cache_bits=0)


def command_check(args):
    shape = shape_of(args, args.steps)
    library = load_oracle()
    wrong = check_generator(shape, args.seed, library)
    print(f"inputs that differ between C and Python: {wrong}")
    good = wrong == 0
    print("  pos  " + "  ".join(f"{name:>14}" for name in CHECK_LIMITS))
    for errors in check_steps(shape, args.seed, args.steps, args.device, library):
        print(f"{errors['pos']:5d}  " + "  ".join(f"{errors[n]:14.3g}" for n in CHECK_LIMITS))
        good = good and all(errors[n] <= limit for n, limit in CHECK_LIMITS.items())
    print("limit  " + "  ".join(f"{limit:14.3g}" for limit in CHECK_LIMITS.values()))
    print("PASS" if good else "FAIL")
    return 0 if good else 1


def command_operations(args):
    """The 43 operations with the shapes they have; needs no GPU."""
    operations = logged_operations(shape_of(args, 1))
    for i, ((what, name), op) in enumerate(zip(OPERATIONS, operations), 1):
        print(f"{i:2d}  {what:26s} {op.name:9s} {', '.join(op.inputs)} -> {op.output}")
    right = [op.name for op in operations] == [name for _, name in OPERATIONS]
    print(f"{len(operations)} operations" + ("" if right else ", not the ones expected"))
    return 0 if right else 1


def command_bench(args):
    need_gpu("bench")
    shape, device = shape_of(args, TIMED), "cuda"
    grading = Grading(sys.modules[__name__], shape, args.seed, device)
    counted = prove_profiler()
    print(f"profiler, control region: counted {counted}, launched {CONTROL}")
    if counted != CONTROL:
        return 1
    handle, _ = grading.handle()
    xs = [grading.x(shape.prefill + i) for i in range(8)]
    layer_step(handle, xs[0], shape.prefill)
    good = True
    print("  pos  main kernels  helper kernels  copies  fills")
    for i, x in enumerate(xs):
        pos = shape.prefill + i
        found = activities(device_trace(lambda: layer_step(handle, x, pos)))
        kinds, helpers = count_kinds(found), sum(is_helper(a.name) for a in found)
        main = kinds["kernel"] - helpers
        good = good and main == len(OPERATIONS)
        print(f"{pos:5d}  {main:12d}  {helpers:14d}  {kinds['gpu_memcpy']:6d}"
              f"  {kinds['gpu_memset']:5d}")
    good = print_kernels(handle, xs[0], shape.prefill) and good
    measured = dict(grading.measure_time(), **grading.measure_bandwidth())
    derived = derive(measured, shape)
    print(f"eager: {measured['us_median']:.1f} us a step (p10 {measured['us_p10']:.1f},"
          f" p90 {measured['us_p90']:.1f}), {derived['tokens_per_s_us']:.0f} tokens/s,"
          f" {derived['x_copy_us']:.2f} x the copy floor ({measured['copy_tbs']:.2f} TB/s)")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


def print_kernels(handle, x, pos):
    """Each operation with the kernels it launched; True when each launched one main one."""
    log = OperationLog(annotate=True)

    def run():
        with log:
            layer_step(handle, x, pos)
    owned = attribute(device_trace(run))
    good = len(log.operations) == len(OPERATIONS) and -1 not in owned
    for i, ((what, _), op) in enumerate(zip(OPERATIONS, log.operations)):
        mine = owned.get(i, [])
        main = [a for a in mine if not is_helper(a.name)]
        good = good and len(main) == 1
        print(f"{i + 1:2d}  {what:26s} {', '.join(op.inputs)} -> {op.output}")
        for a in mine:
            role = "helper" if is_helper(a.name) else a.kind
            print(f"      {role:7s} {a.duration:7.2f} us  {a.name[:100]}")
    for a in owned.get(-1, []):
        print(f"      of no operation: {a.kind} {a.name[:100]}")
    return good


def command_vectors(args):
    """Inputs and expected outputs; bf16 is stored as its 16 bits."""
    import numpy
    shape = shape_of(args, args.steps)
    cfg, room = shape.cfg(), shape.max_seq_len
    weights, cache = make_weights(shape, args.seed), make_cache(shape, args.seed)
    exact_cache, eager_cache = clone_cache(cache), clone_cache(cache)
    exact = ExactLayer(weights, exact_cache, cfg, room)
    eager = build_layer(weights, eager_cache, cfg, room)
    positions = list(range(shape.prefill, shape.prefill + args.steps))
    xs = [make_x(shape, args.seed, pos) for pos in positions]

    def raw(tensor):
        return bits(tensor).numpy().view("uint16")
    content = {name: raw(t) for name, t in weights["layers"][0].items()}
    content.update(
        config=json.dumps(dict(dataclasses.asdict(shape), seed=args.seed)),
        pos=numpy.array(positions, dtype="int64"), x=raw(torch.cat(xs)),
        k_cache=raw(cache[0][0][0]), v_cache=raw(cache[0][1][0]),
        x_out_float64=torch.stack([exact.step(x, p) for x, p in zip(xs, positions)]).numpy(),
        x_out_eager=raw(torch.cat([layer_step(eager, x, p) for x, p in zip(xs, positions)])),
        k_cache_after=raw(exact_cache[0][0][0]), v_cache_after=raw(exact_cache[0][1][0]))
    write_whole(args.out, lambda file: numpy.savez(file, **content))
    print(f"{args.out}: " + ", ".join(f"{n} {a.shape}" for n, a in content.items()
                                      if n != "config"))
    return 0


PROTOCOL = (f"{COMPARED} compared steps; {PROFILED} profiled; {SAMPLES} samples of {TIMED} "
            f"timed steps after 2, median, p10, p90 from device events, for one weight set "
            f"and for {SETS} in turn; copy of 2 GiB, read + write, in the same run")


def print_grade(gates, measured, derived):
    width = max(len(gate.name) for gate in gates)
    for gate in gates:
        print(f"{'pass' if gate.passed else 'FAIL'}  {gate.name:{width}}  {gate.value:12.6g}"
              f"  {gate.limit}")
    for part, text in measured["failures"].items():
        print(f"in {part}: {text}")
    for name, value in dict(measured, **derived).items():
        if isinstance(value, (int, float, str)) or value is None:
            print(f"      {name:{width}}  "
                  + ("not measured" if value is None else
                     f"{value:12.6g}" if isinstance(value, float) else str(value)))


def command_grade(args):
    need_gpu("grade")
    faulthandler.dump_traceback_later(args.timeout, exit=True, file=2)   # a hang: status 1
    shape = Shape(**SMALL) if args.small else Shape()
    out = args.out or (None if args.small else ROOT / "data" / "grade.json")
    try:
        submission = load_submission(args.submission)
    except Exception as error:
        print(f"{args.submission} does not load: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    grading = Grading(submission, shape, args.seed, "cuda")
    measured = measure(grading, progress=lambda part: print(f"... {part}", flush=True))
    gates, passed = judge(measured)
    derived = derive(measured, shape)
    print_grade(gates, measured, derived)
    content = dict(provenance(PROTOCOL), submission=os.path.relpath(args.submission, ROOT),
                   shape=dataclasses.asdict(shape), gates=[gate._asdict() for gate in gates],
                   measured=measured, derived=derived)
    content["pass"] = passed
    if out:
        write_json(out, content)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


def add_shape_options(parser, **defaults):
    """Options for a shape; the defaults are small enough for a CPU."""
    values = dict(dict(d=256, ffn=512, n_q=8, n_kv=2, hd=64, prefill=5), **defaults)
    for name, value in values.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value,
                            help=f"default {value}")
    parser.add_argument("--max-seq", type=int, default=0, help="cache rows; default: enough")
    parser.add_argument("--theta", type=float, default=500000.0, help="base of RoPE's angles")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs; default 1")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="reference.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, function, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    check = command("check", command_check, "eager, float64 form and C oracle agree: "
                    "prints the errors; exit status 0 or 1")
    add_shape_options(check)
    check.add_argument("--steps", type=int, default=3, help="positions from --prefill on")
    check.add_argument("--device", default="cpu", help="of the eager and the float64 form")
    contract = {name: getattr(Shape(), name)
                for name in ("d", "ffn", "n_q", "n_kv", "hd", "prefill")}
    operations = command("operations", command_operations, "the 43 operations of an eager "
                         "step with their shapes")
    add_shape_options(operations)
    bench = command("bench", command_bench, "times the eager layer on a GPU and lists its "
                    "kernels; exit status 2 without a GPU")
    add_shape_options(bench, **contract)
    vectors = command("vectors", command_vectors, "writes inputs and float64 outputs to a "
                      ".npz file; bf16 as 16-bit integers")
    add_shape_options(vectors)
    vectors.add_argument("--steps", type=int, default=3, help="positions from --prefill on")
    vectors.add_argument("--out", default="vectors.npz", help="the file; default vectors.npz")
    grade = command("grade", command_grade, "all gates on a submission; exit status 0 when "
                    "all pass, 1 when one fails, 2 without a GPU")
    grade.add_argument("submission", nargs="?", metavar="SUBMISSION",
                       default=str(ROOT / "stages" / "stage7" / "submission.py"),
                       help="a Python file; default stages/stage7/submission.py")
    grade.add_argument("--small", action="store_true", help="a small shape, for trying "
                       "submissions out; writes no file unless --out is given")
    grade.add_argument("--out", help="the file written; default data/grade.json")
    grade.add_argument("--seed", type=int, default=1, help="of the inputs; default 1")
    grade.add_argument("--timeout", type=float, default=540, help="seconds; default 540")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
