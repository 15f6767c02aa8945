"""Counts what passed, failed and was skipped, and skips what needs a GPU where there is none. What
the tests of a GPU find is kept in the file that CHECK_GPU names: as they finish beside it, with .new
to its name and a last line that says how far they came; in its place when all have run."""
import os
import subprocess
import sys

import pytest

import tools

notes = []          # lines for the file: a verdict and the time of each test, and what it says to note
counts = {"passed": 0, "failed": 0, "skipped": 0}
GPU_ORDER = ("test_submission.py", "test_stages.py", "test_gpu.py")   # first what tells most


def kept_in():
    return os.environ.get("CHECK_GPU") if tools.gpu_is_here() else None


@pytest.hookimpl(tryfirst=True)   # before xdist looks at the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))   # one after the other
            if not tools.gpu_is_here():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and nvcc"))
    if kept_in():
        items.sort(key=lambda item: GPU_ORDER.index(item.path.name) if item.path.name in GPU_ORDER else len(GPU_ORDER))


def pytest_collection_finish(session):
    keep.of, keep.done, keep.where = len(session.items), 0, None


def pytest_runtest_logreport(report):
    if report.failed:
        counts["failed"] += 1
    elif report.skipped:
        counts["skipped"] += 1
    elif report.when == "call":
        counts["passed"] += 1
    if report.when == "call" or not report.passed:
        notes.append(f"{report.outcome:8} {report.duration:6.1f} s  {report.nodeid}")
        notes.extend(" " * 19 + line for line in report.capstdout.splitlines() if line.startswith("note: "))


def pytest_collectreport(report):
    if report.failed:
        counts["failed"] += 1
    elif report.skipped:
        counts["skipped"] += 1


def counted():
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**counts)


def pytest_runtest_logfinish():
    if kept_in():
        keep.done += 1
        keep(kept_in())


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("check: " + counted())


def keep(path):
    """Writes what is known so far, with where and when it was got; when it is all, in place of the last."""
    keep.where = keep.where or subprocess.run(
        [sys.executable, "-c", "import reference; [print(f'# {k}: {v}') for k, v in reference.provenance("
         "'pytest -m gpu; each test that may hang in a process of its own, under a watchdog').items()]"],
        cwd=tools.ROOT, stdout=subprocess.PIPE, text=True).stdout.rstrip() or "# gpu: unknown"
    whole = keep.done == keep.of
    end = counted() if whole else f"interrupted after {keep.done} of {keep.of}: {counted()}"
    new = tools.ROOT / (path + ".new")
    new.write_text("\n".join([keep.where, *notes, end]) + "\n", encoding="utf-8")
    if whole and counts["passed"] + counts["failed"]:
        new.replace(tools.ROOT / path)


@pytest.fixture
def copy(tmp_path):
    """A scratch copy of the project in a folder with a space and letters beyond ASCII."""
    return tools.copy_to(tmp_path / "eine Schicht für ένα")
