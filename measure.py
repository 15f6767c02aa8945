#!/usr/bin/env python3
"""Measures the ladder, and what others make of the same layer, on one GPU in one process.

    measure.py ladder [--stages "0 5 7"]   all stages, or some   -> data/ladder.csv
    measure.py peers                       PyTorch and cuBLAS    -> data/peers.csv
    measure.py shapes [--only "llama 72b"] stage 7, other layers -> data/shapes.csv
    measure.py queue                       a load beside a stream-> data/queue.csv

All draw SETS sets of weights and caches and let them take turns, so that no step finds
its weights in the L2 cache. A sample is STEPS steps at the positions prefill,
prefill + 1, ...; its time is taken by events on the device and divided by STEPS. Whatever
is timed is checked against float64 before, and its last timed step after.

Times are in us a step, bandwidths in TB/s (1e12 bytes a second), sizes in bytes.
Exit status: 0 measured and written, 1 a check failed, 2 no GPU; nothing is written
unless all went well, and then the file is replaced whole.
"""
import argparse
import contextlib
import csv
import ctypes
import math
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading

try:
    import torch
except ImportError:
    sys.exit(f"measure.py: {sys.executable} has no PyTorch; on Debian, after make deps, "
             "/usr/bin/python3 has")

import reference

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "plots"))
import tables  # noqa: E402

STEPS, SETS = reference.TIMED, reference.SETS
WARM_UPS = 2          # samples of each, not counted
PROFILED = 4          # steps under the profiler
LAST_GRAPH_STAGE = 6  # later stages are one launch, and their table has no graph column


class Failed(Exception):
    """A check that did not hold."""


def say(text):
    print(text, flush=True)


def require(holds, text):
    if not holds:
        raise Failed(text)


def set_of(i, sets=SETS):
    """Which set the i-th step of a sample uses; the last step of a sample uses set 0."""
    return (STEPS - 1 - i) % sets


# ------------------------------------------------------------------------------- inputs

class Inputs:
    """What all contestants share: weights[set], caches[set] (never written; each
    contestant has its own copy), and xs: (STEPS, d) bf16, x of the step at prefill + i."""

    def __init__(self, shape, seed, device="cuda", sets=SETS):
        self.shape, self.seed, self.device = shape, seed, device
        self.weights = [reference.make_weights(shape, seed + s, device) for s in range(sets)]
        self.caches = [reference.make_cache(shape, seed + s, device) for s in range(sets)]
        self.xs = torch.cat([reference.make_x(shape, seed, shape.prefill + i, device)
                             for i in range(STEPS)])


def step_bytes(shape):
    """Bytes a step must move once: all weights, and the rows of K and V that it attends
    to, in the mean over a sample."""
    row = 2 * shape.n_kv * shape.hd * 2
    return shape.weight_bytes() + 4 * shape.d + row * (2 * shape.prefill + STEPS + 1) // 2


# -------------------------------------------------------------------------- contestants

class Contestant:
    """Something that can be timed. A subclass gives `step` and `errors`."""
    name = title = ""
    sets = SETS                       # of weights and caches that take turns
    tolerance = reference.TOLERANCE   # of the output and the cache rows, against float64

    def step(self, i, s):
        """Queues the step at position prefill + i on set s; returns its output."""
        raise NotImplementedError

    def errors(self, out, i, s):
        """Relative errors of that step, the output's first."""
        raise NotImplementedError

    def poison(self):
        """NaN where the next outputs will be, as far as that can be known."""

    def lead_in(self):
        """What is queued just before a sample, so that the GPU is busy as timing starts."""
        for i in range(self.sets):
            self.step(i, set_of(i, self.sets))

    def sample(self):
        for i in range(STEPS):
            self.last = self.step(i, set_of(i, self.sets))

    def check(self, out, i, s, when):
        """Fails unless the output and the rows are within the tolerance; returns the
        error of the output."""
        found = self.errors(out, i, s)
        require(reference.worst(found) <= self.tolerance,
                f"{self.name}: {when}: relative errors "
                f"{', '.join(f'{e:.2e}' for e in found)}, at most {self.tolerance:g} allowed")
        return found[0]

    def check_first(self):
        errors = []
        for s in range(self.sets):
            self.poison()
            errors.append(self.check(self.step(0, s), 0, s, f"first step on set {s}"))
        return max(errors)

    def check_last(self):
        return self.check(self.last, STEPS - 1, set_of(STEPS - 1), "last timed step")


class LayerContestant(Contestant):
    """One that computes the whole layer, on its own copies of the caches."""

    def __init__(self, inputs):
        self.inputs, self.sets = inputs, len(inputs.weights)
        self.caches = [reference.clone_cache(cache) for cache in inputs.caches]

    def errors(self, out, i, s):
        """Against the float64 layer, which attends to the initial cache and to the rows
        that this contestant has appended since."""
        shape, cache = self.inputs.shape, reference.clone_cache(self.inputs.caches[s])
        pos = shape.prefill + i
        for mine, own in zip(cache[0], self.caches[s][0]):
            mine[:, :, shape.prefill:pos] = own[:, :, shape.prefill:pos]
        exact = reference.ExactLayer(self.inputs.weights[s], cache, shape.cfg(),
                                     shape.max_seq_len)
        expected = exact.step(self.inputs.xs[i:i + 1], pos)
        k_row, v_row = (t[0, :, pos] for t in self.caches[s][0])
        return [reference.relative_error(out, expected),
                reference.row_error(k_row, exact.k_row),
                reference.row_error(v_row, exact.v_row)]

    def check_first(self):
        """Then all positions of all sets, so that later steps find no row empty."""
        error = super().check_first()
        for s in range(self.sets):
            for i in range(STEPS):
                self.step(i, s)
        return error


# A stage says what it is in its driver.

FACTS = dict(STAGE=int, TITLE=str, TOLERANCE=float, LAUNCHES=int)


def facts_of(stage, root=ROOT):
    """{name: value} of the #defines at the head of stages/stageN/driver.c."""
    path = root / "stages" / f"stage{stage}" / "driver.c"
    require(path.exists(), f"there is no stages/stage{stage}/driver.c")
    text, facts = path.read_text(encoding="utf-8"), {}
    for name, kind in FACTS.items():
        found = re.search(rf"^#define {name} (.+)$", text, re.M)
        require(found, f"stages/stage{stage}/driver.c does not define {name}")
        facts[name] = kind(found.group(1).strip().strip('"'))
    require(facts["STAGE"] == stage, f"stages/stage{stage} says it is stage {facts['STAGE']}")
    return facts


def load_library(stage):
    """The C interface of a stage (layer.h); its names stay its own."""
    path = ROOT / "build" / "gpu" / f"stage{stage}" / "liblayer.so"
    require(path.exists(), f"{path.relative_to(ROOT)} is missing: make ladder builds it")
    library, p = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL), ctypes.c_void_p
    library.layer_build.argtypes = (ctypes.POINTER(p), ctypes.POINTER(reference.OracleConfig),
                                    ctypes.POINTER(reference.OracleWeights), p, p)
    library.layer_step.argtypes = (p, p, ctypes.c_int64, p, p)
    library.layer_teardown.argtypes = (p,)
    library.layer_strerror.argtypes = (ctypes.c_int,)
    library.layer_strerror.restype = ctypes.c_char_p
    return library


class Stage(LayerContestant):
    """A stage of the ladder: a handle for each set; outputs in results: (STEPS, d)."""

    def __init__(self, stage, inputs):
        super().__init__(inputs)
        facts = facts_of(stage)
        self.number, self.name, self.title = stage, f"stage {stage}", facts["TITLE"]
        self.tolerance, self.launches = facts["TOLERANCE"], facts["LAUNCHES"]
        self.library = load_library(stage)
        self.results = torch.full_like(inputs.xs, math.nan)
        row = inputs.xs[0].numel() * 2   # bytes
        self.x_at = [inputs.xs.data_ptr() + i * row for i in range(STEPS)]
        self.out_at = [self.results.data_ptr() + i * row for i in range(STEPS)]
        self.handles = [self.build(s) for s in range(self.sets)]
        self.bytes = step_bytes(inputs.shape)
        if hasattr(self.library, "layer_weight_bytes"):   # it packs its weights
            self.library.layer_weight_bytes.argtypes = (ctypes.c_void_p,)
            self.library.layer_weight_bytes.restype = ctypes.c_int64
            self.bytes += (self.library.layer_weight_bytes(self.handles[0])
                           - inputs.shape.weight_bytes() - 4 * inputs.shape.d)

    def ok(self, status, what):
        if status:
            raise Failed(f"{self.name}: {what}: "
                         f"{self.library.layer_strerror(status).decode()}")

    def build(self, s):
        shape, handle = self.inputs.shape, ctypes.c_void_p()
        config = reference.OracleConfig(shape.d, shape.ffn, shape.n_q, shape.n_kv, shape.hd,
                                        shape.max_seq_len, shape.eps, shape.theta, 0)
        w = self.inputs.weights[s]["layers"][0]
        weights = reference.OracleWeights(**{name: w[name].data_ptr() for name in w})
        k, v = (t.data_ptr() for t in self.caches[s][0])
        self.ok(self.library.layer_build(ctypes.byref(handle), ctypes.byref(config),
                                         ctypes.byref(weights), k, v), "build")
        return handle

    def poison(self):
        self.results.fill_(math.nan)

    def step(self, i, s):
        stream = torch.cuda.current_stream().cuda_stream
        self.ok(self.library.layer_step(self.handles[s], self.x_at[i],
                                        self.inputs.shape.prefill + i, self.out_at[i], stream),
                "step")
        return self.results[i]

    def teardown(self):
        for handle in self.handles:
            self.ok(self.library.layer_teardown(handle), "teardown")
        self.handles = []


class InGraph(Contestant):
    """A sample of another contestant, captured in a CUDA graph."""

    def __init__(self, contestant):
        self.of, self.name, self.title = contestant, contestant.name + " in a graph", \
            contestant.title
        self.tolerance = contestant.tolerance
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            contestant.sample()      # whatever is made on the first call
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            contestant.sample()
        self.last = contestant.last

    def poison(self):
        for out in self.last if isinstance(self.last, list) else [self.last]:
            out.fill_(math.nan)

    def lead_in(self):
        self.graph.replay()

    def sample(self):
        self.graph.replay()

    def errors(self, out, i, s):
        return self.of.errors(out, i, s)


# --------------------------------------------------------------------------- measuring

def timed(contestant):
    """us a step of one sample."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    contestant.lead_in()
    contestant.poison()
    start.record()
    contestant.sample()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / STEPS


def in_turns(contestants, samples):
    """{name: [us a step of each sample]}: each round times every contestant once."""
    times = {contestant.name: [] for contestant in contestants}
    for turn in range(-WARM_UPS, samples):
        for contestant in contestants:
            us = timed(contestant)
            if turn >= 0:
                times[contestant.name].append(us)
    return times


def noise_of(contestant, samples):
    """The medians of two runs of the same contestant, one after the other: the noise."""
    pair = [statistics.median(in_turns([contestant], samples)[contestant.name])
            for _ in range(2)]
    say(f"noise: {contestant.name} twice: {pair[0]:.2f} and {pair[1]:.2f} us, "
        f"{100 * abs(pair[1] - pair[0]) / min(pair):.2f} % apart")
    return pair


def count_launches(contestant):
    """Everything the GPU does in a step (kernels, copies, fills), by the profiler."""
    def run():
        contestant.kept = [contestant.step(i, set_of(i, contestant.sets))
                           for i in range(PROFILED)]
    found = reference.activities(reference.device_trace(run))
    require(found, f"{contestant.name}: the profiler saw nothing")
    return len(found) / PROFILED


def prove_profiler():
    counted = reference.prove_profiler()
    require(counted == reference.CONTROL,
            f"the profiler counted {counted} of a control region of {reference.CONTROL}")
    say(f"profiler: control region counted right: {counted}")


def bandwidths():
    """(TB/s of a large copy, read + write; TB/s of the best read-only stream)."""
    copy = reference.copy_bandwidth("cuda")
    torch.cuda.empty_cache()
    read = reference.read_bandwidth()["read_tbs"]
    require(read, "the read-only probe gave nothing: try build/gpu/stage7/driver --probe")
    say(f"bandwidth: copy {copy:.3f} TB/s, read-only {read:.3f} TB/s")
    return copy, read


def best(*pairs):
    return tuple(max(values) for values in zip(*pairs))


# --------------------------------------------------------------------------------- rows

def row_of(first, title, times, size, limits, contract=None, **more):
    """A row of a table. times: us of each sample; size: bytes that must move once;
    limits: (copy, read) in TB/s; contract: the contract's bytes, for a whole layer."""
    us, (copy, read) = statistics.median(times), limits
    return dict(first, title=title, us_median=us, us_p10=reference.percentile(times, 0.1),
                us_p90=reference.percentile(times, 0.9), bytes=size, copy_tbs=copy,
                read_tbs=read, tokens_per_s=1e6 / us if contract else None,
                x_copy_floor=us * copy * 1e6 / contract if contract else None,
                x_read_limit=us * read * 1e6 / size, **more)


def print_row(name, row):
    """A line of the progress: what a row says."""
    def part(key, form):
        return "" if row.get(key) is None else form.format(row[key])
    say(f"{name}: {part('launches', '{:.0f} launches, ')}{row['us_median']:.2f} us "
        f"({row['us_p10']:.2f} to {row['us_p90']:.2f})"
        f"{part('us_graph_median', ', in a graph {:.2f}')}"
        f"{part('x_copy_floor', ', {:.3f} x the copy floor')}, "
        f"{row['x_read_limit']:.3f} x the read limit, error {row['rel_err']:.1e}")
    if row["x_read_limit"] < 1:
        say(f"{name}: faster than its bytes can be read: suspect the measurement")


def header_of(protocol, **more):
    """The # lines of a table, in the order of tables.PROVENANCE, then the rest."""
    known = reference.provenance(protocol)
    return dict({key: known[key] for key in tables.PROVENANCE}, torch=known["torch"], **more)


def protocol_of(samples):
    return (f"{samples} samples of {STEPS} steps after {WARM_UPS}, in turns in one process, "
            f"{SETS} sets of weights and caches in rotation; median, p10, p90 of device "
            "events; copy of 2 GiB, read + write, and read-only stream in the same run")


# ------------------------------------------------------------------------------- ladder

def stages_there(root=ROOT):
    return sorted(int(p.parent.name[5:]) for p in root.glob("stages/stage?/driver.c"))


def measure_ladder(numbers, shape, seed, samples):
    """(header, rows) of data/ladder.csv for the stages of these numbers."""
    inputs = Inputs(shape, seed)
    stages, graphs, errors = [], {}, {}
    for number in numbers:
        stage = Stage(number, inputs)
        errors[number] = stage.check_first()
        say(f"{stage.name}: {stage.title}: first step on {SETS} sets, error "
            f"{errors[number]:.1e} of float64 (at most {stage.tolerance:g})")
        stages.append(stage)
    for stage in stages:
        if stage.number <= LAST_GRAPH_STAGE:
            graphs[stage.number] = InGraph(stage)
    limits = bandwidths()
    noise = noise_of(stages[-1], samples)
    times = in_turns([c for stage in stages for c in (stage, graphs.get(stage.number)) if c],
                     samples)
    for stage in stages:
        timed(stage)     # one more sample of each, now that all have had their turns
        errors[stage.number] = max(errors[stage.number], stage.check_last())
        if stage.number in graphs:
            timed(graphs[stage.number])
            graphs[stage.number].check_last()
    limits = best(limits, bandwidths())
    # The profiler comes last, so that nothing of it is left in what was timed.
    prove_profiler()
    rows = []
    for stage in stages:
        counted = count_launches(stage)
        require(counted == stage.launches,
                f"{stage.name}: {counted:g} launches a step, not the {stage.launches} it claims")
        graph = graphs.get(stage.number)
        rows.append(row_of(
            dict(stage=stage.number), stage.title, times[stage.name],
            getattr(stage, "bytes", None) or step_bytes(shape), limits,
            shape.floor_bytes(STEPS), launches=counted, rel_err=errors[stage.number],
            us_graph_median=statistics.median(times[graph.name]) if graph else None))
        print_row(stage.name, rows[-1])
    graphs.clear()
    for stage in stages:
        stage.teardown()
    return header_of(protocol_of(samples),
                     noise=f"{stages[-1].name} twice: {pair_text(noise)}"), rows


def pair_text(pair):
    return f"{pair[0]:.2f} and {pair[1]:.2f} us"


def command_ladder(args):
    chosen = sorted({int(word) for word in args.stages.replace(",", " ").split()})
    numbers = chosen or stages_there()
    header, rows = measure_ladder(numbers, reference.Shape(), args.seed, args.samples)
    tables.write_whole(args.out, tables.text_of(tables.LADDER, header, rows))
    say(f"{args.out}: {len(rows)} stages")


# -------------------------------------------------------------------------------- peers

COMPILE_SECONDS = 150   # torch.compile is given up after so long


class Eager(LayerContestant):
    """reference.py's layer, one kernel for each operation."""
    name, title = "eager", "PyTorch, eager"

    def __init__(self, inputs):
        super().__init__(inputs)
        shape = inputs.shape
        self.handles = [reference.build_layer(w, cache, shape.cfg(), shape.max_seq_len)
                        for w, cache in zip(inputs.weights, self.caches)]

    def poison(self):
        reference.poison_allocator(self.inputs.shape, self.inputs.device)

    def step(self, i, s):
        return reference.layer_step(self.handles[s], self.inputs.xs[i:i + 1],
                                    self.inputs.shape.prefill + i)


def layer_for_a_compiler(w, k_cache, v_cache, cos, sin, x, pos, shape):
    """The layer as one writes it for torch.compile: pos is an int64 (1,) on the device and
    attention masks the whole cache, so that one compilation serves all positions.

    k_cache, v_cache: (n_kv, max_seq_len, hd), written in place; cos, sin: (max_seq_len, hd).
    """
    n_q, n_kv, hd = shape.n_q, shape.n_kv, shape.hd
    cos, sin = cos[pos], sin[pos]
    h = reference.rms_norm(x, w["in_norm"], shape.eps)
    q, k, v = h @ w["q"].T, h @ w["k"].T, h @ w["v"].T
    q = reference.rope(q.view(n_q, hd), cos, sin)
    k = reference.rope(k.view(n_kv, hd), cos, sin)
    k_cache.index_copy_(1, pos, k.view(n_kv, 1, hd))
    v_cache.index_copy_(1, pos, v.view(n_kv, 1, hd))
    scores = torch.bmm(q.view(n_kv, n_q // n_kv, hd), k_cache.transpose(1, 2)).float()
    hidden = torch.arange(k_cache.shape[1], device=x.device) > pos
    scores = (scores / math.sqrt(hd)).masked_fill(hidden, -math.inf)
    p = torch.softmax(scores, dim=-1).to(x.dtype)
    x = x + torch.bmm(p, v_cache).view(1, n_q * hd) @ w["o"].T
    h = reference.rms_norm(x, w["post_norm"], shape.eps)
    gate = torch.nn.functional.silu(h @ w["gate"].T)
    return x + (gate * (h @ w["up"].T)) @ w["down"].T


class Compiled(LayerContestant):
    """torch.compile of that; `function` is the compiled one."""
    name, title = "torch.compile", "PyTorch, torch.compile"

    def __init__(self, inputs, function):
        super().__init__(inputs)
        shape, self.function = inputs.shape, function
        self.tables = reference.rope_tables(shape.hd, shape.theta, range(shape.max_seq_len),
                                            inputs.device, torch.float32)
        self.positions = torch.arange(shape.prefill, shape.prefill + STEPS,
                                      device=inputs.device)

    def poison(self):
        reference.poison_allocator(self.inputs.shape, self.inputs.device)

    def step(self, i, s):
        k_cache, v_cache = (t[0] for t in self.caches[s][0])
        return self.function(self.inputs.weights[s]["layers"][0], k_cache, v_cache, *self.tables,
                             self.inputs.xs[i:i + 1], self.positions[i:i + 1], self.inputs.shape)


class Product(Contestant):
    """One matrix times one vector through cuBLAS: (1, n) @ (m, n)^T, bf16."""
    tolerance = reference.EXACT_TOLERANCE

    def __init__(self, name, title, matrices, vector):
        self.name, self.title, self.matrices, self.vector = name, title, matrices, vector
        self.bytes = matrices[0].numel() * 2

    def step(self, i, s):
        return self.vector @ self.matrices[s].T

    def errors(self, out, i, s):
        expected = reference.product64(self.matrices[s], self.vector.view(-1).double())
        return [reference.relative_error(out, expected)]


class Products(Contestant):
    """The four products of a layer, one after the other."""
    name, title = "cublas", "the four cuBLAS products alone"
    tolerance = reference.EXACT_TOLERANCE

    def __init__(self, products):
        self.products, self.bytes = products, sum(p.bytes for p in products)

    def step(self, i, s):
        return [product.step(i, s) for product in self.products]

    def errors(self, out, i, s):
        return [reference.worst(e for product, o in zip(self.products, out)
                                for e in product.errors(o, i, s))]


def make_products(inputs):
    """The four: Q, K, V as one matrix, O, gate and up as one, down."""
    layers = [w["layers"][0] for w in inputs.weights]
    products = []
    for number, names in enumerate((("q", "k", "v"), ("o",), ("gate", "up"), ("down",))):
        matrices = [torch.cat([layer[n] for n in names]) if len(names) > 1 else layer[names[0]]
                    for layer in layers]
        columns = matrices[0].shape[1]
        vector = reference.generate(500 + number, columns, inputs.seed, device=inputs.device)
        name = "+".join(names)
        products.append(Product(f"cublas {name}", f"cuBLAS product {name}", matrices,
                                vector.view(1, columns)))
    return products


@contextlib.contextmanager
def at_most_seconds(seconds):
    """Raises TimeoutError in what it encloses when that takes longer. A signal does it,
    and Python takes those in its main thread alone: in another there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise TimeoutError(f"no result after {seconds} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def unless_it_fails(what, make):
    """make(), or None and a line that says why: a compiler can fail in many ways, and
    the other peers still count."""
    try:
        with at_most_seconds(COMPILE_SECONDS):
            made = make()
            torch.cuda.synchronize()
        return made
    except Exception as error:
        say(f"{what}: left out: {type(error).__name__}: {str(error)[:300]}")
        return None


def make_compiled(inputs):
    """The compiled contestant after its first steps."""
    peer = Compiled(inputs, torch.compile(layer_for_a_compiler, fullgraph=True))
    peer.sample()
    return peer


def measure_peers(shape, seed, samples):
    """(header, rows) of data/peers.csv."""
    inputs = Inputs(shape, seed)
    singles = make_products(inputs)
    eager, stage = Eager(inputs), Stage(7, inputs)
    compiled = unless_it_fails("torch.compile", lambda: make_compiled(inputs))
    plain = [eager, compiled, Products(singles), *singles, stage]
    plain = [peer for peer in plain if peer]
    errors = {}
    for peer in plain:
        errors[peer.name] = peer.check_first()
        say(f"{peer.name}: {peer.title}: first step on {SETS} sets, error "
            f"{errors[peer.name]:.1e} of float64 (at most {peer.tolerance:g})")
    graphs = {peer.name: InGraph(peer) for peer in plain if peer not in (stage, compiled)}
    if compiled:
        graphs[compiled.name] = unless_it_fails("torch.compile in a graph",
                                                lambda: InGraph(compiled))
    limits = bandwidths()
    noise = noise_of(stage, samples)
    everyone = [c for peer in plain for c in (peer, graphs.get(peer.name)) if c]
    times = in_turns(everyone, samples)
    for contestant in everyone:
        timed(contestant)
        name = contestant.of.name if isinstance(contestant, InGraph) else contestant.name
        errors[name] = max(errors[name], contestant.check_last())
    limits = best(limits, bandwidths())
    prove_profiler()
    rows = []
    for peer in plain:
        rows += peer_rows(peer, graphs.get(peer.name), times, errors[peer.name], shape, limits)
    for row in rows:
        print_row(row["peer"], row)
    graphs.clear()
    stage.teardown()
    return header_of(protocol_of(samples),
                     noise=f"{stage.name} twice: {pair_text(noise)}"), rows


def peer_rows(peer, graph, times, error, shape, limits):
    """The rows of one peer: eager has one for each way to run it, the others one for the
    faster way, which its title names."""
    launches = count_launches(peer)
    whole = not isinstance(peer, Product)   # the four products stand for a layer, one does not
    size = getattr(peer, "bytes", None) or step_bytes(shape)
    ways = [(peer.name, peer.title, times[peer.name])]
    if graph:
        ways.append((graph.name, peer.title + ", in a CUDA graph", times[graph.name]))
    if not isinstance(peer, Eager):
        _, title, us = min(ways, key=lambda way: statistics.median(way[2]))
        ways = [(peer.name, title, us)]
    rows = [row_of(dict(peer=name), title, us, size, limits,
                   shape.floor_bytes(STEPS) if whole else None, launches=launches,
                   rel_err=error) for name, title, us in ways]
    if not isinstance(peer, LayerContestant):
        rows = [dict(row, tokens_per_s=None) for row in rows]
    return rows


def command_peers(args):
    header, rows = measure_peers(reference.Shape(), args.seed, args.samples)
    tables.write_whole(args.out, tables.text_of(tables.PEERS, header, rows))
    say(f"{args.out}: {len(rows)} rows")


# ------------------------------------------------------------------------------- shapes

# The layers that stage 7 is measured on: name, sizes, keys in the cache.
MODELS = {
    "llama-3-8b": dict(d=4096, ffn=14336, n_q=32, n_kv=8, hd=128),
    "llama-3-70b": dict(d=8192, ffn=28672, n_q=64, n_kv=8, hd=128),
    "llama-3.2-1b": dict(d=2048, ffn=8192, n_q=32, n_kv=8, hd=64),
    "llama-3.2-3b": dict(d=3072, ffn=8192, n_q=24, n_kv=8, hd=128),
    "qwen2.5-7b": dict(d=3584, ffn=18944, n_q=28, n_kv=4, hd=128),
    "qwen2.5-72b": dict(d=8192, ffn=29568, n_q=64, n_kv=8, hd=128),
    "mistral-7b": dict(d=4096, ffn=14336, n_q=32, n_kv=8, hd=128),
}
LENGTHS = {name: (4096,) for name in MODELS}
LENGTHS["llama-3-70b"] = (128, 4096, 32768, 131072)
ROTATED_BYTES, MOST_SETS = 5e9, 8   # sets enough for as many bytes, but no more sets


def shapes_of(only=()):
    """[(name, Shape)], of those whose name contains one of the words, if there are any."""
    return [(name, reference.Shape(prefill=keys, max_seq_len=keys + 128, **sizes))
            for name, sizes in MODELS.items() for keys in LENGTHS[name]
            if not only or any(word in name for word in only)]


def sets_for(shape):
    """How many sets take turns: a small layer needs more of them to leave the L2 cache."""
    return max(SETS, min(MOST_SETS, math.ceil(ROTATED_BYTES / step_bytes(shape))))


def inputs_of(shape, seed, sets):
    """As for the ladder, but for the values, which grow with the square root of the number
    of keys: otherwise their mean is so small that an error of attention would not show."""
    inputs = Inputs(shape, seed, sets=sets)
    for cache in inputs.caches:
        cache[0][1].mul_(math.sqrt(shape.prefill))
    return inputs


def measure_shape(shape, seed, samples, twice=False):
    """(title, us of each sample, error, noise): noise as of the ladder, if asked for."""
    stage = Stage(7, inputs_of(shape, seed, sets_for(shape)))
    error = stage.check_first()
    noise = noise_of(stage, samples) if twice else None
    times = in_turns([stage], samples)[stage.name]
    timed(stage)
    error = max(error, stage.check_last())
    stage.teardown()
    return stage.title, times, error, noise


def launches_of(shape, seed):
    """Launches of a step, by the profiler: what the stage claims, or a failure."""
    stage = Stage(7, inputs_of(shape, seed, 1))
    counted = count_launches(stage)
    stage.teardown()
    require(counted == stage.launches,
            f"{counted:g} launches a step, not the {stage.launches} it claims")
    return counted


def measure_shapes(shapes, seed, samples):
    """(header, rows) of data/shapes.csv for these (name, Shape)."""
    limits, measured, noise = bandwidths(), [], None
    for name, shape in shapes:
        title, times, error, pair = measure_shape(shape, seed, samples, twice=noise is None)
        noise = noise or f"{name}, {shape.prefill} keys, twice: {pair_text(pair)}"
        measured.append((title, times, error))
        torch.cuda.empty_cache()
        say(f"{name}, {shape.prefill} keys, {sets_for(shape)} sets: "
            f"{statistics.median(times):.2f} us, error {error:.1e} of float64")
    limits = best(limits, bandwidths())
    prove_profiler()   # last, as for the ladder
    rows = []
    for (name, shape), (title, times, error) in zip(shapes, measured):
        what = dict(shape=name, d=shape.d, ffn=shape.ffn, n_q=shape.n_q, n_kv=shape.n_kv,
                    hd=shape.hd, keys=shape.prefill, stage=7)
        rows.append(row_of(what, title, times, step_bytes(shape), limits,
                           shape.floor_bytes(STEPS), launches=launches_of(shape, seed),
                           rel_err=error))
        torch.cuda.empty_cache()
        print_row(f"{name}, {shape.prefill} keys", rows[-1])
    protocol = protocol_of(samples).replace(
        f"{SETS} sets", f"{SETS} to {MOST_SETS} sets (of 5 GB together, where 8 are enough)")
    return header_of(protocol.replace("in turns in one process", "one shape after the other"),
                     noise=noise), rows


def command_shapes(args):
    shapes = shapes_of(args.only.replace(",", " ").split())
    require(shapes, f"no shape is called {args.only}; there are {', '.join(MODELS)}")
    header, rows = measure_shapes(shapes, args.seed, args.samples)
    tables.write_whole(args.out, tables.text_of(tables.SHAPES, header, rows))
    say(f"{args.out}: {len(rows)} rows")


# ------------------------------------------------------------------------------ traffic

TRAFFIC = ("stage", "kernel", "bytes_read", "bytes_written", "bytes_predicted")
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# What a driver launches before its 35th step: the inputs of three sets and of 32 steps.
FILLS = 3 * 11 + STEPS


def counted(stage):
    """(kernel, bytes read, bytes written) of device memory, by the hardware counters, for
    each launch of one step of a stage's driver; caches as the kernel before left them."""
    launches = facts_of(stage)["LAUNCHES"]
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv",
               "--page", "raw", "--print-units", "base", "--metrics", ",".join(COUNTERS),
               "--launch-skip", str(FILLS + 34 * launches), "--launch-count", str(launches),
               str(ROOT / f"build/gpu/stage{stage}/driver"), "--quick", "--samples=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    require(len(lines) == launches + 2, f"stage {stage}: ncu counted {len(lines) - 2} launches "
            f"instead of {launches}: {(done.stderr or done.stdout).strip()[-300:]}")
    rows = list(csv.DictReader([lines[0]] + lines[2:]))
    return [(row["Kernel Name"].split("(")[0],
             *(round(float(row[c].replace(",", ""))) for c in COUNTERS)) for row in rows]


def command_traffic(args):
    rows = []
    for stage in [int(word) for word in args.stages.replace(",", " ").split()]:
        kernels = counted(stage)
        rows += [[stage, *kernel, ""] for kernel in kernels]
        total = [sum(kernel[i] for kernel in kernels) for i in (1, 2)]
        rows.append([stage, "the step", *total, step_bytes(reference.Shape())])
        say(f"stage {stage}: {total[0] / 1e6:.1f} MB read, {total[1] / 1e6:.1f} MB written, "
            f"{rows[-1][-1] / 1e6:.1f} MB to be read once")
    header = header_of("ncu on one step of the driver at position 4098, third set of weights, "
                       "no cache flushed between launches; " + ", ".join(COUNTERS))
    text = "".join(f"# {key}: {value}\n" for key, value in header.items())
    text += "".join(",".join(map(str, row)) + "\n" for row in [TRAFFIC, *rows])
    tables.write_whole(args.out, text)


# -------------------------------------------------------------------------------- queue

QUEUE_SECONDS = 300   # the program takes a few
QUEUE_PROTOCOL = (
    "stages/stage7/queue.cu: median of 7 samples of 6 passes over 1.728 GB of random data, 3 buffers "
    "in rotation, one block on each multiprocessor, a ring of 192 KB; beside it one thread of each "
    "block times relaxed loads of words in L2 that nobody writes, 200 ns apart, in the last pass; "
    "cycles of clock64 at the rate that it has beside globaltimer in that pass")


def run_queue():
    """What the program prints: CSV."""
    program = ROOT / "build" / "gpu" / "stage7" / "queue"
    require(program.exists(), f"{program.relative_to(ROOT)} is missing: make queue builds it")
    try:
        done = subprocess.run([str(program)], stdin=subprocess.DEVNULL, timeout=QUEUE_SECONDS,
                              capture_output=True, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        raise Failed(f"the program took more than {QUEUE_SECONDS} s") from None
    require(done.returncode == 0, f"the program ended with {done.returncode}: "
            f"{done.stderr.strip()[-300:]}")
    return done.stdout


def queue_rows(text):
    """The rows of what the program printed, each with its share of the best bandwidth."""
    columns, rows = [name for name in tables.QUEUE if name != "x_best"], []
    for cells in csv.DictReader(text.splitlines()):
        require(list(cells) == columns and None not in cells.values(),
                f"a row is not of {', '.join(columns)}: {cells}")
        try:
            row = {name: float(cell) for name, cell in cells.items()}
        except ValueError as error:
            raise Failed(f"a row has what is no number: {error}") from None
        require(all(math.isfinite(v) and v > 0 for v in row.values()), f"a row is not positive: {cells}")
        rows.append(row)
    require(rows, "the program printed no rows")
    best_tbs = max(row["tbs"] for row in rows)
    return [dict(row, x_best=row["tbs"] / best_tbs) for row in rows]


def measure_queue():
    """(header, rows) of data/queue.csv."""
    rows = queue_rows(run_queue())
    for row in rows:
        say("copies of {copy_kb:.0f} KB, {in_flight_kb:.0f} KB in flight: {tbs:.3f} TB/s, {x_best:.3f} of "
            "the best; a load {load_median_ns:.0f} ns, {load_p90_ns:.0f}, {load_p99_ns:.0f}".format(**row))
    return header_of(QUEUE_PROTOCOL), rows


def command_queue(args):
    header, rows = measure_queue()
    tables.write_whole(args.out, tables.text_of(tables.QUEUE, header, rows))
    say(f"{args.out}: {len(rows)} rows")


# ----------------------------------------------------------------------------- commands

def parse(arguments):
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ladder = commands.add_parser("ladder", help="all stages in turns -> data/ladder.csv")
    ladder.add_argument("--stages", default="", help='some stages only: "0 5 7"')
    ladder.set_defaults(function=command_ladder, out=str(ROOT / "data" / "ladder.csv"))
    peers = commands.add_parser("peers", help="PyTorch and cuBLAS beside stage 7 -> "
                                "data/peers.csv")
    peers.set_defaults(function=command_peers, out=str(ROOT / "data" / "peers.csv"))
    traffic = commands.add_parser("traffic", help="bytes of device memory a step reads and "
                                  "writes, by the hardware counters -> data/traffic.csv")
    traffic.add_argument("--stages", default="4 5", help="which; default 4 5")
    traffic.set_defaults(function=command_traffic, out=str(ROOT / "data" / "traffic.csv"))
    shapes = commands.add_parser("shapes", help="stage 7 on other layers -> data/shapes.csv")
    shapes.add_argument("--only", default="", help='those whose name has a word: "70b mistral"')
    shapes.set_defaults(function=command_shapes, out=str(ROOT / "data" / "shapes.csv"))
    queue = commands.add_parser("queue", help="what a load costs beside the stream, by bytes in "
                                "flight -> data/queue.csv")
    queue.set_defaults(function=command_queue, out=str(ROOT / "data" / "queue.csv"))
    for command in (ladder, peers, traffic, shapes, queue):
        command.add_argument("--out", help="the file written", default=argparse.SUPPRESS)
    for command in (ladder, peers, traffic, shapes):   # of queue the program decides
        command.add_argument("--samples", type=int, default=15, help="of each; default 15")
        command.add_argument("--seed", type=int, default=1, help="of the inputs; default 1")
    args = parser.parse_args(arguments)
    if "samples" in args and args.samples < reference.SAMPLES:
        parser.error(f"--samples must be at least {reference.SAMPLES}")
    return args


def main(arguments=None):
    args = parse(arguments)
    if not torch.cuda.is_available():
        print(f"measure.py {args.command}: no GPU that PyTorch can use", file=sys.stderr)
        return 2
    try:
        args.function(args)
    except Failed as failure:
        print(f"measure.py {args.command}: FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
