"""The eager layer: right, but in 43 launches."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from spoil import ROOT, load  # noqa: E402

reference = load(ROOT / "reference.py")
build_layer, layer_step = reference.build_layer, reference.layer_step
