"""A stage called from Python through its C interface: tensors in its memory, steps, bits.

On the CPU target; or on a GPU where LAYERS_ON=gpu says so, as test_gpu.py does in a process of
its own."""
import ctypes
import functools
import os
import sys

import torch

import tools

sys.path.insert(0, str(tools.ROOT))
import reference as ref  # noqa: E402

BAD_ARGUMENT, BAD_ALIGNMENT, BAD_SHAPE, BAD_POSITION, BAD_DEVICE, NO_MEMORY, CUDA_FAILED = range(1, 8)
NO_BYTES = r"there are no [1-9]\d* bytes of device memory for "   # what is said of NO_MEMORY
GPU = os.environ.get("LAYERS_ON") == "gpu"
SMALL = ref.Shape(d=128, ffn=192, n_q=4, n_kv=2, hd=64, prefill=130, max_seq_len=132)


@functools.lru_cache(None)
def library(stage, sms=2):
    """The stage, for a GPU or with the CPU target, in one library that is loaded once a process."""
    path = os.environ.get("LAYER_LIBRARY")           # of a mutant
    path = path or tools.build(f"build/{'gpu' if GPU else 'cpu/plain'}/{stage}/liblayer.so")
    os.environ["CPU_SMS"] = str(sms)
    lib, p = ctypes.CDLL(str(path)), ctypes.c_void_p
    lib.layer_step.argtypes = (p, p, ctypes.c_int64, p, p)
    lib.layer_step_at.argtypes = (p, p, p, p, p)
    lib.layer_teardown.argtypes = lib.layer_status.argtypes = (p,)
    lib.layer_strerror.restype = ctypes.c_char_p
    if not GPU:
        lib.cudaFree.argtypes = (p,)
        lib.cudaMalloc.argtypes = (p, ctypes.c_size_t)
    return lib


def synchronize(lib):
    if GPU:
        torch.cuda.synchronize()
    else:
        assert lib.cudaDeviceSynchronize() == 0


class Memory:
    """Tensors in the CPU target's memory, each an allocation of its own; freed with this."""

    def __init__(self, lib):
        self.lib, self.addresses = lib, []

    def tensor(self, like):
        if GPU:
            return like.cuda()
        address, size = ctypes.c_void_p(), like.numel() * like.element_size()
        assert self.lib.cudaMalloc(ctypes.byref(address), size) == 0
        self.addresses.append(address)
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        own = torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        return own.copy_(like)

    def __del__(self):
        for address in self.addresses:
            self.lib.cudaFree(address)


def free_bytes(lib):
    if GPU:
        return torch.cuda.mem_get_info()[0]
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert lib.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


class Layer:
    """A layer over copies of the given tensors; step() returns a copy of the output."""

    def __init__(self, stage, shape, weights, cache, blocks=0):
        self.lib, self.shape = library(stage), shape
        self.memory = Memory(self.lib)
        tensor = self.memory.tensor
        self.w = {name: tensor(t) for name, t in weights["layers"][0].items()}
        self.k, self.v = (tensor(t) for t in cache[0])
        self.x, self.out = (tensor(torch.zeros(1, shape.d, dtype=torch.bfloat16)) for _ in range(2))
        self.at = tensor(torch.zeros(1, dtype=torch.int64))
        self.blocks, self.handle = blocks, None
        status = self.build()
        assert status == 0, self.lib.layer_strerror(status)

    def build(self):
        s, handle = self.shape, ctypes.c_void_p(1)
        config = ref.OracleConfig(s.d, s.ffn, s.n_q, s.n_kv, s.hd, s.max_seq_len, s.eps, s.theta, self.blocks)
        pointers = ref.OracleWeights(**{name: t.data_ptr() for name, t in self.w.items()})
        status = self.lib.layer_build(ctypes.byref(handle), ctypes.byref(config), ctypes.byref(pointers),
                                      ctypes.c_void_p(self.k.data_ptr()), ctypes.c_void_p(self.v.data_ptr()))
        self.handle = handle.value
        return status

    def step(self, x, pos, on_device=False):
        self.x.copy_(x)
        self.out.view(torch.int16).fill_(-1)          # NaN
        arguments = [self.handle, self.x.data_ptr(), pos, self.out.data_ptr(), None]
        if on_device:
            self.at.fill_(pos)
            arguments[2] = self.at.data_ptr()
        call = self.lib.layer_step_at if on_device else self.lib.layer_step
        status = call(*arguments)
        assert status == 0, self.lib.layer_strerror(status)
        synchronize(self.lib)
        return self.out.cpu().clone()

    def caches(self):
        """Copies of K and V."""
        synchronize(self.lib)
        return self.k.cpu().clone(), self.v.cpu().clone()

    def rows(self, pos):
        """Copies of the rows (n_kv, hd) of K and V."""
        return tuple(tensor[0, :, pos].cpu().clone() for tensor in (self.k, self.v))

    def teardown(self):
        status, self.handle = self.lib.layer_teardown(self.handle), None
        return status

    def __del__(self):
        if self.handle:
            self.lib.layer_teardown(self.handle)
