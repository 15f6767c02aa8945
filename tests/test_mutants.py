"""The list of faults fits the source; `make mutants` plants them."""
import pytest

import mutants
import tools

SOURCE = (tools.ROOT / "stages" / mutants.STAGE / "kernels.cu").read_text(encoding="utf-8")


@pytest.mark.parametrize("name, old, new", mutants.MUTANTS, ids=[name for name, *_ in mutants.MUTANTS])
def test_a_fault_can_be_planted(name, old, new):
    assert mutants.mutated(SOURCE, name, old, new) != SOURCE


def test_the_list():
    names = [name for name, *_ in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 40
    assert set(mutants.REASONS) <= set(names)


@pytest.mark.parametrize("source", ["", "x x"])
def test_a_text_that_is_not_there_once_is_an_error(source):
    with pytest.raises(LookupError, match="stands . times"):
        mutants.mutated(source, "a fault", "x", "y")


def results(caught, missed):
    seen = {"plain": "wrong", "asan": None, "tsan": None}
    return {**{f"caught {i}": seen for i in range(caught)}, **{name: dict.fromkeys(seen) for name in missed}}


def test_the_verdict():
    explained = next(iter(mutants.REASONS))
    assert mutants.verdict(results(24, [])) == ("24 of 24 faults are caught", True)
    assert mutants.verdict(results(24, [explained]))[1] is True
    assert mutants.verdict(results(24, ["a fault that nobody expected"]))[1] is False
    assert mutants.verdict(results(2, [explained]))[1] is False
    table = mutants.table(results(1, [explained]))
    assert "NOT CAUGHT: " + mutants.REASONS[explained] in table[-1]


def test_what_stops_a_run_has_a_word():
    assert mutants.word_for(3, "byte 4 of an allocation\n  962 threads asleep, 0 bulk copies") == "deadlock"
    assert mutants.word_for(3, "bulk_load: 64 bytes at 0x10 leave their allocation") == "bounds"
    assert mutants.word_for(3, "bulk_load: no mbarrier_init_fence") == "rule"
    assert mutants.word_for(66, "WARNING: ThreadSanitizer: data race") == "race"
    assert mutants.word_for(1, "==1==ERROR: AddressSanitizer: heap-buffer-overflow") == "bounds"
    assert mutants.word_for(1, "FAIL") == "wrong" and mutants.word_for(-11, "") == "crash"
