"""The list of faults fits the sources; `make mutants` plants them all, this a few."""
import pytest

import mutants
import tools

FAULTS = mutants.all_faults()


@pytest.mark.parametrize("stage, file, name, old, new", FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_a_fault_can_be_planted(stage, file, name, old, new):
    source = (tools.ROOT / "stages" / stage / file).read_text(encoding="utf-8")
    assert mutants.mutated(source, name, old, new) != source


def test_the_list():
    names = [(stage, name) for stage, _, name, *_ in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert {stage for stage, _ in names} == {stage for stage in tools.STAGES if stage >= "stage6"}
    assert set(mutants.REASONS) <= {name for _, name in names}


@pytest.mark.parametrize("source", ["", "x x"])
def test_a_text_that_is_not_there_once_is_an_error(source):
    with pytest.raises(LookupError, match="stands . times"):
        mutants.mutated(source, "a fault", "x", "y")


def results(caught, missed):
    return {**{("stage6", f"caught {i}"): {"plain": "wrong"} for i in range(caught)},
            **{("stage7", name): {"plain": None, "asan": None} for name in missed}}


def test_the_verdict():
    explained = next(iter(mutants.REASONS))
    assert mutants.verdict(results(24, [])) == (["stage6: 24 of 24 faults are caught",
                                                 "24 of 24 faults are caught"], True)
    assert mutants.verdict(results(24, [explained]))[1] is True
    assert mutants.verdict(results(24, ["a fault that nobody expected"]))[1] is False
    assert mutants.verdict(results(2, [explained]))[1] is False
    assert mutants.line_of("stage7", explained, {"plain": None}).endswith("NOT CAUGHT: " + mutants.REASONS[explained])
    assert mutants.line_of("stage6", "x", {"plain": None, "asan": "bounds"}).endswith("  asan: bounds")


def test_what_stops_a_run_has_a_word():
    assert mutants.word_for(3, "byte 4 of an allocation\n  962 threads asleep, 0 bulk copies") == "deadlock"
    assert mutants.word_for(3, "bulk_load: 64 bytes at 0x10 leave their allocation") == "bounds"
    assert mutants.word_for(3, "bulk_load: no mbarrier_init_fence") == "rule"
    assert mutants.word_for(66, "WARNING: ThreadSanitizer: data race") == "race"
    assert mutants.word_for(1, "==1==ERROR: AddressSanitizer: heap-buffer-overflow") == "bounds"
    assert mutants.word_for(1, "FAIL") == "wrong" and mutants.word_for(-11, "") == "crash"


# One fault for each way of catching, and the source as it is.
SAMPLE = [("stage6", "scores not scaled", "plain"), ("stage6", "grid barrier arrives without release", "tsan"),
          ("stage6", "scratch is not given back", "tests"), ("stage7", "chunks counted without release", "tsan"),
          ("stage7", "keys of KV head 0 for all", "plain")]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    for target in mutants.targets(["stage6", "stage7"]):
        tools.build(target)
    return mutants.Bench(tmp_path_factory.mktemp("mutants"), tools.ROOT)


@pytest.mark.parametrize("stage, name, build", SAMPLE)
def test_a_sample_is_caught(bench, stage, name, build):
    file, old, new = next((f, o, n) for s, f, x, o, n in FAULTS if (s, x) == (stage, name))
    source = mutants.mutated(bench.sources[stage, file], name, old, new)
    assert bench.catch(build, stage, file, source)
