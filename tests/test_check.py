"""How the tests of a GPU are run and kept, tried without one."""
import shutil
import sys
import threading
import time

import pytest

import tools

TESTS = """
import os, signal, pytest
pytestmark = pytest.mark.gpu
def test_one(): print("note: worth a line")
def test_two(): assert not os.environ.get("FAIL")
def test_three():
    signal.signal(signal.SIGINT, signal.default_int_handler)   # ignored in what a shell starts behind itself
    if os.environ.get("CUT"): os.kill(os.getpid(), getattr(signal, os.environ["CUT"]))
"""


@pytest.fixture
def tree(tmp_path):
    """A project with three tests of a GPU, and one that is pretended."""
    for folder in ("tests", "data", "bin"):
        (tmp_path / folder).mkdir()
    for name in ("conftest.py", "tools.py", "pytest.ini"):
        shutil.copy(tools.ROOT / "tests" / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "tests" / "test_stages.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_four(): pass\n")
    (tmp_path / "reference.py").write_text("def provenance(protocol): return dict(gpu='pretended', protocol=protocol)\n")
    (tmp_path / "data" / "check-gpu.txt").write_text("the last one\n")
    for name, says in (("nvidia-smi", "GPU 0"), ("nvcc", "")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(**env):
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        output = tools.run([sys.executable, "-m", "pytest", "tests", "-v", "-m", "gpu", "-p", "no:xdist"], cwd=tmp_path,
                           PATH=path, PYTHONDONTWRITEBYTECODE="1", CHECK_GPU="data/check-gpu.txt", **env)[1]
        new = tmp_path / "data" / "check-gpu.txt.new"
        return (tmp_path / "data" / "check-gpu.txt").read_text(), new.read_text() if new.exists() else None, output
    return run


@pytest.mark.parametrize("env, end", [({}, "4 passed, 0 failed, 0 skipped"), ({"FAIL": "1"}, "3 passed, 1 failed, 0 skipped")],
                         ids=["passes", "fails"])
def test_a_whole_run_is_kept(tree, env, end):
    kept, new, output = tree(**env)
    lines = kept.splitlines()
    assert lines[0] == "# gpu: pretended" and lines[-1] == end and new is None, output
    assert "test_stages.py::test_four" in lines[2] and "test_it.py::test_one" in lines[3]    # in this order
    assert lines[4].strip() == "note: worth a line" and len(lines) == 8


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_run_that_is_cut_off_leaves_what_it_has(tree, signal):
    kept, new, output = tree(CUT=signal)
    assert kept == "the last one\n" and new.startswith("# gpu: pretended\n"), output
    assert new.endswith("\ninterrupted after 3 of 4: 3 passed, 0 failed, 0 skipped\n")


def test_what_is_started_runs_a_few_at_once():
    lock, now, most = threading.Lock(), [0], [0]

    def work(name):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        if name == 5:
            raise ValueError("five")
        return name * name
    with tools.started(work, range(9), at_once=3) as result:
        assert [result(name) for name in (0, 8, 2)] == [0, 64, 4]
        with pytest.raises(ValueError, match="five"):
            result(5)
        assert [result(name) for name in range(5)] == [0, 1, 4, 9, 16]
    assert most == [3] and now == [0]


def test_what_was_not_begun_is_not_run_when_nobody_asks_any_more():
    begun = []
    with pytest.raises(KeyboardInterrupt), tools.started(lambda name: (begun.append(name), time.sleep(0.2)), range(9)):
        raise KeyboardInterrupt
    assert len(begun) <= 4


VALUES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def asked_for(request):
    return tools.chosen(request, "test_the_chosen", "value")


@pytest.mark.parametrize("value", VALUES)
def test_the_chosen(value, asked_for):
    assert value in asked_for and set(asked_for) <= set(VALUES)
