"""Stage 0 rounds where eager PyTorch rounds: the two agree far more closely than either does
with double precision."""
import ctypes
import sys

import pytest
import torch

import layers
import tools
from layers import ref

LIMIT = 1e-3   # relative error against the eager layer
SHAPES = (ref.Shape(d=192, ffn=320, n_q=6, n_kv=2, hd=64, prefill=70),
          ref.Shape(d=256, ffn=448, n_q=8, n_kv=1, hd=128, prefill=33))


def errors(library, shape, device, stream, steps=3):
    """Of stage 0 against eager, each with caches of its own, at consecutive positions."""
    p, handle = ctypes.c_void_p, ctypes.c_void_p()
    library.layer_step.argtypes = (p, p, ctypes.c_int64, p, p)
    weights = ref.make_weights(shape, 1, device)
    caches = [ref.make_cache(shape, 1, device) for _ in range(2)]
    eager = ref.build_layer(weights, caches[0], shape.cfg(), shape.max_seq_len)
    config = ref.OracleConfig(shape.d, shape.ffn, shape.n_q, shape.n_kv, shape.hd,
                              shape.max_seq_len, shape.eps, shape.theta, 0)
    w = weights["layers"][0]
    pointers = ref.OracleWeights(**{name: w[name].data_ptr() for name in w})
    k, v = (p(t.data_ptr()) for t in caches[1][0])
    assert library.layer_build(ctypes.byref(handle), ctypes.byref(config),
                               ctypes.byref(pointers), k, v) == 0
    found = []
    for pos in range(shape.prefill, shape.prefill + steps):
        x = ref.make_x(shape, 1, pos, device)
        out = torch.full_like(x, float("nan"))
        assert library.layer_step(handle, x.data_ptr(), pos, out.data_ptr(), stream) == 0
        assert library.cudaDeviceSynchronize() == 0 if device == "cpu" else True
        found.append(ref.relative_error(out, ref.layer_step(eager, x, pos)))
    assert library.layer_teardown(handle) == 0
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.n_q}-{s.n_kv}-{s.hd}")
def test_against_eager_on_the_cpu(shape):
    for error in errors(layers.library("stage0"), shape, "cpu", None):
        assert error <= LIMIT


@pytest.mark.gpu
def test_against_eager_on_the_gpu():
    tools.build("build/gpu/stage0/liblayer.so")
    verdict, output = tools.watched([sys.executable, __file__], limit=120)
    assert verdict == "passed", output


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    found = errors(ctypes.CDLL(str(tools.ROOT / "build" / "gpu" / "stage0" / "liblayer.so")), ref.Shape(), "cuda",
                   torch.cuda.current_stream().cuda_stream)
    assert all(error <= LIMIT for error in found), found
