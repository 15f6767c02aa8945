"""reference.py: the three forms agree, the eager form is 43 operations, the grader's gates
pass what is good and fail what is bad. What needs a GPU is skipped without one."""
import contextlib
import ctypes
import faulthandler
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import reference as ref  # noqa: E402
import tools  # noqa: E402

BAD = ROOT / "tests" / "bad_submissions"
TINY = dict(d=128, ffn=192, n_q=4, n_kv=2, hd=64, prefill=9, max_seq_len=64)
needs_oracle = pytest.mark.skipif(not (ROOT / "build" / "liboracle.so").exists(),
                                  reason="build/liboracle.so is missing")


def needs_gpu(test):
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU")
    return pytest.mark.gpu(no_gpu(test))


def run(*arguments, timeout=300, **environment):
    return subprocess.run([sys.executable, str(ROOT / "reference.py"), *map(str, arguments)],
                          capture_output=True, text=True, timeout=timeout,
                          env=dict(os.environ, **environment))


# -------------------------------------------------------------------------------- inputs

def generated_slowly(key, i, offset, scale):
    """Element i by Python integers; a bf16 by truncating arithmetic on the fp32 bits."""
    total = offset - 393210
    for j in range(3 * i, 3 * i + 3):
        bits = ref.mix64_int((key + (j + 1) * ref.GOLDEN) % 2**64)
        total += sum(bits >> shift & 0xffff for shift in (0, 16, 32, 48))
    product = ref.to_fp32(total * ref.to_fp32(scale))   # exact in double, then rounded once
    u = ctypes.c_uint32.from_buffer(ctypes.c_float(product)).value
    return (u + 0x7fff + (u >> 16 & 1)) >> 16


@pytest.mark.parametrize("first", [0, 1, 12345, 2**31 - 3, 2**34])
def test_generator_is_its_definition(first):
    seed, tensor, offset, scale = 7, 3, 655360, 0.1 / 65536
    key = ref.mix64_int((seed * ref.GOLDEN + tensor) % 2**64)
    got = ref.generate(tensor, 8, seed, offset, scale, first)
    want = [generated_slowly(key, first + i, offset, scale) for i in range(8)]
    assert [int(v) & 0xffff for v in ref.bits(got)] == want


def test_generator_does_not_depend_on_chunks(monkeypatch):
    whole = ref.generate(5, 1000, 3)
    monkeypatch.setattr(ref, "CHUNK", 7)
    assert ref.differing(whole, ref.generate(5, 1000, 3)) == 0
    assert ref.differing(whole[100:], ref.generate(5, 900, 3, first=100)) == 0


def test_generator_is_close_to_normal():
    values = ref.generate(1000, 200_000, 1).double()
    assert abs(float(values.mean())) < 0.01 and abs(float(values.std()) - 1) < 0.01


def test_cache_rows_after_the_prefill_are_zero():
    shape = ref.Shape(**TINY)
    for tensor in ref.make_cache(shape, 1)[0]:
        assert bool((tensor[:, :, shape.prefill:] == 0).all())
        assert int((tensor[:, :, :shape.prefill] == 0).sum()) < 5


def test_weight_and_floor_bytes_are_the_contract_s():
    assert ref.Shape().weight_bytes() == 1_711_276_032
    assert ref.Shape().floor_bytes(32) == 1_711_276_032 + 2 * 8 * 4128 * 128 * 2


@needs_oracle
def test_generator_gives_the_bytes_of_c():
    assert ref.check_generator(ref.Shape(**TINY), 11, ref.load_oracle()) == 0


# ---------------------------------------------------------------------- the three forms

SHAPES = [dict(n_q=n_kv * rep, n_kv=n_kv, hd=hd)
          for n_kv, rep in ((1, 1), (3, 1), (1, 3), (2, 4), (1, 8)) for hd in (64, 128)]


@needs_oracle
@pytest.mark.parametrize("heads", SHAPES, ids=lambda h: "{n_q}q-{n_kv}kv-{hd}".format(**h))
@pytest.mark.parametrize("prefill", [0, 1, 37])
def test_forms_agree(heads, prefill):
    shape = ref.Shape(d=192, ffn=320, prefill=prefill, max_seq_len=prefill + 5, **heads)
    for errors in ref.check_steps(shape, seed=5, steps=3):
        for name, limit in ref.CHECK_LIMITS.items():
            assert errors[name] <= limit, (errors["pos"], name, errors[name])


@needs_oracle
def test_forms_agree_far_from_the_start():
    shape = ref.Shape(d=64, ffn=64, n_q=2, n_kv=1, hd=64, theta=1e4, prefill=5000,
                      max_seq_len=5002)
    for errors in ref.check_steps(shape, seed=5, steps=2):
        assert errors["float64_oracle"] <= 1e-10 and errors["cache_bits"] == 0


def test_eager_follows_the_documented_rounding():
    """Each operation of the list once more, with every rounding written out."""
    shape = ref.Shape(**TINY)
    weights, cache = ref.make_weights(shape, 2), ref.make_cache(shape, 2)
    w, pos, x = weights["layers"][0], shape.prefill, ref.make_x(shape, 2, shape.prefill)
    mine = ref.clone_cache(cache)
    out = ref.layer_step(ref.build_layer(weights, cache, shape.cfg(), shape.max_seq_len), x, pos)

    def r(t):
        return t.to(torch.bfloat16).float()

    def mat(matrix, h):
        return r(w[matrix].double() @ h.double().view(-1)).float()

    def norm(t, weight):
        n = r(t * torch.rsqrt((t * t).mean() + shape.eps))
        return r(n * w[weight].float())
    x32, hd, half = x.float().view(-1), shape.hd, shape.hd // 2
    h = norm(x32, "in_norm")
    angle = pos * shape.theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / hd)
    cos, sin = angle.cos().float(), angle.sin().float()

    def turn(t):
        a, b = t.view(-1, hd)[:, :half], t.view(-1, hd)[:, half:]
        return r(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    q, k, v = turn(mat("q", h)), turn(mat("k", h)), mat("v", h).view(-1, hd)
    mine[0][0][0, :, pos], mine[0][1][0, :, pos] = k, v
    K, V = (t[0, :, :pos + 1].float() for t in mine[0])
    q = q.view(shape.n_kv, -1, hd)
    scores = (q @ K.transpose(1, 2)) / math.sqrt(hd)
    attended = r(r(torch.softmax(scores, -1)) @ V).view(-1)
    x1 = r(x32 + mat("o", attended))
    h = norm(x1, "post_norm")
    g = mat("gate", h)
    m = r(r(g / (1 + torch.exp(-g))) * mat("up", h))
    expected = r(x1 + mat("down", m))
    assert ref.relative_error(out, expected) < 5e-4     # a rare element on a rounding edge
    for a, b in zip(cache[0], mine[0]):
        assert ref.relative_error(a, b) < 2e-4


def test_only_the_new_row_changes_and_inputs_stay():
    shape = ref.Shape(**TINY)
    weights, cache = ref.make_weights(shape, 2), ref.make_cache(shape, 2)
    before, pos = ref.clone_cache(cache), 4           # stale rows behind pos stay as well
    x = ref.make_x(shape, 2, pos)
    ref.layer_step(ref.build_layer(weights, cache, shape.cfg(), shape.max_seq_len), x, pos)
    for a, b in zip(cache[0], before[0]):
        assert ref.differing(a[:, :, pos], b[:, :, pos]) > 0
        b[:, :, pos] = a[:, :, pos]
        assert ref.differing(a, b) == 0
    assert ref.changed_weights(weights, shape, 2) == 0
    assert ref.differing(x, ref.make_x(shape, 2, pos)) == 0
    weights["layers"][0]["down"][-1, -1] += 1
    assert ref.changed_weights(weights, shape, 2) == 1


def test_rows_beyond_the_position_do_not_matter():
    shape = ref.Shape(**TINY)
    outs = []
    for stale in (0.0, math.nan):
        cache = ref.make_cache(shape, 2)
        for tensor in cache[0]:
            tensor[:, :, 3:] = stale
        handle = ref.build_layer(ref.make_weights(shape, 2), cache, shape.cfg(), 64)
        outs.append(ref.layer_step(handle, ref.make_x(shape, 2, 3), 3))
    assert ref.differing(*outs) == 0 and not bool(outs[0].isnan().any())


@pytest.mark.parametrize("pos", [-1, 64, 2**31])
def test_a_position_outside_the_cache_is_refused(pos):
    shape = ref.Shape(**TINY)
    handle = ref.build_layer(ref.make_weights(shape, 2), ref.make_cache(shape, 2), shape.cfg(),
                             shape.max_seq_len)
    with pytest.raises(ValueError, match="pos"):
        ref.layer_step(handle, ref.make_x(shape, 2, 0), pos)


# --------------------------------------------------------------------- the 43 operations

@pytest.mark.parametrize("prefill", [0, 9])
def test_eager_is_43_operations(prefill):
    shape = ref.Shape(**dict(TINY, prefill=prefill))
    operations = ref.logged_operations(shape)
    assert len(operations) == 43
    assert [op.name for op in operations] == [name for _, name in ref.OPERATIONS]


def test_operations_command():
    done = run("operations", "--d", 128, "--ffn", 128)
    assert done.returncode == 0 and done.stdout.endswith("43 operations\n")


def test_log_counts_no_view_and_each_computation():
    with ref.OperationLog() as log:
        a = torch.ones(4, 6)
        a.t().reshape(4, 6)[1:, 2].add_(1)
    names = [op.name for op in log.operations]
    assert "add_" in names and not {"t", "slice", "select", "view", "empty"} & set(names)


# ------------------------------------------------------------------------------ profiler

def trace_of(kernels):
    """A trace as the profiler writes it; kernels: (operation or None, name, category)."""
    events = [dict(ph="M", name="process_name")]
    for i, (operation, name, category) in enumerate(kernels):
        at = 100.0 * i
        if operation is not None:
            events.append(dict(ph="X", cat="user_annotation", name=f"operation {operation}",
                               ts=at, dur=50.0))
        events.append(dict(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", ts=at + 5,
                           dur=4.0, args=dict(correlation=i)))
        events.append(dict(ph="X", cat=category, name=name, ts=at + 3000, dur=2.0 + i,
                           args=dict(correlation=i, stream=7)))
    return dict(traceEvents=events[::-1])


def test_trace_is_read_in_order_and_attributed():
    trace = trace_of([(0, "add", "kernel"), (1, "gemm", "kernel"),
                      (1, "cublasLt::splitKreduce_kernel", "kernel"), (None, "set", "gpu_memset")])
    found = ref.activities(trace)
    assert [a.name for a in found] == ["add", "gemm", "cublasLt::splitKreduce_kernel", "set"]
    assert ref.count_kinds(found) == dict(kernel=3, gpu_memcpy=0, gpu_memset=1)
    assert [ref.is_helper(a.name) for a in found] == [False, False, True, False]
    owned = ref.attribute(trace)
    assert [a.name for a in owned[0]] == ["add"]
    assert [a.name for a in owned[1]] == ["gemm", "cublasLt::splitKreduce_kernel"]
    assert [a.name for a in owned[-1]] == ["set"]


def test_an_empty_trace_has_no_launches_and_fails():
    measured = ref.summarise_launches(ref.activities(dict(traceEvents=[])), 4)
    assert not ref.gate_launches(measured).passed and not ref.gate_dominant(measured).passed


def test_fills_and_copies_are_launches_and_count_in_the_share():
    def step(extra):
        return [ref.Activity("layer", "kernel", 0, 95.0, 1),
                ref.Activity("fill", extra, 0, 5.0, 2)]
    good = ref.summarise_launches(step("gpu_memset") * 4, 4)
    assert good["launches_per_step"] == 2 and good["dominant_share"] == 0.95
    assert ref.gate_launches(good).passed and ref.gate_dominant(good).passed
    more = ref.summarise_launches(step("gpu_memset") * 4 + step("gpu_memcpy")[1:], 4)
    assert not ref.gate_launches(more).passed and not ref.gate_dominant(more).passed
    copies = ref.summarise_launches([ref.Activity("copy", "gpu_memcpy", 0, 9.0, 1)], 1)
    assert not ref.gate_dominant(copies).passed      # a copy is not the one kernel


# --------------------------------------------------------------------------------- gates

GOOD = dict(control=dict(ref.CONTROL), compared_errors=[4e-3] * 8, misshapen_outputs=0,
            launches_per_step=1.0, dominant_share=1.0, last_timed_error=4e-3, copy_tbs=4.2,
            us_median=400.0, exact_errors=[2e-3] * 8, cache_row_errors=[2e-3] * 8,
            other_cache_changes=0, timed_row_errors=[3e-3] * 32, x_changes=0, weight_changes=0,
            overwritten_outputs=0, different_repeats=0, late_x_error=4e-3, busy_call_ms=0.02,
            host_us_median=9.0, rotation_errors=[4e-3] * 3, failures={})


def failing(**changes):
    gates, passed = ref.judge(dict(GOOD, **changes))
    names = [gate.name for gate in gates if not gate.passed]
    assert passed == (not names)
    return names


def test_good_numbers_pass():
    assert failing() == []


@pytest.mark.parametrize("key", sorted(set(GOOD)))
def test_each_number_has_a_gate_and_is_missed(key):
    measured = {k: v for k, v in GOOD.items() if k != key}
    gates, passed = ref.judge(measured)
    assert not passed and sum(not gate.passed for gate in gates) == 1


@pytest.mark.parametrize("changes", [
    dict(control=dict(kernel=15, gpu_memcpy=3, gpu_memset=2)), dict(control=dict(kernel=0)),
    dict(control=dict(kernel=17, gpu_memcpy=3, gpu_memset=1)),
    dict(compared_errors=[4e-3] * 7 + [1.6e-2]), dict(compared_errors=[math.nan] + [4e-3] * 7),
    dict(compared_errors=[4e-3] * 4 + [math.nan] + [4e-3] * 3),
    dict(compared_errors=[4e-3] * 7), dict(compared_errors=[]), dict(misshapen_outputs=1),
    dict(launches_per_step=2.25), dict(launches_per_step=0.0), dict(launches_per_step=43.0),
    dict(launches_per_step=math.nan), dict(dominant_share=0.94), dict(dominant_share=math.nan),
    dict(last_timed_error=math.nan), dict(last_timed_error=math.inf), dict(copy_tbs=0.0),
    dict(copy_tbs=math.nan), dict(us_median=math.nan), dict(exact_errors=[6e-3] * 8),
    dict(cache_row_errors=[1.0] * 8), dict(cache_row_errors=[2e-3] * 7 + [math.nan]),
    dict(other_cache_changes=1), dict(timed_row_errors=[1.0] + [1e-3] * 31), dict(x_changes=1),
    dict(weight_changes=1), dict(overwritten_outputs=1), dict(different_repeats=1),
    dict(late_x_error=1.4), dict(late_x_error=math.nan), dict(busy_call_ms=100.0),
    dict(host_us_median=15.1), dict(rotation_errors=[4e-3, 4e-3, 0.5]),
    dict(rotation_errors=[4e-3, 4e-3]), dict(failures=dict(steps="RuntimeError: x"))],
    ids=lambda c: "-".join(f"{k}" for k in c))
def test_bad_numbers_fail_their_gate_alone(changes):
    assert len(failing(**changes)) == 1


def test_limits_are_inclusive():
    assert failing(compared_errors=[1.5e-2] * 8, launches_per_step=2.0, dominant_share=0.95,
                   host_us_median=15.0) == []


def test_worst_does_not_lose_a_nan():
    for values in ([math.nan, 1.0], [1.0, math.nan], [], None):
        assert math.isnan(ref.worst(values))
    assert ref.worst([1.0, 3.0, 2.0], 3) == 3.0


def test_relative_error():
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    assert ref.relative_error(b, a) == pytest.approx(0.1)
    assert math.isnan(ref.relative_error(torch.tensor([[math.nan, 4.0]]), a))


def test_half_ulp_of_bf16():
    values = torch.tensor([1.0, 1.99, 2.0, 0.75, -3.0], dtype=torch.float64)
    assert ref.half_ulp(values).tolist() == [2**-8, 2**-8, 2**-7, 2**-9, 2**-7]


def test_derived_numbers():
    shape = ref.Shape()
    us = shape.floor_bytes(32) / 4.0 / 1e6            # exactly at a copy of 4 TB/s
    derived = ref.derive(dict(us_median=us, us_rotation_median=2 * us, copy_tbs=4.0,
                              read_tbs=None), shape)
    assert derived["x_copy_us"] == pytest.approx(1.0)
    assert derived["x_copy_us_rotation"] == pytest.approx(2.0)
    assert derived["tokens_per_s_us"] == pytest.approx(1e6 / us) and "x_read_us" not in derived
    assert "suspicious" not in derived
    fast = ref.derive(dict(us_median=us, read_tbs=3.0), shape)
    assert fast["x_read_us"] == pytest.approx(0.75) and "suspicious" in fast


def test_a_submission_that_reads_fewer_bytes_is_said_to():
    shape = ref.Shape()
    size, read = shape.floor_bytes(32), 1_290_000_000
    us = 1.1 * (size - shape.weight_bytes() + read) / 4.6 / 1e6
    measured = dict(us_median=us, copy_tbs=4.2, read_tbs=4.6, weight_bytes_read=read + 4 * shape.d)
    derived = ref.derive(measured, shape)
    assert derived["floor_bytes"] == size
    assert derived["read_bytes"] == size - shape.weight_bytes() + read
    assert derived["x_read_us"] == pytest.approx(1.1) and "suspicious" not in derived
    assert derived["x_copy_us"] == pytest.approx(us / (size / 4.2 / 1e6))
    assert str(size) in derived["fewer_bytes"] and str(derived["read_bytes"]) in derived["fewer_bytes"]
    assert "suspicious" in ref.derive(dict(measured, us_median=us / 1.2), shape)
    whole = ref.derive(dict(measured, weight_bytes_read=shape.weight_bytes() + 4 * shape.d), shape)
    assert "fewer_bytes" not in whole and whole["read_bytes"] == size


def test_percentiles_and_probe():
    assert ref.percentile([3, 1, 2], 0.5) == 2 and ref.percentile([5], 0.9) == 5
    assert ref.percentile(list(range(11)), 0.9) == pytest.approx(9)
    assert ref.parse_probe("copy,read\n4.25,4.61\n") == (4.25, 4.61)
    said = "stage 7 on a GPU: d 8192, 4096 keys, seed 1\n  pass  the read-only probe reads all\n"
    assert ref.parse_probe(said + "4.2513,4.6177\nPASS\n") == (4.2513, 4.6177)
    for nothing in ("no GPU\n", "0.0000,0.0000\nPASS\n", "nan,inf\n", "4.25\n", ""):
        assert ref.parse_probe(nothing) == (None, None)


def test_files_are_written_whole(tmp_path):
    path = tmp_path / "grade.json"
    ref.write_json(path, dict(value=math.nan, inner=[1.0, math.inf]))
    assert json.loads(path.read_text()) == dict(value=None, inner=[1.0, None])

    def breaks(file):
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ref.write_whole(path, breaks)
    assert json.loads(path.read_text())["value"] is None
    assert os.listdir(tmp_path) == ["grade.json"]


# ------------------------------------------------ submissions, as far as a CPU can grade

CPU_PARTS = ("steps", "repeats", "unchanged")


def cpu_failures(path):
    """Names of the gates over the CPU's parts that a submission fails."""
    grading = ref.Grading(ref.load_submission(path), ref.Shape(**TINY), 3, "cpu")
    measured = ref.measure(grading, CPU_PARTS)
    gates, _ = ref.judge(dict({k: v for k, v in GOOD.items() if k not in measured}, **measured))
    return {gate.name for gate in gates if not gate.passed}, measured


COMPARED = "compared steps: worst error against eager"
EXACT = "compared steps: worst error against float64"
ROWS, OTHERS = "cache rows: worst error against float64", "other cache elements changed"
LAUNCHES = "launches a step"
EXPECTED = {   # the gates that a bad submission must fail, on a CPU and on a GPU
    "skips_append": ({ROWS}, {ROWS}),
    "returns_nan": ({COMPARED, EXACT}, {COMPARED, EXACT}),
    "previous_output": ({COMPARED}, {COMPARED}),
    "wrong_row": ({OTHERS}, {OTHERS}),
    "same_buffer": ({"outputs changed by later steps"}, {"outputs changed by later steps"}),
    "writes_x": ({"elements of x changed"}, {"elements of x changed"}),
    "own_stream": (set(), {"x written late on the caller's stream: error"}),
    "eager": (set(), {LAUNCHES, "share of device time in one kernel"}),
}


def test_every_bad_submission_is_expected_to_fail_somewhere():
    files = {path.stem for path in BAD.glob("*.py")} - {"spoil"}
    assert files == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_bad_submissions_on_a_cpu(name):
    names, measured = cpu_failures(BAD / f"{name}.py")
    assert measured["failures"] == {}
    assert EXPECTED[name][0] <= names
    if not EXPECTED[name][0]:
        assert names - {EXACT} == set()   # eager may exceed 5e-3 at a tiny shape


def test_previous_output_is_caught_although_repeats_agree():
    names, measured = cpu_failures(BAD / "previous_output.py")
    assert measured["different_repeats"] == 0 and COMPARED in names


def write_submission(path, body):
    path.write_text("import sys\nsys.path.insert(0, %r)\nfrom spoil import Handle as build_layer\n"
                    "def layer_step(handle, x, pos):\n%s" % (str(BAD), body))
    return path


@pytest.mark.parametrize("body, gate", [
    ("    raise RuntimeError('no')\n", "parts that raised an exception"),
    ("    return handle.step(x, pos).double()\n", None),
    ("    return handle.step(x, pos)[0]\n", "outputs of another shape, type or device"),
    ("    out = handle.step(x, pos)\n    handle.inner.w['o'][0, 0] += 1\n    return out\n",
     "elements of the weights changed"),
    ("    out = handle.step(x, pos)\n    handle.v_cache[0, 0, 0, 0] += 1\n    return out\n", OTHERS),
    ("    import torch\n    return handle.step(x, pos) + 0.1 * torch.rand(1, 1).bfloat16()\n",
     "of 20 repeats, different in a bit"),
    ("    return handle.step(x, pos).fill_(float('nan'))\n", "of 20 repeats, different in a bit"),
], ids=["raises", "float64", "one-dimensional", "weights", "old-row", "random", "all-nan"])
def test_other_faults_on_a_cpu(tmp_path, body, gate):
    names, _ = cpu_failures(write_submission(tmp_path / "bad.py", body))
    assert names - {EXACT} and (gate is None or gate in names)


def test_a_file_without_the_entry_points(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(AttributeError, match="build_layer"):
        ref.load_submission(tmp_path / "empty.py")


# ------------------------------------------------------------------------------ commands

@pytest.mark.parametrize("command", ["check", "operations", "bench", "vectors", "grade"])
def test_help(command):
    done = run(command, "--help")
    assert done.returncode == 0 and "--seed" in done.stdout


@needs_oracle
def test_check_command():
    done = run("check", "--d", 128, "--ffn", 128, "--n-q", 3, "--n-kv", 3, "--prefill", 0)
    assert done.returncode == 0 and done.stdout.endswith("PASS\n")


def test_shapes_that_cannot_be_are_refused():
    assert run("vectors", "--n-q", 3, "--n-kv", 2).returncode == 1
    assert run("vectors", "--max-seq", 4).returncode == 1


def test_vectors_command(tmp_path):
    numpy = pytest.importorskip("numpy")
    out = tmp_path / "v.npz"
    done = run("vectors", "--d", 64, "--ffn", 128, "--steps", 2, "--prefill", 3, "--out", out)
    assert done.returncode == 0
    held = numpy.load(out)
    config = json.loads(str(held["config"]))
    assert config["d"] == 64 and config["prefill"] == 3 and held["pos"].tolist() == [3, 4]
    assert held["q"].dtype == numpy.uint16 and held["x"].shape == (2, 64)
    assert held["x_out_float64"].shape == (2, 64) and held["x_out_float64"].dtype == numpy.float64
    eager = torch.from_numpy(held["x_out_eager"].astype("int32") << 16).view(torch.float32)
    assert ref.relative_error(eager, torch.from_numpy(held["x_out_float64"])) < 1.5e-2


@pytest.mark.parametrize("command", ["bench", "grade"])
def test_without_a_gpu_the_status_is_2(command):
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "GPU" in done.stderr


class PretendEvent:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1000


@pytest.fixture
def pretend_gpu(monkeypatch, tmp_path):
    """The CPU in the place of a GPU, and a profiler that sees one kernel a step: every line
    of grade runs, though what it measures means nothing."""
    def trace(function):
        function()
        return trace_of([(None, "layer", "kernel")] * ref.PROFILED)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for name, value in dict(is_available=lambda: True, synchronize=nothing, Event=PretendEvent,
                            Stream=nothing, _sleep=nothing, current_device=lambda: 0,
                            stream=lambda s: contextlib.nullcontext(),
                            get_device_name=lambda: "pretended").items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setenv("GOOD_SUBMISSION", ref.__file__)   # stage 7's needs a real GPU
    monkeypatch.setattr(ref, "prove_profiler", lambda: dict(ref.CONTROL))
    monkeypatch.setattr(ref, "device_trace", trace)
    monkeypatch.setattr(ref, "SMALL", TINY)
    monkeypatch.setattr(ref, "copy_bandwidth", lambda device: 1.0)
    monkeypatch.setattr(ref, "Grading", lambda s, shape, seed, _: GRADING(s, shape, seed, "cpu"))
    yield tmp_path / "grade.json"
    faulthandler.cancel_dump_traceback_later()


GRADING = ref.Grading
NOT_ON_A_CPU = {EXACT, "host time of a call", "layer_step returns while the GPU is busy"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_whole_of_grade_with_a_pretended_gpu(name, pretend_gpu, capsys):
    status = ref.main(["grade", str(BAD / f"{name}.py"), "--small", "--out", str(pretend_gpu)])
    content = json.loads(pretend_gpu.read_text())
    failed = {gate["name"] for gate in content["gates"] if not gate["passed"]}
    assert content["measured"]["failures"] == {}
    assert status == 1 and not content["pass"]      # a step on a CPU takes longer than 15 us
    assert EXPECTED[name][0] <= failed
    if not EXPECTED[name][0]:
        assert failed <= NOT_ON_A_CPU
    for key in ("gpu", "driver", "cuda", "clocks", "commit", "date", "protocol"):
        assert key in content
    out = capsys.readouterr().out
    assert out.endswith("FAIL\n") and "host time of a call" in out


def test_a_submission_that_does_not_load_fails(pretend_gpu, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    for name in ("broken.py", "missing.py"):
        assert ref.main(["grade", str(tmp_path / name), "--out", str(pretend_gpu)]) == 1
        assert "does not load" in capsys.readouterr().err
    assert not pretend_gpu.exists()


def test_grade_passes_where_every_gate_does(pretend_gpu, monkeypatch, capsys):
    monkeypatch.setattr(ref, "EXACT_TOLERANCE", 1.0)
    monkeypatch.setattr(GRADING, "measure_host_time",
                        lambda self: dict(host_us_median=9.0, host_us_p90=9.5))
    status = ref.main(["grade", str(BAD / "eager.py"), "--small", "--out", str(pretend_gpu)])
    assert json.loads(pretend_gpu.read_text())["pass"] and status == 0
    assert capsys.readouterr().out.endswith("PASS\n")


def test_operations_are_annotated_one_by_one():
    """As bench does it: the ranges of the profiler are the operations, in order."""
    shape = ref.Shape(**TINY)
    handle = ref.build_layer(ref.make_weights(shape, 1), ref.make_cache(shape, 1), shape.cfg(),
                             shape.max_seq_len)
    x, log = ref.make_x(shape, 1, 9), ref.OperationLog(annotate=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with log:
            ref.layer_step(handle, x, 9)
    names = {e.name for e in profiler.events() if e.name.startswith("operation ")}
    assert len(log.operations) == 43
    folded = {i for i, op in enumerate(log.operations) if op.name in ("baddbmm", "bmm", "silu")}
    assert names == {f"operation {i}" for i in set(range(43)) - folded}


# ------------------------------------------------------------------------- with a GPU

@pytest.fixture(scope="module")
def graded_small(request, tmp_path_factory):
    names = tools.chosen(request, "test_bad_submissions_on_a_gpu", "name")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}   # not by several threads at once
    with tools.started(lambda name: grade_small(BAD / f"{name}.py", folders[name]), names) as result:
        yield result


def grade_small(path, tmp_path):
    out = tmp_path / "grade.json"
    done = run("grade", path, "--small", "--out", out, timeout=400)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    content = json.loads(out.read_text())
    assert done.returncode == (0 if content["pass"] else 1)
    return {gate["name"] for gate in content["gates"] if not gate["passed"]}, content


@needs_gpu
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_bad_submissions_on_a_gpu(name, graded_small):
    names, content = graded_small(name)
    assert not content["pass"] and EXPECTED[name][1] <= names


@needs_gpu
def test_stage_7_passes_at_a_small_shape(tmp_path):
    path = ROOT / "stages" / "stage7" / "submission.py"
    if not path.exists():
        pytest.skip("stages/stage7/submission.py is missing")
    names, content = grade_small(path, tmp_path)
    assert names == set() and content["pass"]


@needs_gpu
def test_profiler_counts_the_control_region():
    assert ref.prove_profiler() == ref.CONTROL


@needs_gpu
def test_bench_finds_43_kernels():
    done = run("bench", "--d", 2048, "--ffn", 4096, "--n-q", 16, "--n-kv", 2, "--hd", 128,
               "--prefill", 512)
    assert done.returncode == 0, done.stdout[-3000:]


@needs_gpu
def test_inputs_are_the_same_bytes_on_both_devices():
    shape = ref.Shape(**TINY)
    here, there = ref.make_weights(shape, 4), ref.make_weights(shape, 4, "cuda")
    for name, tensor in here["layers"][0].items():
        assert ref.differing(tensor, there["layers"][0][name].cpu()) == 0
    for a, b in zip(ref.make_cache(shape, 4)[0], ref.make_cache(shape, 4, "cuda")[0]):
        assert ref.differing(a, b.cpu()) == 0
