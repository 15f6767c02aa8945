"""What tests/sanitize.py makes of compute-sanitizer's words; the tool itself needs a GPU."""
import pytest

import sanitize
import tools


@pytest.mark.parametrize("status, output, passed, end", [
    (0, "========= ERROR SUMMARY: 0 errors", True, "clean"),
    (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True, "clean"),
    (99, "========= ERROR SUMMARY: 3 errors", True, "found"),
    (0, "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", True, "found"),
    (0, "========= ERROR SUMMARY: 10 errors", True, "found"),
    (1, "========= ERROR SUMMARY: 0 errors", False, "could not run"),     # the driver did not pass
    (0, "========= ERROR SUMMARY: 0 errors", False, "could not run"),
    (0, "Error: Device not supported", False, "could not run"), (0, "", True, "could not run")])
def test_verdicts(status, output, passed, end):
    assert sanitize.verdict(status, output, passed)[0] == end


def test_without_a_gpu_or_without_the_tool_it_says_so(tmp_path):
    if not tools.gpu_is_here():
        status, output = tools.make("sanitize")
        assert status == 2 and "sanitize: no NVIDIA GPU here" in output
    if not sanitize.find():
        out = tmp_path / "sanitize.txt"
        status, output = tools.run(["python3", "tests/sanitize.py", "--out", str(out)])
        assert status == 2 and "no compute-sanitizer" in output and not out.exists()
