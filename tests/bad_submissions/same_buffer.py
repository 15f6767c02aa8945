"""Returns the same memory from every call."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import Handle as build_layer  # noqa: E402


def layer_step(handle, x, pos):
    out = handle.step(x, pos)
    handle.last = out if handle.last is None else handle.last
    return handle.last.copy_(out)
