"""Numbers that hurt, for every stage, on the CPU target or a GPU (see layers.py): NaN where it must not be seen and where it
must, scores and gates without measure, ties of the rounding, tails, rotations far out."""
import ctypes
import math
import re
import subprocess

import pytest
import torch

import layers
import tools
from layers import SMALL, Layer, ref

NAN, INF = math.nan, math.inf
STAGES = tools.STAGES
LATER = [stage for stage in STAGES if stage not in ("stage0", "stage1")]   # single precision between phases
EDGES = (0, 1, 63, 64, 127, 128, 131)      # of tiles and of splits; the last row


def limit(stage):
    """The relative error of the output that a stage claims, as its driver does."""
    return 5e-3 if stage in LATER else 1.5e-2


def drawn(shape=SMALL, seed=1):
    return ref.make_weights(shape, seed), ref.make_cache(shape, seed)


def with_rows(cache, first, value, count=None):
    """A copy of a cache whose rows from the first on hold a value."""
    changed = ref.clone_cache(cache)
    for tensor in changed[0]:
        tensor[:, :, first:None if count is None else first + count] = value
    return changed


def exact(weights, cache, shape=SMALL):
    return ref.ExactLayer(weights, ref.clone_cache(cache), shape.cfg(), shape.max_seq_len)


def error_of(stage, weights, cache, x, pos, shape=SMALL):
    """Of one step, against float64; and the layer, and the float64 layer."""
    layer, right = Layer(stage, shape, weights, cache), exact(weights, cache, shape)
    return ref.relative_error(layer.step(x, pos), right.step(x, pos)), layer, right


def scaled(weights, **factors):
    layer = dict(weights["layers"][0])
    for name, factor in factors.items():
        layer[name] = (layer[name].float() * factor).to(torch.bfloat16)
    return {"layers": [layer]}


# -------------------------------------------------------------------------- rows of the cache

@pytest.mark.parametrize("stage", STAGES)
def test_rows_that_are_not_attended_to_do_not_matter(stage):
    weights, cache = drawn()
    for pos in EDGES:
        x, results = ref.make_x(SMALL, 1, pos), []
        for value in (0, NAN) if pos != 64 else (0, NAN, INF, -INF):
            layer = Layer(stage, SMALL, weights, with_rows(cache, pos, value))
            before = layer.caches()
            results.append(layer.step(x, pos))
            for now, then in zip(layer.caches(), before):       # row pos alone has changed
                then[:, :, pos] = now[:, :, pos]
                assert ref.differing(now, then) == 0, (pos, value)
            assert all(bool(torch.isfinite(t.float()).all()) for t in (results[-1], *layer.rows(pos)))
        assert all(ref.differing(results[0], other) == 0 for other in results[1:]), pos


@pytest.mark.parametrize("stage", STAGES)
def test_a_short_position_after_a_long_one(stage):
    weights, cache = drawn()
    layer = Layer(stage, SMALL, weights, cache)
    for pos in (131, 0, 130, 1, 64):
        fresh = Layer(stage, SMALL, weights, [layer.caches()])
        x = ref.make_x(SMALL, 1, pos)
        assert ref.differing(layer.step(x, pos), fresh.step(x, pos)) == 0, pos


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_that_is_attended_to_reaches_the_output_and_does_not_stick(stage):
    weights, cache = drawn()
    x, right = ref.make_x(SMALL, 1, 130), Layer(stage, SMALL, weights, cache).step(ref.make_x(SMALL, 1, 130), 130)
    for side in (0, 1):
        for row in (0, 63, 129):
            bad = ref.clone_cache(cache)
            bad[0][side][0, 1, row, 5] = NAN
            layer = Layer(stage, SMALL, weights, bad)
            assert bool(layer.step(x, 130).isnan().all()), (side, row)
            (layer.k, layer.v)[side][0, 1, row, 5] = cache[0][side][0, 1, row, 5]
            assert ref.differing(layer.step(x, 130), right) == 0, (side, row)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinity_in_the_cache_does_what_it_does_in_double_precision(stage, value):
    weights, cache = drawn()
    x = ref.make_x(SMALL, 1, 130)
    for side in (0, 1):
        bad = ref.clone_cache(cache)
        bad[0][side][0, 0, 70, 9] = value
        out = Layer(stage, SMALL, weights, bad).step(x, 130)
        right = exact(weights, bad).step(x, 130)
        assert torch.equal(out[0].isnan(), right.isnan()), side
        if not right.isnan().any():
            assert ref.relative_error(out, right) <= limit(stage)


# ------------------------------------------------------------------------------------------- x

@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_x_that_is_not_finite(stage, value):
    """Everything becomes NaN, the row too; a step at the same position with a good x heals both."""
    weights, cache = drawn()
    good = ref.make_x(SMALL, 1, 130)
    expected = Layer(stage, SMALL, weights, cache).step(good, 130)
    for at in (0, SMALL.d - 1):
        layer, bad = Layer(stage, SMALL, weights, cache), good.clone()
        bad[0, at] = value
        assert bool(layer.step(bad, 130).isnan().all())
        assert all(bool(row.isnan().all()) for row in layer.rows(130))
        assert bool(layer.step(good, 131).isnan().all())            # it attends to that row
        assert ref.differing(layer.step(good, 130), expected) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_x_of_zeros_outliers_and_tiny_numbers(stage):
    weights, cache = drawn()
    x = ref.make_x(SMALL, 1, 130)
    outlier, tiny = x.clone(), (x.float() * 1e-3).to(torch.bfloat16)
    outlier[0, 7], outlier[0, 90] = 3e4, -3e4
    for each in (torch.zeros_like(x), outlier, tiny, (x.float() * 1e15).to(torch.bfloat16)):
        error, layer, right = error_of(stage, weights, cache, each, 130)
        assert error <= limit(stage)
        if stage in LATER and each.count_nonzero():
            assert ref.element_excess(layer.rows(130)[0], right) <= 1
    huge = (x.float() * 1e20).to(torch.bfloat16)        # squares overflow: the normed vector is zero
    assert ref.differing(Layer(stage, SMALL, weights, cache).step(huge, 130), huge) == 0
    error, layer, _ = error_of(stage, weights, cache, torch.zeros_like(x), 0)
    assert not layer.rows(0)[0].count_nonzero() and not layer.rows(0)[1].count_nonzero()
    assert ref.differing(layer.step(torch.zeros_like(x), 0), torch.zeros_like(x)) == 0


# ------------------------------------------------------------------------------ scores and gates

@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("factor", [1e5, -1e5])
def test_scores_of_a_hundred_thousand(stage, factor):
    """About one key is left; where two are close, single precision may weigh them differently."""
    weights, cache = drawn()
    weights = scaled(weights, q=factor)
    error, _, right = error_of(stage, weights, cache, ref.make_x(SMALL, 1, 130), 130)
    assert error <= limit(stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("score", [1e5, -1e5])
def test_scores_that_are_all_alike_and_huge(stage, score):
    """All keys the same: the mean of the values, however large the scores. Stages 0 and 1 round x before
    they project it: the key that they write is another one, and may take all the weight, or none."""
    weights, cache = drawn()
    cache = ref.clone_cache(cache)
    pos, x = 130, ref.make_x(SMALL, 1, 130)
    right = exact(weights, cache)
    right.step(x, pos)
    key = right.k_row.to(torch.bfloat16)                     # so that the row being written is alike too
    cache[0][0][0] = key[:, None, :]
    error, _, _ = error_of(stage, scaled(weights, q=score), cache, x, pos)
    assert error <= limit(stage) if stage in LATER else error < INF


@pytest.mark.parametrize("stage", STAGES)
def test_gates_of_ten_thousand(stage):
    weights, cache = drawn()
    error, _, _ = error_of(stage, scaled(weights, gate=1e4), cache, ref.make_x(SMALL, 1, 130), 130)
    assert error <= limit(stage)


# -------------------------------------------------------------------------------------- rounding

@pytest.mark.parametrize("stage", STAGES)
def test_ties_of_stored_keys_and_values_go_to_even(stage):
    """x of ones and a vanishing eps make the normed x exactly one, position 0 does not rotate:
    the projections are sums that single precision holds exactly."""
    shape = ref.Shape(d=128, ffn=64, n_q=1, n_kv=1, hd=64, eps=1e-30, prefill=1, max_seq_len=8)
    weights, cache = drawn(shape)
    layer, ulp = weights["layers"][0], 2.0**-7
    sums = [1 + m * ulp + part * ulp for m in range(4) for part in (0.5, 0.25, 0.5 + 2.0**-9, 0.5 - 2.0**-9)]
    sums = torch.tensor([sign * s * scale for s in sums for sign in (1, -1) for scale in (1, 2.0**-20)] * 4)[:64]
    layer["in_norm"].fill_(1)
    for name in ("k", "v"):
        matrix, rest = layer[name].zero_(), sums.double()
        for column in (3, 70, 127):                          # three bf16 numbers hold 24 bits
            matrix[:, column] = rest.to(torch.bfloat16)
            rest = rest - matrix[:, column].double()
        assert not rest.count_nonzero()
    step = Layer(stage, shape, weights, cache)
    step.step(torch.ones(1, 128, dtype=torch.bfloat16), 0)
    for row in step.rows(0):
        assert ref.differing(row[0], sums.to(torch.bfloat16)) == 0


ROTATE = r"""
#include KERNELS
void rotate_all(int64_t pos, double theta, int hd, float *low, float *high);
void rotate_all(int64_t pos, double theta, int hd, float *low, float *high)
{
    for (int i = 0; i < hd / 2; i++)
        rotate(low + i, high + i, pos, pow(theta, -2.0 * i / (double)hd));
}
"""


@pytest.fixture(scope="module")
def rotations(tmp_path_factory):
    """Of stage 7 and of each stage that rotates a pair in other words, the rotation of one pair."""
    folder, found, seen = tmp_path_factory.mktemp("rotate"), {}, set()
    for stage in reversed(STAGES):
        kernels = tools.ROOT / "stages" / stage / "kernels.cu"
        words = re.findall(r"^DEVICE void rotate\(.*?^}", kernels.read_text(encoding="utf-8"), re.M | re.S)
        if not words or words[0] in seen:
            continue
        seen.add(words[0])
        (folder / "rotate.c").write_text(ROTATE, encoding="utf-8")
        made = folder / f"{stage}.so"
        subprocess.run(["gcc", "-std=c11", "-w", "-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-I",
                        str(tools.ROOT / "stages" / "cpu"), f'-DKERNELS="{kernels}"', "-o", str(made),
                        str(folder / "rotate.c"), str(tools.build("build/cpu/plain/cpu/cpu.o")), "-lm"], check=True)
        found[stage] = ctypes.CDLL(str(made)).rotate_all
    return found


@pytest.mark.parametrize("hd", [64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotations_far_out(rotations, theta, hd):
    """Before the rounding to bf16, 2**-20 of the pair's length is 4000 times less than the bound."""
    assert STAGES[-1] in rotations   # the others say it in the same words, or are here too
    torch.manual_seed(1)
    positions = [0, 1, 2, 4095, 4096, 65535, 65536, 99999, 131070, 131071, *torch.randint(131072, (200,)).tolist()]
    for stage, rotate in rotations.items():
        for pos in positions:
            low, high = torch.randn(2, hd // 2)
            angle = ref.rope_angles(hd, theta, [pos], "cpu")[0]
            expected = torch.cat([low.double() * angle.cos() - high.double() * angle.sin(),
                                  high.double() * angle.cos() + low.double() * angle.sin()])
            length = torch.hypot(low.double(), high.double()).repeat(2)
            rotate(ctypes.c_int64(pos), ctypes.c_double(theta), hd, ctypes.c_void_p(low.data_ptr()),
                   ctypes.c_void_p(high.data_ptr()))
            error = (torch.cat([low, high]).double() - expected).abs() / length
            assert float(error.max()) <= 2.0**-20, (stage, pos)


FAR = ref.Shape(d=64, ffn=64, n_q=1, n_kv=1, hd=64, theta=1e4, prefill=131070, max_seq_len=131072)


def test_the_last_row_of_a_long_cache():
    """A whole step of stage 7 over 131072 keys; a key row within the stated bound."""
    torch.manual_seed(1)
    weights = ref.make_weights(FAR, 1)
    cache = [tuple(torch.randn(1, 1, FAR.max_seq_len, FAR.hd).to(torch.bfloat16) for _ in range(2))]
    error, layer, right = error_of("stage7", weights, cache, ref.make_x(FAR, 1, 5), 131071, FAR)
    assert error <= 5e-3
    assert ref.element_excess(layer.rows(131071)[0], right) <= 1


# ----------------------------------------------------------------------------------------- tails

@pytest.mark.parametrize("stage", STAGES)
def test_only_the_last_row_or_column(stage):
    """A matrix of zeros but for its last row and its last column, large enough to be all there is."""
    weights, cache = drawn()
    x = ref.make_x(SMALL, 1, 130)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        changed, full = {"layers": [dict(weights["layers"][0])]}, weights["layers"][0][name]
        matrix = torch.zeros_like(full)
        matrix[-1, :], matrix[:, -1] = 30 * full[-1, :], 30 * full[:, -1]
        changed["layers"][0][name] = matrix
        error, layer, right = error_of(stage, changed, cache, x, 130)
        assert error <= limit(stage), name
        if stage in LATER:
            for mine, exactly in zip(layer.rows(130), (right.k_row, right.v_row)):
                assert ref.row_error(mine, exactly) <= 5e-3, name


# -------------------------------------------------------------------------------------- positions

@pytest.mark.parametrize("stage", STAGES)
def test_positions_that_are_refused_change_nothing(stage):
    weights, cache = drawn()
    layer = Layer(stage, SMALL, weights, cache)
    x, before = ref.make_x(SMALL, 1, 130), layer.caches()
    layer.x.copy_(x)
    layer.out.view(torch.int16).fill_(-1)
    for pos in (-1, 132, 2**31, 2**32 + 5, 2**40, -2**63, 2**63 - 1):
        assert layer.lib.layer_step(layer.handle, layer.x.data_ptr(), pos, layer.out.data_ptr(),
                                    None) == layers.BAD_POSITION
        layers.synchronize(layer.lib)
        assert bool((layer.out.view(torch.int16) == -1).all())
    assert layer.lib.layer_status(layer.handle) == 0
    right = Layer(stage, SMALL, weights, cache).step(x, 130)
    for pos in (-1, 132, 2**31, 2**32 + 5, -2**63, 2**63 - 1):
        assert bool(layer.step(x, pos, on_device=True).isnan().all())
        assert all(ref.differing(a, b) == 0 for a, b in zip(layer.caches(), before)), pos
        assert ref.differing(layer.step(x, 130, on_device=pos == 132), right) == 0     # nothing sticks
        before = layer.caches()
    assert layer.lib.layer_status(layer.handle) == layers.BAD_POSITION                 # but this does
