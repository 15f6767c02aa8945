"""Stage 0 rounds where eager PyTorch rounds: the two agree far more closely than either does
with double precision."""
import ctypes
import sys

import pytest
import torch

import layers
import tools
from layers import ref

LIMIT = 1e-3   # relative error against the eager layer, where both round the same sums
# On a GPU cuBLAS adds in another order. Sums that differ in their last bits are rounded to
# different bf16 here and there, and each of the roundings that follow passes more of it on:
# in data/cascade.csv noise of 1e-7 in the sums makes 1.2e-3 of the result, and ten times as
# much or forty makes 1.7e-3. The new rows of the cache are rounded twice only.
LIMIT_OF_A_CASCADE = 2.5e-3
SHAPES = (ref.Shape(d=192, ffn=320, n_q=6, n_kv=2, hd=64, prefill=70),
          ref.Shape(d=256, ffn=448, n_q=8, n_kv=1, hd=128, prefill=33))


def errors(library, shape, device, stream, steps=3):
    """Of stage 0 against eager, each with caches of its own, at consecutive positions:
    [(relative error of x_out, of the new rows)]."""
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
        error = ref.relative_error(out, ref.layer_step(eager, x, pos))
        rows = [torch.stack([t[0, :, pos] for t in cache[0]]) for cache in caches]
        found.append((error, ref.relative_error(rows[1], rows[0])))
    assert library.layer_teardown(handle) == 0
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.n_q}-{s.n_kv}-{s.hd}")
def test_against_eager_on_the_cpu(shape):
    for error, of_rows in errors(layers.library("stage0"), shape, "cpu", None):
        assert error <= LIMIT and of_rows <= LIMIT


@pytest.mark.gpu
def test_against_eager_on_the_gpu():
    tools.build("build/gpu/stage0/liblayer.so")
    verdict, output = tools.watched([sys.executable, __file__], limit=120)
    assert verdict == "passed", output


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    found = errors(ctypes.CDLL(str(tools.ROOT / "build" / "gpu" / "stage0" / "liblayer.so")), ref.Shape(), "cuda",
                   torch.cuda.current_stream().cuda_stream)
    assert all(error <= LIMIT_OF_A_CASCADE and of_rows <= LIMIT for error, of_rows in found), found
