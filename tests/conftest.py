"""Counts what passed, failed and was skipped, and skips what needs a GPU where there is none."""
import pytest

import tools

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


def pytest_collectreport(report):
    if report.failed:
        counts["failed"] += 1
    elif report.skipped:
        counts["skipped"] += 1


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("check: {passed} passed, {failed} failed, {skipped} skipped".format(**counts))


@pytest.fixture
def copy(tmp_path):
    """A scratch copy of the project in a folder with a space and letters beyond ASCII."""
    return tools.copy_to(tmp_path / "eine Schicht für ένα")
