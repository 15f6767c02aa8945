"""The CPU target: right programs pass, and each planted fault is caught, every time.

stages/cpu/selftest.{cu,c} hold the programs and the faults. They are built here, in
build/cpu/selftest/, because a C and a CUDA file of one name would share an object file.
What caught which fault is written to build/cpu/faults.txt.
"""
import collections
import concurrent.futures
import functools
import os
import shutil
import subprocess
import time

import pytest

import tools

FOLDER = tools.ROOT / "build" / "cpu" / "selftest"
SOURCES = tools.ROOT / "stages" / "cpu"
SEEDS = range(1, 21)          # for the right programs
FAULT_SEEDS = (2, 3)          # for each fault: caught means caught under each; 1 pairs warps that are neighbours
LIMIT = 60                    # seconds for one run, which takes less than one
# build: flags for the kernels, for the host's half, for the machine, for the linker
BUILDS = {
    "plain": ([], [], [], []),
    "asan": (["-fsanitize=address"],) * 2 + (["-fsanitize=address", "-DASAN"], ["-fsanitize=address"]),
    "tsan": (["-fsanitize=thread"], [], ["-DTSAN"], ["-fsanitize=thread"]),
    "ucontext": ([], [], ["-DCPU_UCONTEXT"], []),
}
# ThreadSanitizer holds back the signal that ends a spin which calls nothing.
HANGS = {("poll", "3", "tsan")}


@functools.lru_cache(None)
def program(build):
    """Compiles the programs for one build; returns the path. Other processes may be running
    what an earlier one built: a file is never written where one is run."""
    kernel, host, machine, link = BUILDS[build]
    cc = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-I", str(SOURCES), "-c"]
    with tools.alone():
        FOLDER.mkdir(parents=True, exist_ok=True)
        parts = [(["-x", "c", "-O1", *kernel], "selftest.cu"), (["-O1", *host], "selftest.c"),
                 (["-O2", *machine], "cpu.c")]
        objects = [str(FOLDER / f"{build}-{source}.o") for _, source in parts]
        for (flags, source), output in zip(parts, objects):
            status, text = tools.run([*cc, *flags, str(SOURCES / source), "-o", output])
            assert status == 0, text
        linked = FOLDER / f"{build}.new"
        status, text = tools.run([cc[0], *link, *objects, "-lm", "-o", str(linked)])
        assert status == 0, text
        linked.replace(FOLDER / build)
    return FOLDER / build


@functools.lru_cache(None)
def launcher(build):
    """Old ThreadSanitizers refuse address spaces that are laid out too randomly."""
    if build == "tsan" and shutil.which("setarch"):
        status, text = tools.run([str(program(build)), "list"])
        if status and "unexpected memory mapping" in text:
            return ("setarch", "-R")
    return ()


def selftest(build, *words, seed=1):
    """Runs the program; returns how it ended in a word or two, and what it said."""
    try:
        status, text = tools.run([*launcher(build), str(program(build)), *words], timeout=LIMIT,
                                 CPU_SEED=str(seed))
    except subprocess.TimeoutExpired:
        return "hang", ""
    if status == 0:
        return "missed" if words[-1] != "all" else "passed", text
    if "ThreadSanitizer: data race" in text:
        return "race", text
    if "AddressSanitizer" in text:
        return "address", text
    if status == 3 and "deadlock" in text:
        return "deadlock", text
    if status == 3 and "cpu target: seed" in text:
        return "check", text
    return ("wrong result" if status == 1 else f"status {status}"), text


def faults():
    """What can be planted: (case, number, description)."""
    status, text = tools.run([str(program("plain")), "list"])
    assert status == 0, text
    return [tuple(line.split("\t")) for line in text.splitlines()]


def runs(jobs):
    """Runs selftest for each (build, words, seed), two at a time, in order."""
    for build in {build for build, _, _ in jobs}:
        launcher(build)   # builds it
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: selftest(job[0], *job[1], seed=job[2]), jobs))


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_right_programs_pass(build):
    jobs = [(build, ("all",), seed) for seed in SEEDS]
    for job, (ending, text) in zip(jobs, runs(jobs)):
        assert ending == "passed", f"seed {job[2]}: {ending}\n{text}"


def test_right_programs_pass_without_assembly():
    assert selftest("ucontext", "all")[0] == "passed"


def test_a_seed_replays():
    outputs = {selftest("plain", "grid", "4", seed=5)[1] for _ in range(3)}
    assert len(outputs) == 1 and "a counter to reach 3, it is 2" in outputs.pop()


def test_a_deadlock_says_who_waits_for_what():
    ending, text = selftest("plain", "ring", "8", seed=1)
    assert ending == "deadlock"
    assert "test_ring, block 0" in text and "mbarrier_wait: shared memory + " in text
    assert "1 of 4 arrivals" in text


@pytest.mark.parametrize("build", ["plain", "asan", "tsan"])
@pytest.mark.parametrize("case, fault, who", [
    ("late", "1", "test_late, block 0, thread 0: "),
    ("values", "3", "test_values, block 1, thread 0 and 31 others: "),     # lanes that vote, which wakes them
    ("count", "2", "test_count, block 0, thread 0 and 31 others: ")])
def test_values_that_never_come_are_named(build, case, fault, who):
    for seed in SEEDS[:5]:
        started = time.monotonic()
        ending, text = selftest(build, case, fault, seed=seed)
        assert ending == "deadlock" and "values that are asked for never come" in text, text
        assert who + "retry_values: a value with its proof, it is 0x" in text, text
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("build", ["plain", "asan", "tsan"])
def test_values_that_come_late_are_no_deadlock(build):
    jobs = [(build, ("late", "0"), seed) for seed in SEEDS]
    for (_, _, seed), (ending, text) in zip(jobs, runs(jobs)):
        assert ending == "missed", f"seed {seed}: {text}"    # no fault was planted, and none is found


def test_every_fault_is_caught():
    planted = faults()
    builds = ["plain", "asan", "tsan"]
    jobs = [(build, fault[:2], seed) for fault in planted for build in builds for seed in FAULT_SEEDS
            if (*fault[:2], build) not in HANGS]
    endings = collections.defaultdict(list)
    for (build, words, _), (ending, _) in zip(jobs, runs(jobs)):
        endings[words, build].append(ending)
    lines, uncaught = [], []
    for case, number, description in planted:
        cells = [endings[(case, number), build] for build in builds]
        lines.append("\t".join([case, description, *(" ".join(describe(cell)) for cell in cells)]))
        if not any(caught(cell) for cell in cells[1:]):
            uncaught.append(lines[-1])
    table = "\n".join(["case\tfault\t" + "\t".join(builds), *lines]) + "\n"
    (tools.ROOT / "build" / "cpu" / "faults.txt").write_text(table, encoding="utf-8")
    assert not uncaught, "caught by neither sanitized build under every seed:\n" + "\n".join(uncaught)


def caught(endings):
    return bool(endings) and not {"missed", "hang"} & set(endings)


def describe(endings):
    """Each ending once: "race", or "race missed" where some seeds found nothing."""
    return sorted(set(endings) - {"missed"}) + ["missed"] * ("missed" in endings) if endings else ["not run"]


@pytest.mark.skipif(tools.nvcc() is None, reason="needs nvcc")
def test_the_primitives_compile_for_the_gpu(tmp_path):
    for more in [], ["-DDEBUG_SPINS"]:
        status, text = tools.run([tools.nvcc(), "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a",
                                  "-Werror", "all-warnings", *more, "-c", str(SOURCES / "selftest.cu"),
                                  "-o", str(tmp_path / "selftest.o")])
        assert status == 0, text
