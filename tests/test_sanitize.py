"""What tests/sanitize.py makes of compute-sanitizer's words; the tool itself needs a GPU."""
import re

import pytest

import mutants
import sanitize
import tools


NO_HAZARD = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


@pytest.mark.parametrize("tool, status, output, passed, end", [
    ("memcheck", 0, "========= ERROR SUMMARY: 0 errors", True, "clean"), ("racecheck", 0, NO_HAZARD, True, "clean"),
    ("memcheck", 99, "========= ERROR SUMMARY: 3 errors", True, "found"),
    ("racecheck", 0, "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", True, "found"),
    ("synccheck", 0, "========= ERROR SUMMARY: 10 errors", True, "found"),
    ("memcheck", 1, "========= ERROR SUMMARY: 0 errors", False, "could not run"),     # the driver did not pass
    ("memcheck", 0, "========= ERROR SUMMARY: 0 errors", False, "could not run"),
    ("racecheck", 99, NO_HAZARD, True, "could not run"),
    ("memcheck", 0, "Error: Device not supported", False, "could not run"), ("memcheck", 0, "", True, "could not run")])
def test_verdicts(tool, status, output, passed, end):
    assert sanitize.verdict(tool, status, output, passed)[0] == end


# In the form in which racecheck prints them, made by hand: its head says how.
REPORTS = (tools.ROOT / "tests" / "racecheck.txt").read_text(encoding="utf-8")
ONE_MORE = """========= Warning: Race reported between Write access at finish_gate_up(const layer_args *, long)+0x10 in kernels.cu:1
=========     and Read access at split_pair(float)+0x20 in kernels.cu:2 [4 hazards]
"""


def judged(reports, errors, warnings=0, passed=True):
    summary = f"========= RACECHECK SUMMARY: {errors} hazards displayed ({errors} errors, {warnings} warnings)"
    end, _, more = sanitize.verdict("racecheck", 99, f"{reports}PASS\n{summary}\n", passed)
    return end, "\n".join(more), sanitize.status_of([end, "clean"])


def test_reports_of_pairs_that_something_orders():
    end, more, status = judged(REPORTS, 4)
    assert (end, status) == ("clean but for 4 reports of 5 pairs that counters or mbarriers order", 0)
    assert "2 of deliver and take_sums: the sums of a chunk: " in more and "1 of deliver and deliver: " in more
    assert "1 of norm_factor and take_vector: a warp's sum" in more and "take_vectorE" in REPORTS   # printed mangled


def test_a_run_that_stopped_counting_is_not_clean():
    stopped = "========= Warning: Maximum number of hazards reached. An environment variable can be used\n"
    end, _, status = judged(REPORTS + stopped, 4, 1)
    assert end == "found; 4 reports, of 5 pairs, all of them ordered, before it stopped counting" and status == 1


@pytest.mark.parametrize("reports, errors, warnings, word", [
    (REPORTS + ONE_MORE, 4, 1, "1 of finish_gate_up and split_pair: NOT LISTED"),
    (REPORTS.replace("bulk_load(void", "fetch(void", 1), 4, 0, "1 of fetch and load_16: NOT LISTED"),
    (REPORTS.replace("at load_16(const", "at (const"), 4, 0, ""),          # a report that is not understood
    (REPORTS, 113, 1, ""), ("", 0, 1, ""), ("", 1, 0, "")],              # reports that were not kept
    ids=["a pair more", "another function", "no name", "some are missing", "no warning", "no error"])
def test_what_is_not_in_the_list_is_found(reports, errors, warnings, word):
    end, more, status = judged(reports, errors, warnings)
    assert end.startswith("found") and status == 1 and word in more


def test_a_report_that_is_not_here_is_counted():
    assert judged(REPORTS, 113, 1)[0] == "found; 4 of 114 reports are here, of 5 pairs, all of them ordered"


def test_listed_pairs_do_not_excuse_a_driver_that_fails():
    assert judged(REPORTS, 4, passed=False)[::2] == ("found", 1)


def test_saved_output_is_judged(tmp_path):
    saved = tmp_path / "racecheck.log"
    for reports, warnings, status in ((REPORTS, 0, 0), (REPORTS + ONE_MORE, 1, 1)):
        saved.write_text(f"{reports}PASS\n========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, {warnings} warning)\n")
        assert tools.run(["python3", "tests/sanitize.py", "--judge", str(saved)])[0] == status


def test_the_list():
    """Both functions of a pair are stage 7's, in one order; what orders them has a fault that takes it away."""
    source = (tools.ROOT / "stages" / "stage7" / "kernels.cu").read_text(encoding="utf-8")
    faults = {name for name, *_ in mutants.MUTANTS}
    for pair, (reason, fault) in sanitize.ORDERED.items():
        assert pair == tuple(sorted(pair)) and fault in faults and reason
        for name in pair:
            assert re.search(rf"^(?:DEVICE|APART) [\w \n]*\b{name}\(", source, re.M), name


STUB = """#!/usr/bin/env python3
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
print("PASS")
if tool == "racecheck":
    assert sys.argv[sys.argv.index("--print-limit") + 1] == "0"
    print(open(sys.argv[0] + ".txt").read())
    sys.exit(99)
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.mark.parametrize("more, status, words", [("", 0, "clean but for 4 reports"), (ONE_MORE, 1, "NOT LISTED")],
                         ids=["listed", "a pair more"])
def test_a_whole_run_with_a_pretended_tool(tmp_path, monkeypatch, more, status, words):
    stub = tmp_path / "compute-sanitizer"
    stub.write_text(STUB)
    stub.chmod(0o755)
    count = f"4 hazards displayed (4 errors, {bool(more):d} warnings)"
    (tmp_path / "compute-sanitizer.txt").write_text(f"{REPORTS}{more}========= RACECHECK SUMMARY: {count}\n")
    for name, value in (("ROOT", tmp_path), ("find", lambda: str(stub))):
        monkeypatch.setattr(sanitize, name, value)
    monkeypatch.setenv("COMMIT", "0123456789ab")
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--out", str(tmp_path / "sanitize.txt"), "--driver", "none"])
    assert sanitize.main() == status
    text = (tmp_path / "sanitize.txt").read_text()
    assert words in text and "# commit: 0123456789ab\n" in text and "memcheck: clean: ERROR" in text
    assert (tmp_path / "build" / "sanitize-racecheck.log").read_text().count("Race reported") == 4 + bool(more)


def test_without_a_gpu_or_without_the_tool_it_says_so(tmp_path):
    if not tools.gpu_is_here():
        status, output = tools.make("sanitize")
        assert status == 2 and "sanitize: no NVIDIA GPU here" in output
    if not sanitize.find():
        out = tmp_path / "sanitize.txt"
        status, output = tools.run(["python3", "tests/sanitize.py", "--out", str(out)])
        assert status == 2 and "no compute-sanitizer" in output and not out.exists()
