"""Leaves its result in the input."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import Handle as build_layer  # noqa: E402


def layer_step(handle, x, pos):
    out = handle.step(x, pos)
    x.copy_(out)
    return out
