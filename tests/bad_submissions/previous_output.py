"""Returns what the step before should have returned."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import Handle as build_layer  # noqa: E402


def layer_step(handle, x, pos):
    out = handle.step(x, pos)
    previous, handle.last = handle.last, out
    return out if previous is None else previous
