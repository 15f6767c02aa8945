"""What the bad submissions spoil: stage 7's submission where it exists and there is a GPU,
else the eager layer of reference.py. $GOOD_SUBMISSION chooses another file."""
import importlib.util
import os
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(path):
    name = "good_" + path.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def good_submission():
    stage7 = ROOT / "stages" / "stage7" / "submission.py"
    default = stage7 if stage7.exists() and torch.cuda.is_available() else ROOT / "reference.py"
    return load(pathlib.Path(os.environ.get("GOOD_SUBMISSION", default)))


class Handle:
    """A good handle beside the caller's cache and a place for what was returned last."""

    def __init__(self, weights, kv_cache, cfg, max_seq_len):
        self.good = good_submission()
        self.inner = self.good.build_layer(weights, kv_cache, cfg, max_seq_len)
        self.k_cache, self.v_cache = kv_cache[0]
        self.last = None

    def step(self, x, pos):
        return self.good.layer_step(self.inner, x, pos)
