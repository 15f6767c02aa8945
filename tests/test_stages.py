"""Every stage on the CPU target, in both hostile builds, under ten seeds, but the middle of the
ladder under four with ThreadSanitizer; and on a GPU if there is one."""
import pytest

import tools

RUNS = [(stage, seed, build) for stage in tools.STAGES for build in ("asan", "tsan")
        for seed in range(1, 11 if stage in ("stage0", "stage7", "stage8") or build == "asan" else 5)]
# What ThreadSanitizer costs grows with the square of the number of threads: under it the
# chip has two multiprocessors, and the shapes are smaller than the driver's own two.
TSAN_SHAPES = (["--d=64", "--ffn=64", "--n-q=2", "--n-kv=1", "--hd=64", "--prefill=20"],
               ["--d=128", "--ffn=64", "--n-q=3", "--n-kv=1", "--hd=64", "--prefill=70"])


def passed(status, output):
    lines = output.strip().splitlines()
    return status == 0 and lines and lines[-1].startswith("PASS")


@pytest.mark.parametrize("stage, seed, build", RUNS)
def test_on_the_cpu(stage, build, seed):
    driver = tools.build(f"build/cpu/{build}/{stage}/driver")
    more = {"tsan": (TSAN_SHAPES[seed % 2], "2"), "asan": ([], "3")}
    shape, sms = more[build]
    status, output = tools.run([str(driver), f"--seed={seed}", *shape], CPU_SEED=str(seed), CPU_SMS=sms)
    assert passed(status, output), f"exit status {status}:\n{output}"


# What the small shapes above do not reach in stages 7 and 8: units of attention with several tiles,
# more than eight query heads a KV head, four KV heads.
STREAM_SHAPES = (["--d=64", "--ffn=64", "--n-q=64", "--n-kv=64", "--hd=64", "--prefill=130"],
                 ["--d=64", "--ffn=128", "--n-q=12", "--n-kv=1", "--hd=64", "--prefill=70"],
                 ["--d=128", "--ffn=320", "--n-q=8", "--n-kv=4", "--hd=128", "--prefill=66"])


# More units than are merged at once: too slow for ThreadSanitizer.
UNITS = ["--d=64", "--ffn=64", "--n-q=16", "--n-kv=16", "--hd=64", "--prefill=1000"]


STREAMS = [stage for stage in tools.STAGES if stage >= "stage7"]


@pytest.mark.parametrize("stage", STREAMS)
def test_the_stream_over_many_units(stage):
    driver = tools.build(f"build/cpu/asan/{stage}/driver")
    status, output = tools.run([str(driver), *UNITS], CPU_SEED="1", CPU_SMS="2")
    assert passed(status, output), f"exit status {status}:\n{output}"


@pytest.mark.parametrize("build", ["asan", "tsan"])
@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("shape", STREAM_SHAPES, ids=lambda s: "".join(s))
def test_the_stream_in_other_shapes(shape, stage, build):
    driver = tools.build(f"build/cpu/{build}/{stage}/driver")
    status, output = tools.run([str(driver), *shape], CPU_SEED="1", CPU_SMS="2")
    assert passed(status, output), f"exit status {status}:\n{output}"


def bits_of(output):
    return [line for line in output.splitlines() if line.startswith("  bits  ")]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_driver_says_the_bits_of_the_twin(seed):
    said = []
    for build in ("plain", "twin"):
        driver = tools.build(f"build/cpu/{build}/stage8/driver")
        status, output = tools.run([str(driver), f"--seed={seed}"], CPU_SEED=str(seed), CPU_SMS="3")
        assert passed(status, output), output
        said.append((bits_of(output), output.count("exponents ")))
    (bits, packed), (its, of_twin) = said
    assert bits == its and len(bits) == len(set(bits)) == 2
    assert (packed, of_twin) == (14, 0)   # all matrices of two shapes, and none


HALF = ["--check", "--d=4096", "--ffn=14336", "--n-q=32", "--n-kv=8"]   # of the width


@pytest.mark.gpu
def test_the_bits_of_the_twin_on_the_gpu():
    """At half the width, both at once: what takes long is the oracle's double precision in C. At full
    width, make stage8 and make TWIN=1 stage8 print the bits."""
    drivers = ["build/gpu/stage8/driver", "build/gpu-twin/stage8/driver"]
    tools.build(drivers[0])
    with tools.alone():
        tools.must_make("-s", "-j4", "TWIN=1", drivers[1])
    with tools.started(lambda driver: tools.run([str(tools.ROOT / driver), *HALF], timeout=200), drivers) as result:
        outputs = [result(driver) for driver in drivers]
    for status, output in outputs:
        assert passed(status, output), output
    assert bits_of(outputs[0][1]) == bits_of(outputs[1][1]) != []


@pytest.mark.parametrize("stage", tools.STAGES)
def test_a_wrong_shape_is_refused(stage):
    driver = tools.build(f"build/cpu/plain/{stage}/driver")
    status, output = tools.run([str(driver), "--d=128", "--ffn=192", "--n-q=3", "--n-kv=2", "--hd=64",
                                "--prefill=5"])
    assert not passed(status, output) and status != 0, output


def check_on_the_gpu(stage):
    return tools.run([str(tools.ROOT / "build" / "gpu" / stage / "driver"), *HALF])


@pytest.fixture(scope="module")
def checked(request):
    stages = [stage for stage in tools.chosen(request, "test_on_the_gpu", "stage") if stage < "stage7"]
    for stage in stages:
        tools.build(f"build/gpu/{stage}/driver")
    with tools.started(check_on_the_gpu, stages) as result:
        yield result


@pytest.mark.gpu
@pytest.mark.parametrize("stage", tools.STAGES)
def test_on_the_gpu(stage, checked):
    """At full size and measured the last ones, the others at half the width and only checked: the
    ladder checks all of them at full size."""
    if stage >= "stage7":
        with tools.alone():
            status, output = tools.make(stage, timeout=600)
    else:
        status, output = checked(stage)
    assert passed(status, output), f"exit status {status}:\n{output}"
