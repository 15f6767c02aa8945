"""Counts what passed, failed and was skipped, and skips what needs a GPU where there is none. What
the tests of a GPU found is kept in the file that CHECK_GPU names."""
import os
import subprocess
import sys

import pytest

import tools

notes = []          # lines for the file: a verdict and the time of each test, and what it says to note
counts = {"passed": 0, "failed": 0, "skipped": 0}


@pytest.hookimpl(tryfirst=True)   # before xdist looks at the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))   # one after the other
            if not tools.gpu_is_here():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and nvcc"))


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


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        counted = "{passed} passed, {failed} failed, {skipped} skipped".format(**counts)
        if os.environ.get("CHECK_GPU") and tools.gpu_is_here() and counts["passed"] + counts["failed"]:
            keep(os.environ["CHECK_GPU"], counted)
        print("check: " + counted)


def keep(path, counted):
    """Writes the result with where and when it was got, in place of the last one."""
    where = subprocess.run(
        [sys.executable, "-c", "import reference; [print(f'# {k}: {v}') for k, v in reference.provenance("
         "'pytest -m gpu; each test that may hang in a process of its own, under a watchdog').items()]"],
        cwd=tools.ROOT, stdout=subprocess.PIPE, text=True).stdout or "# gpu: unknown"
    new = tools.ROOT / (path + ".new")
    new.write_text("\n".join([where.rstrip(), *notes, counted]) + "\n", encoding="utf-8")
    new.replace(tools.ROOT / path)


@pytest.fixture
def copy(tmp_path):
    """A scratch copy of the project in a folder with a space and letters beyond ASCII."""
    return tools.copy_to(tmp_path / "eine Schicht für ένα")
