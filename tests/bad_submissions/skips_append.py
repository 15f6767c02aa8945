"""Computes the right output, but leaves the cache as it was."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import Handle as build_layer  # noqa: E402


def layer_step(handle, x, pos):
    k, v = handle.k_cache[:, :, pos].clone(), handle.v_cache[:, :, pos].clone()
    out = handle.step(x, pos)
    handle.k_cache[:, :, pos], handle.v_cache[:, :, pos] = k, v
    return out
