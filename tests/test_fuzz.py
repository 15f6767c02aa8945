"""A sample of `make fuzz`: some random input for what reads text, ten random shapes for stage 7."""
import shutil

import pytest

import fuzz
import tools


@pytest.mark.skipif(not shutil.which("clang"), reason="needs clang")
@pytest.mark.parametrize("name", fuzz.PROGRAMS)
def test_random_input(name):
    fine, words = fuzz.fuzz(name, "-runs=20000", "-seed=1")
    assert fine, words


@pytest.mark.parametrize("options, says", [
    (["--rows=2"], "--rows= must be at least 182, 32 more than are filled, and is 2"),   # found by make fuzz
    (["--prefill=0", "--rows=31"], "--rows= must be at least 32, 32 more than are filled, and is 31"),
    (["--rows=2", "--at=0,2"], "--at= takes positions below 2 with commas between, not '2'"),
    (["--samples=2"], "--samples= takes a number from 3 to 1000, not '2'"),
    (["--d=0"], "--d= takes a number from 1 to 1048576, not '0'"),
    (["--depth=1"], "unknown option --depth; see --help"), (["7"], "cannot read '7'; see --help")])
def test_bad_options_are_refused(options, says):
    status, output = tools.run([str(tools.build("build/cpu/plain/stage7/driver")), *options])
    assert status == 2 and says in output, output


def test_draws_are_legal_and_differ():
    draws = [fuzz.draw(seed)[0] for seed in range(500)]
    assert len({tuple(options[:-1]) for options in draws}) > 400
    sizes = [{o.split("=")[0]: int(o.split("=")[1]) for o in options} for options in draws]
    assert all(s["--n-q"] % s["--n-kv"] == 0 and s["--n-q"] <= 16 * s["--n-kv"] for s in sizes)
    assert {s["--n-q"] // s["--n-kv"] for s in sizes} == set(range(1, 17))
    assert fuzz.draw(7) == fuzz.draw(7)


@pytest.mark.parametrize("seed", range(1, 11))
def test_a_random_shape(seed):
    wrong = fuzz.check_draw(tools.build("build/cpu/plain/stage7/driver"), seed)
    assert not wrong, wrong
