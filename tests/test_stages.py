"""Every stage on the CPU target, in both hostile builds, under ten seeds; and on a GPU if there is one."""
import pytest

import tools

SEEDS = range(1, 11)


def passed(status, output):
    lines = output.strip().splitlines()
    return status == 0 and lines and lines[-1].startswith("PASS")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("build", ["asan", "tsan"])
@pytest.mark.parametrize("stage", tools.STAGES)
def test_on_the_cpu(stage, build, seed):
    driver = tools.build(f"build/cpu/{build}/{stage}/driver")
    status, output = tools.run([str(driver), f"--seed={seed}"], CPU_SEED=str(seed))
    assert passed(status, output), f"exit status {status}:\n{output}"


@pytest.mark.parametrize("stage", tools.STAGES)
def test_a_wrong_shape_is_refused(stage):
    driver = tools.build(f"build/cpu/plain/{stage}/driver")
    status, output = tools.run([str(driver), "--d=128", "--ffn=192", "--n-q=3", "--n-kv=2", "--hd=64",
                                "--prefill=5"])
    assert not passed(status, output) and status != 0, output


@pytest.mark.gpu
@pytest.mark.parametrize("stage", tools.STAGES)
def test_on_the_gpu(stage):
    with tools.alone():
        status, output = tools.make(stage, timeout=600)
    assert passed(status, output), f"exit status {status}:\n{output}"
