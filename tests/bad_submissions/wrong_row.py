"""Also writes the new row of K behind the position it belongs to."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import Handle as build_layer  # noqa: E402


def layer_step(handle, x, pos):
    out = handle.step(x, pos)
    handle.k_cache[:, :, pos + 1] = handle.k_cache[:, :, pos]
    return out
