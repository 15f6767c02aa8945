"""What becomes of a layer: built and torn down a thousand times, failing half-way, left behind at
the end, and after so many steps that its counters wrap; on the CPU target."""
import ctypes
import math
import os
import random
import re
import subprocess
import sys

import pytest
import torch

import layers
import tools
from layers import SMALL, Layer, ref

STAGES = tools.STAGES
COUNTING = [stage for stage in STAGES if "layer_age" in
            (tools.ROOT / "stages" / stage / "layer.c").read_text(encoding="utf-8")]


def drawn(seed=1):
    return ref.make_weights(SMALL, seed), ref.make_cache(SMALL, seed)


def host_bytes():
    """In use by malloc, in the arenas and outside."""
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks "
                    "fsmblks uordblks fordblks keepcost".split()]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    return mallinfo().uordblks + mallinfo().hblkhd


@pytest.mark.parametrize("stage", STAGES)
def test_a_thousand_layers_leave_no_memory_behind(stage):
    layer = Layer(stage, SMALL, *drawn())
    layer.step(ref.make_x(SMALL, 1, 130), 130)
    layer.teardown()
    before = layers.free_bytes(layer.lib)
    builds = 400 if os.environ.get("LAYER_LIBRARY") else 1000     # of a mutant some hundred tell
    for i in range(builds):
        assert layer.build() == 0
        if i % 100 == 0:
            layer.step(ref.make_x(SMALL, 1, 130), 130)
        assert layer.teardown() == 0
        if i == 100:
            host = host_bytes()
    assert layers.free_bytes(layer.lib) == before
    assert host_bytes() - host < 110 * (builds - 100)   # a leaked handle is some hundred bytes each time


@pytest.mark.parametrize("stage", STAGES)
def test_a_build_that_fails_half_way_leaves_nothing(stage):
    """Whichever call of the runtime fails, nothing stays allocated, and then all is as before."""
    weights, cache = drawn()
    x, layer = ref.make_x(SMALL, 1, 130), Layer(stage, SMALL, weights, cache)
    expected = layer.step(x, 130)
    layer.teardown()
    free, seen, host = layers.free_bytes(layer.lib), set(), None
    for nth in range(1, 1000):
        layer.lib.cpu_fail_call(nth)
        status = layer.build()
        layer.lib.cpu_fail_call(0)
        if status == 0:
            break
        assert layer.handle is None and layers.free_bytes(layer.lib) == free, nth
        words = layer.lib.layer_strerror(status).decode()
        assert re.match(layers.NO_BYTES if status == layers.NO_MEMORY else ".", words), words
        layer.lib.cudaGetLastError()
        seen.add(status)
    assert nth >= 5 and {layers.NO_MEMORY, layers.CUDA_FAILED} <= seen <= {layers.NO_MEMORY, layers.CUDA_FAILED}
    assert ref.differing(layer.step(x, 130), expected) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_fails_is_reported_and_the_next_one_is_right(stage):
    weights, cache = drawn()
    x, layer = ref.make_x(SMALL, 1, 130), Layer(stage, SMALL, weights, cache)
    expected = layer.step(x, 130)
    failed = 0
    for nth in (1, 2, 3, 4, 10, 44, 100):           # ask for the device, then launch up to 43 times
        layer.out.view(torch.int16).fill_(-1)       # NaN
        layer.lib.cpu_fail_call(nth)
        status = layer.lib.layer_step(layer.handle, layer.x.data_ptr(), 130, layer.out.data_ptr(), None)
        layer.lib.cpu_fail_call(0)
        layers.synchronize(layer.lib)
        if status == 0:
            assert ref.differing(layer.out.cpu(), expected) == 0
            break
        assert status == layers.CUDA_FAILED
        failed += 1
        assert ref.differing(layer.step(x, 130), expected) == 0, nth
    assert failed >= 2 and status == 0


@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_steps_that_are_queued_keep_their_parameters(stage):
    """Steps at once, of int positions and of those in memory, against the same one by one."""
    weights, cache = drawn()
    one, all = Layer(stage, SMALL, weights, cache), Layer(stage, SMALL, weights, cache)
    positions = range(120, 130)
    expected = [one.step(ref.make_x(SMALL, 1, pos), pos) for pos in positions]
    xs = [all.memory.tensor(ref.make_x(SMALL, 1, pos)) for pos in positions]
    outs = [all.memory.tensor(torch.zeros(1, SMALL.d, dtype=torch.bfloat16)) for _ in positions]
    at = [all.memory.tensor(torch.tensor([pos])) for pos in positions]
    for i, pos in enumerate(positions):
        call, where = (all.lib.layer_step_at, at[i].data_ptr()) if i % 3 == 2 else (all.lib.layer_step, pos)
        assert call(all.handle, xs[i].data_ptr(), where, outs[i].data_ptr(), None) == 0
    layers.synchronize(all.lib)
    assert not any(ref.differing(out.cpu(), right) for out, right in zip(outs, expected))


# ------------------------------------------------------------------------- values that carry their step

TAGS = r"""   /* in bits: as a float's argument a NaN may become another one */
#include KERNELS
uint32_t handed_on(uint32_t bits, uint32_t epoch);
uint32_t handed_on(uint32_t bits, uint32_t epoch) { return f32_bits(value_of(tagged(bits_f32(bits), epoch))); }
int is_of_step(uint32_t bits, uint32_t epoch, uint32_t other);
int is_of_step(uint32_t bits, uint32_t epoch, uint32_t other) { return !stale(tagged(bits_f32(bits), epoch), other); }
"""
EPOCHS = [0, 1, 7, 15, 16, 2**31 - 1, 2**32 - 16, 2**32 - 1]
SPECIAL = [0x7f800000, 0xff800000, 0x00000000, 0x80000000, 0x3f800001, 0x0000000f, 0x7f7fffff,
           0x7fc00000, 0xffc00000, 0x7f800001, 0xff80000f, 0x7fffffff, 0x7f800010]      # from the eighth on NaN


@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_a_value_with_its_step_is_the_value_but_for_four_bits(stage, tmp_path):
    kernels = tools.ROOT / "stages" / stage / "kernels.cu"
    (tmp_path / "tags.c").write_text(TAGS, encoding="utf-8")
    subprocess.run(["gcc", "-std=c11", "-w", "-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-I",
                    str(tools.ROOT / "stages" / "cpu"), "-I", str(kernels.parent), f'-DKERNELS="{kernels}"', "-o",
                    str(tmp_path / "tags.so"), str(tmp_path / "tags.c"),
                    str(tools.build("build/cpu/plain/cpu/cpu.o")), "-lm"], check=True)
    lib = ctypes.CDLL(str(tmp_path / "tags.so"))
    lib.handed_on.restype = ctypes.c_uint32
    lib.handed_on.argtypes = (ctypes.c_uint32,) * 2
    lib.is_of_step.argtypes = (ctypes.c_uint32,) * 3

    def is_nan(bits):
        return bits & 0x7fffffff > 0x7f800000
    random.seed(3)
    for bits in [*SPECIAL, *(random.getrandbits(32) for _ in range(500))]:
        for epoch in EPOCHS:
            found = lib.handed_on(bits, epoch)
            assert is_nan(found) if is_nan(bits) else found == bits & ~15, (hex(bits), hex(found))
            assert lib.is_of_step(bits, epoch, epoch) and lib.is_of_step(bits, epoch, (epoch + 16) % 2**32)
            assert not any(lib.is_of_step(bits, epoch, (epoch + n) % 2**32) for n in range(1, 16)), hex(bits)


def refuse_on_the_device(layer, times):
    """Positions that the kernel finds out of range: each gives NaN."""
    for i in range(times):
        pos = (-1, SMALL.max_seq_len, 2**40)[i % 3]
        assert bool(layer.step(ref.make_x(SMALL, 1, 3), pos, on_device=True).isnan().all())


def refuse_by_the_host(layer, times):
    for i in range(times):
        assert layer.lib.layer_step(layer.handle, layer.x.data_ptr(), (-1, SMALL.max_seq_len)[i % 2],
                                    layer.out.data_ptr(), None) == layers.BAD_POSITION


def fail_to_launch(layer, times):
    for i in range(times):
        layer.lib.cpu_fail_call(1 + i % 2)
        status = layer.lib.layer_step(layer.handle, layer.x.data_ptr(), 130, layer.out.data_ptr(), None)
        layer.lib.cpu_fail_call(0)
        assert status == layers.CUDA_FAILED


@pytest.mark.parametrize("fail", [refuse_on_the_device, refuse_by_the_host, fail_to_launch])
@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_no_step_takes_words_of_an_older_one_for_its_own(stage, fail):
    """However many steps have failed since: if they counted, after fifteen the old words would carry the
    new step's tag. Each step has another input at another position, so that old words are wrong."""
    weights, cache = drawn()
    old, new = Layer(stage, SMALL, weights, cache), Layer(stage, SMALL, weights, cache)
    for pos, times in zip((60, 131, 97, 40, 128, 70), (0, 15, 1, 16, 14, 31)):
        fail(old, times)
        x = ref.make_x(SMALL, 1, pos)
        assert ref.differing(old.step(x, pos), new.step(x, pos)) == 0, (pos, times)
    assert all(ref.differing(a, b) == 0 for a, b in zip(old.caches(), new.caches()))


@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_what_is_not_a_number_does_not_stay_in_the_words(stage):
    """Steps whose every value is NaN, one or as many as there are tags, and one of numbers behind them."""
    weights, cache = drawn()
    old, new = Layer(stage, SMALL, weights, cache), Layer(stage, SMALL, weights, cache)
    bad = torch.full((1, SMALL.d), math.nan, dtype=torch.bfloat16)
    for pos, times in ((100, 1), (50, 16)):
        for _ in range(times):
            assert bool(old.step(bad, pos).isnan().all())
        x = ref.make_x(SMALL, 1, pos)
        assert ref.differing(old.step(x, pos), new.step(x, pos)) == 0, pos


# ------------------------------------------------------------------------- dependent launches

CHAIN = """
import os, sys; sys.path.insert(0, sys.argv[1])
import torch, layers
from layers import SMALL, Layer, ref
def chain():
    layer = Layer(sys.argv[2], SMALL, ref.make_weights(SMALL, 1), ref.make_cache(SMALL, 1))
    outs = [layer.memory.tensor(torch.zeros(1, SMALL.d, dtype=torch.bfloat16)) for _ in range(8)]
    layer.x.copy_(ref.make_x(SMALL, 1, 120))
    at = [layer.memory.tensor(torch.tensor([120 + i])) for i in range(8)]
    for i, (x, out) in enumerate(zip([layer.x, *outs], outs)):       # each step reads what the last one wrote
        call, pos = (layer.lib.layer_step_at, at[i].data_ptr()) if i % 4 == 3 else (layer.lib.layer_step, 120 + i)
        assert call(layer.handle, x.data_ptr(), pos, out.data_ptr(), None) == 0
    layers.synchronize(layer.lib)
    return [*(out.clone() for out in outs), *layer.caches()]
os.environ["LAYER_DEPENDENT"] = "0"
expected = chain()
os.environ["LAYER_DEPENDENT"] = "1"
print(sum(ref.differing(a, b) > 0 for a, b in zip(chain(), expected)), "differ")
"""


def chain(stage, seed, **environment):
    return tools.run([sys.executable, "-c", CHAIN, str(tools.ROOT / "tests"), stage], timeout=100,
                     CPU_SEED=str(seed), **environment)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_dependent_launches_give_the_same_bits(stage, seed):
    assert chain(stage, seed) == (0, "0 differ\n")


def test_dependent_launches_need_their_wait(tmp_path):
    """So that the test above has something to find."""
    source = (tools.ROOT / "stages/stage7/kernels.cu").read_text(encoding="utf-8")
    assert source.count("    wait_for_prerequisites();\n") == 1
    library = tools.stage_and_cpu("stage7", tmp_path, "", kernels=source.replace("    wait_for_prerequisites();\n", ""))
    assert any(chain("stage7", seed, LAYER_LIBRARY=str(library)) != (0, "0 differ\n") for seed in range(1, 6))


@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_the_variable_that_asks_for_dependent_launches(stage, monkeypatch):
    layer = Layer(stage, SMALL, *drawn())
    layer.teardown()
    free = layers.free_bytes(layer.lib)
    for value in ("yes", "2", " 1", "01", "x" * 1000):
        monkeypatch.setenv("LAYER_DEPENDENT", value)
        assert layer.build() == layers.BAD_ARGUMENT and layer.handle is None
        words = layer.lib.layer_strerror(layers.BAD_ARGUMENT).decode()
        assert "LAYER_DEPENDENT must be 0 or 1, and is '" + value[:50] in words
        assert layers.free_bytes(layer.lib) == free
    for value in ("", "0", "1"):
        monkeypatch.setenv("LAYER_DEPENDENT", value)
        assert layer.build() == 0 and layer.teardown() == 0


def test_null_is_torn_down_and_refused():
    lib = layers.library("stage7")
    assert lib.layer_teardown(None) == 0
    assert lib.layer_status(None) == layers.BAD_ARGUMENT
    assert lib.layer_step(None, 4096, 0, 4096, None) == layers.BAD_ARGUMENT


@pytest.mark.parametrize("stage", STAGES)
def test_addresses_that_are_refused(stage):
    weights, cache = drawn()
    layer = Layer(stage, SMALL, weights, cache)
    x, out, at = layer.x.data_ptr(), layer.out.data_ptr(), layer.at.data_ptr()
    for call, pos in ((layer.lib.layer_step, 130), (layer.lib.layer_step_at, at)):
        for bad in ((x + 8, pos, out), (x, pos, out + 8), (x + 2, pos, out), (x, pos, out + 2)):
            assert call(layer.handle, *bad, None) == layers.BAD_ALIGNMENT
        for bad in ((None, pos, out), (x, pos, None)):
            assert call(layer.handle, *bad, None) == layers.BAD_ARGUMENT
    assert layer.lib.layer_step_at(layer.handle, x, at + 4, out, None) == layers.BAD_ALIGNMENT
    assert layer.lib.layer_step_at(layer.handle, x, None, out, None) == layers.BAD_ARGUMENT
    layer.teardown()
    for name, whole in list(layer.w.items()):
        for offset, status in ((8, layers.BAD_ALIGNMENT), (None, layers.BAD_ARGUMENT)):
            layer.w[name] = type("Elsewhere", (), dict(
                data_ptr=lambda self: whole.data_ptr() + offset if offset else None))()
            assert layer.build() == status and layer.handle is None, name
        layer.w[name] = whole


LEAVE = """
import sys; sys.path.insert(0, sys.argv[1])
import layers
del layers.Layer.__del__, layers.Memory.__del__
layer = layers.Layer(sys.argv[2], layers.SMALL, layers.ref.make_weights(layers.SMALL, 1), layers.ref.make_cache(layers.SMALL, 1))
layer.lib.layer_step(layer.handle, layer.x.data_ptr(), 130, layer.out.data_ptr(), None)
print("left")
"""


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_may_end_without_teardown(stage):
    """With a layer alive and a step still queued."""
    status, output = tools.run([sys.executable, "-c", LEAVE, str(tools.ROOT / "tests"), stage], timeout=60)
    assert (status, output) == (0, "left\n")


STREAMS = """
import ctypes, sys; sys.path.insert(0, sys.argv[1])
from layers import SMALL, Layer, ref
weights, cache = ref.make_weights(SMALL, 1), ref.make_cache(SMALL, 1)
x, all = ref.make_x(SMALL, 1, 64), [Layer(sys.argv[2], SMALL, weights, cache) for _ in range(12)]
expected, lib = all[0].step(x, 64), all[0].lib
streams = [ctypes.c_void_p() for _ in all]
for layer, stream in zip(all, streams):
    assert lib.cudaStreamCreate(ctypes.byref(stream)) == 0
    layer.x.copy_(x)
for _ in range(2):
    for layer, stream in zip(all, streams):
        assert lib.layer_step(layer.handle, layer.x.data_ptr(), 64, layer.out.data_ptr(), stream) == 0
assert lib.cudaDeviceSynchronize() == 0
assert all and not any(ref.differing(layer.out, expected) for layer in all)
print("the same")
"""


@pytest.mark.parametrize("stage", COUNTING)
def test_twelve_layers_on_twelve_streams(stage):
    """More blocks than the chip holds at once: whoever starts a grid that is not all there deadlocks."""
    status, output = tools.run([sys.executable, "-c", STREAMS, str(tools.ROOT / "tests"), stage], timeout=100)
    assert (status, output) == (0, "the same\n"), output


# ------------------------------------------------------------------------- counters that wrap

random.seed(8)
# After one step, so many times as many. Words of stages 7 and 8 carry the count modulo 16: as it was with them,
# it is 1 then, and the steps of the test go on from there.
AGES = [2**31 - 15, 2**32 - 15, *(random.randrange(2**28) * 16 + 1 for _ in range(4))]


@pytest.mark.parametrize("stage", COUNTING)
@pytest.mark.parametrize("age", AGES)
def test_steps_after_two_to_the_32nd(stage, age):
    """Steps that see the counters through 2**31 and 2**32, and the steps of a new layer."""
    weights, cache = drawn()
    old, new = Layer(stage, SMALL, weights, cache), Layer(stage, SMALL, weights, cache)
    first = ref.make_x(SMALL, 1, 120)
    assert ref.differing(old.step(first, 120), new.step(first, 120)) == 0
    assert old.lib.layer_age(ctypes.c_void_p(old.handle), ctypes.c_uint32(age)) == 0
    for pos in range(115, 132):                     # the seventeenth is beyond the wrap
        x = ref.make_x(SMALL, 1, pos)
        assert ref.differing(old.step(x, pos), new.step(x, pos)) == 0, pos
    assert all(ref.differing(a, b) == 0 for a, b in zip(old.caches(), new.caches()))


@pytest.mark.parametrize("stage", COUNTING)
def test_every_count_passes_the_wrap(stage):
    """With an age for each counter: two steps before it wraps."""
    weights, cache = drawn()
    old, new = Layer(stage, SMALL, weights, cache), Layer(stage, SMALL, weights, cache)
    x = ref.make_x(SMALL, 1, 130)
    expected = new.step(x, 130)
    for each in range(2, 400, 23):                  # what a counter grows by in a step
        old.teardown()
        assert old.build() == 0
        old.step(x, 130)
        age = 2**32 // each - 1
        age -= age % 16 == 0                        # words of the step before carry 1, and so would the next
        assert old.lib.layer_age(ctypes.c_void_p(old.handle), ctypes.c_uint32(age)) == 0
        for _ in range(3):
            assert ref.differing(old.step(x, 130), expected) == 0, each


def test_the_stages_that_count():
    assert {"stage6", "stage7"} <= set(COUNTING)
