"""What may hang or fault, on a GPU: each check in a process of its own, with a watchdog.

`python3 tests/test_gpu.py NAME` runs one of them; a stage that hangs names what it waits for when
its library is built with DEBUG=1."""
import ctypes
import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import time

import pytest
import torch

import layers
import tools
from test_submission import GPU, POSITIONS, Case, ref, same

ONE_LAUNCH = [stage for stage in tools.STAGES if stage >= "stage6"]
TINY = ref.Shape(d=64, ffn=64, n_q=1, n_kv=1, hd=64, prefill=100, max_seq_len=128)


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def compiled(name, *arguments):
    """A library made by nvcc in a folder that goes when the process does."""
    folder = tempfile.TemporaryDirectory(prefix="gpu.")
    compiled.folders = [*getattr(compiled, "folders", []), folder]
    path = os.path.join(folder.name, name)
    subprocess.run([tools.nvcc(), "-shared", "-Xcompiler", "-fPIC", *arguments, "-o", path], check=True)
    return ctypes.CDLL(path)


HOLD = tools.ROOT / "build" / "gpu" / "hold.so"


def holder():
    """hold(blocks, milliseconds, stream): see hold.cu."""
    made = ctypes.CDLL(str(HOLD))

    def hold(blocks, ms, stream):
        assert made.hold(blocks, ms, ctypes.c_void_p(stream.cuda_stream)) == 0
    hold(1, 1, torch.cuda.current_stream())          # loads it
    torch.cuda.synchronize()
    return hold


class Handle:
    """A layer of any stage, stepped through its C interface on the current stream."""

    def __init__(self, stage, shape=GPU, seed=1, library=None):
        self.lib = library or ctypes.CDLL(str(tools.ROOT / "build" / "gpu" / stage / "liblayer.so"))
        p = ctypes.c_void_p
        self.lib.layer_step.argtypes = (p, p, ctypes.c_int64, p, p)
        self.lib.layer_step_at.argtypes = (p, p, p, p, p)
        self.lib.layer_teardown.argtypes = (p,)
        self.shape, self.seed = shape, seed
        self.weights, self.cache = ref.make_weights(shape, seed, "cuda"), ref.make_cache(shape, seed, "cuda")
        self.original = ref.clone_cache(self.cache)
        self.build()

    def build(self):
        shape, w, p = self.shape, self.weights["layers"][0], ctypes.c_void_p
        config = ref.OracleConfig(shape.d, shape.ffn, shape.n_q, shape.n_kv, shape.hd, shape.max_seq_len,
                                  shape.eps, shape.theta, 0)
        pointers = ref.OracleWeights(**{name: w[name].data_ptr() for name in w})
        self.handle = p()
        assert self.lib.layer_build(ctypes.byref(self.handle), ctypes.byref(config), ctypes.byref(pointers),
                                    *(p(t.data_ptr()) for t in self.cache[0])) == 0
        torch.cuda.synchronize()

    def x(self, pos):
        return ref.make_x(self.shape, self.seed, pos, "cuda")

    def step(self, pos, x=None):
        x, out = self.x(pos) if x is None else x, torch.empty(1, self.shape.d, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        if isinstance(pos, torch.Tensor):
            status = self.lib.layer_step_at(self.handle, x.data_ptr(), pos.data_ptr(), out.data_ptr(), stream)
        else:
            status = self.lib.layer_step(self.handle, x.data_ptr(), pos, out.data_ptr(), stream)
        assert status == 0
        return out

    def steps(self, positions):
        for mine, theirs in zip(self.cache[0], self.original[0]):
            mine.copy_(theirs)
        return [self.step(pos) for pos in positions]


# ------------------------------------------------------------------- who else is on the GPU

def others_hold_half(stage, first):
    """A kernel that holds half of the multiprocessors, queued before the steps or among them."""
    hold, layer = holder(), Handle(stage)
    expected, xs = layer.steps(POSITIONS), [layer.x(pos) for pos in POSITIONS]
    mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for round_ in range(20):
        if first:
            hold(sms() // 2, 10, theirs)
        with torch.cuda.stream(mine):
            got = [layer.step(pos, x) for pos, x in zip(POSITIONS, xs)]
            if not first:
                hold(sms() // 2, 10, theirs)
            again = [layer.step(pos, x) for pos, x in zip(POSITIONS, xs)]
        torch.cuda.synchronize()
        assert same(got, expected) and same(again, expected), round_


def hazard_half_is_held_before():
    for stage in ONE_LAUNCH:
        others_hold_half(stage, first=True)


def hazard_half_is_held_afterwards():
    for stage in ONE_LAUNCH:
        others_hold_half(stage, first=False)


def hazard_first_step_beside_another_kernel():
    """The first launch loads the kernel, lazily or not, while another one runs."""
    for stage in ONE_LAUNCH:
        expected = Handle(stage).steps(POSITIONS)
        hold, theirs = holder(), torch.cuda.Stream()
        if stage == "stage7":
            m = Case().m                             # and through Python, in a new module
            fresh = Case.__new__(Case)
            fresh.__dict__.update(m=m, shape=GPU, seed=1, device="cuda", weights=ref.make_weights(GPU, 1, "cuda"),
                                  cache=ref.make_cache(GPU, 1, "cuda"))
            fresh.handle = fresh.build()
            hold(sms() // 2, 100, theirs)
            assert same([fresh.step(pos) for pos in POSITIONS], expected)
        layer = Handle(stage)
        hold(sms() // 2, 100, theirs)
        assert same([layer.step(pos) for pos in POSITIONS], expected)
        torch.cuda.synchronize()


def hazard_all_one_launch_stages_at_once():
    """Two layers of each stage that is one launch, each on a stream of its own."""
    layers = [Handle(stage, seed=seed) for stage in ONE_LAUNCH for seed in (1, 2)]
    expected = [layer.steps(POSITIONS) for layer in layers]
    xs = [[layer.x(pos) for pos in POSITIONS] for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for round_ in range(100):
        got = [[] for _ in layers]
        for j, pos in enumerate(POSITIONS):
            for i, layer in enumerate(layers):
                with torch.cuda.stream(streams[i]):
                    got[i].append(layer.step(pos, xs[i][j]))
        torch.cuda.synchronize()
        assert all(same(mine, theirs) for mine, theirs in zip(got, expected)), round_


def victim():
    case = Case(shape=ref.Shape(d=4096, ffn=14336, n_q=32, n_kv=8, prefill=4096, max_seq_len=4224))
    x = case.x(4096)
    case.step(4096, x)
    torch.cuda.synchronize()
    print("stepping", flush=True)
    while True:
        for pos in range(4096, 4160):
            case.step(pos, x)
        torch.cuda.synchronize()


def hazard_another_process_is_killed_in_a_step():
    case = Case()
    expected = case.steps(POSITIONS)
    for _ in range(2):
        other = subprocess.Popen([sys.executable, __file__, "victim"], stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "stepping\n"
        for round_ in range(50):
            assert same(case.steps(POSITIONS), expected)
        other.kill()
        other.wait()
        for round_ in range(50):
            assert same(case.steps(POSITIONS), expected)


# ------------------------------------------------------------------------------- many steps

def hazard_a_million_steps():
    case = Case(shape=TINY)
    xs, step, handle = [case.x(pos) for pos in range(128)], case.m.layer_step, case.handle
    first = [step(handle, x, pos) for pos, x in enumerate(xs)]
    first = [step(handle, x, pos) for pos, x in enumerate(xs)]        # every row is now what it will be
    start = time.time()
    for round_ in range(10**6 // 128 + 1):
        outs = [step(handle, x, pos) for pos, x in enumerate(xs)]
        if round_ % 500 == 0:
            assert same(outs, first), round_
    assert same(outs, first)
    print(f"note: a million steps at a small shape: {time.time() - start:.1f} s")


def hazard_counters_that_wrap():
    random.seed(9)
    for stage in ONE_LAUNCH:
        source = tools.ROOT / "stages" / stage
        if "layer_age" not in (source / "layer.c").read_text(encoding="utf-8"):
            continue
        lib = compiled("aged.so", "-DAGEING", str(source / "layer.c"),
                       str(tools.ROOT / "build" / "gpu" / stage / "kernels.o"))
        old = Handle(stage, library=lib)
        expected = old.steps(POSITIONS)
        # Odd ages: what a step has left must not look like the next one's, as it cannot in a run of steps.
        for age in (2**31 - 5, 2**32 - 5, *(random.randrange(2**32) | 1 for _ in range(10)),
                    *(2**32 // each - 1 | 1 for each in range(2, 1200, 13))):
            old.lib.layer_teardown(old.handle)
            old.build()
            got = old.steps(POSITIONS[:1])
            assert lib.layer_age(old.handle, ctypes.c_uint32(age)) == 0
            got += [old.step(pos) for pos in POSITIONS[1:]]
            torch.cuda.synchronize()
            assert same(got, expected), (stage, age)


# ------------------------------------------------------------------------------------ graphs

def hazard_graphs():
    """The position advances on the device; the counters of the barriers survive replays and the
    steps between them; a step captured with a number repeats that position."""
    for stage in ONE_LAUNCH:
        layer = Handle(stage)
        expected, xs = layer.steps(POSITIONS), [layer.x(pos) for pos in POSITIONS]
        x, pos = xs[0].clone(), torch.tensor([POSITIONS[0]], device="cuda")
        layer.step(pos, x)
        torch.cuda.synchronize()
        moving, frozen = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(moving):
            out = layer.step(pos, x)
            pos += 1
        with torch.cuda.graph(frozen):
            same_out = layer.step(POSITIONS[0], x)
        layer.steps([])
        for _ in range(50):
            pos.fill_(POSITIONS[0])
            got = []
            for i, each in enumerate(xs):
                x.copy_(each)
                if i % 2:
                    got.append(layer.step(POSITIONS[i], each))        # without the graph, now and then
                    pos += 1
                else:
                    moving.replay()
                    got.append(out.clone())
            assert same(got, expected), stage
        before = ref.clone_cache(layer.cache)
        x.copy_(xs[3])
        for _ in range(3):
            frozen.replay()
            row = POSITIONS[0]
            changed = [i for i in range(GPU.max_seq_len) if ref.differing(
                layer.cache[0][0][:, :, i], before[0][0][:, :, i])]
            assert changed == [row] and ref.differing(same_out, layer.step(row, xs[3])) == 0
        pos.fill_(GPU.max_seq_len - 1)
        moving.replay()
        moving.replay()                                              # past the end
        assert bool(out.isnan().all())
        layer.steps([])
        pos.fill_(POSITIONS[0])
        x.copy_(xs[0])
        moving.replay()
        assert same([out], expected[:1])


# ------------------------------------------------------------------------------ other terms

def hazard_numbers():
    """What the CPU target is asked about numbers, asked of the GPU."""
    subprocess.run([sys.executable, "-m", "pytest", str(tools.ROOT / "tests" / "test_numbers.py"), "-q", "-x",
                    "-k", "not far_out", "-p", "no:xdist"], check=True)


def hazard_plain_steps():
    """Run by the tests under other environments."""
    case = Case()
    exact = case.exact()
    for pos in [*POSITIONS, 383, 0, 64]:
        assert ref.relative_error(case.step(pos), exact.step(case.x(pos), pos)) <= 5e-3


def hoarded(sizes, take):
    """What take(size) gives until it gives nothing, for each of the sizes in turn."""
    hoard = []
    for size in sizes:
        while (piece := take(size)) is not None:
            hoard.append(piece)
    return hoard


def driver_memory():
    """take(bytes): an address or None, and give(address), of the driver itself. PyTorch takes no less
    than 2 MB at a time; what is left of a page that others have begun only the driver gives."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def take(size):
        address = ctypes.c_uint64()
        return None if cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) else address

    def give(address):
        assert cuda.cuMemFree_v2(address) == 0
    return take, give


def hazard_no_memory_for_the_scratch():
    """A build that finds none says so, leaves nothing, and works once there is some."""
    shape = ref.Shape(d=1024, ffn=1024, n_q=64, n_kv=64, hd=64, prefill=10, max_seq_len=65536)
    case = Case(shape=shape)
    expected = case.steps([10])
    case.m.teardown(case.handle)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    take, give = driver_memory()
    hoard = hoarded([1 << i for i in range(30, 15, -1)], take)     # 64 KB is less than the scratch
    for _ in range(3):
        before = torch.cuda.mem_get_info()[0]
        with pytest.raises(RuntimeError, match=layers.NO_BYTES + "scratch"):
            case.build()
        assert torch.cuda.mem_get_info()[0] == before
    for address in hoard:
        give(address)
    case.handle = case.build()
    assert same(case.steps([10]), expected)


def hazard_a_cache_of_more_than_2_to_the_31_elements():
    rows, pos = 2**21 + 64, 2**21 + 63
    shape = ref.Shape(d=1024, ffn=2048, n_q=16, n_kv=8, hd=128, prefill=8, max_seq_len=rows)
    weights = ref.make_weights(shape, 1, "cuda")
    k, v = (torch.zeros(1, 8, rows, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert k.numel() > 2**31
    m = Case(shape=TINY).m
    handle, x = m.build_layer(weights, [(k, v)], shape.cfg(), rows), ref.make_x(shape, 1, 5, "cuda")
    out = m.layer_step(handle, x, pos)
    exact = ref.ExactLayer(weights, [(k, v)], shape.cfg(), rows)
    h = exact.norm(x.view(-1).double(), exact.w["in_norm"])
    cos, sin = (t[0] for t in ref.rope_tables(128, shape.theta, [pos], "cuda", torch.float64))
    expected = (exact.rotate(ref.product64(exact.w["k"], h).view(8, 128), cos, sin),
                ref.product64(exact.w["v"], h).view(8, 128))
    for tensor, row in zip((k, v), expected):
        assert ref.row_error(tensor[0, :, pos], row) <= 5e-3
        tensor[:, :, pos] = 0
        assert not any(bool(part.any()) for part in tensor[0])       # and nothing anywhere else
    assert bool(torch.isfinite(out.float()).all())


def hazard_steps_back_to_back():
    """Bits of outputs and rows at the contract's shape are those of steps that are waited for one by one."""
    positions = range(4096, 4160)
    for stage in ONE_LAUNCH[-2:]:
        layer = Handle(stage, shape=ref.Shape())
        xs = [layer.x(pos) for pos in positions]

        def steps(wait):
            for tensor in layer.cache[0]:
                tensor[:, :, positions[0]:] = 0
            outs = []
            for pos, x in zip(positions, xs):
                outs.append(layer.step(pos, x))
                if wait:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            return outs, [tensor[0, :, positions[0]:].clone() for tensor in layer.cache[0]]
        outs, rows = steps(True)
        for round_ in range(300):
            got, written = steps(False)
            for name, mine, theirs in zip("KV", written, rows):
                wrong = (mine.view(torch.int16) != theirs.view(torch.int16)).nonzero()
                assert not len(wrong), (f"{stage}, round {round_}: {len(wrong)} elements of {name} differ, "
                                        f"first [head, step, i]: {wrong[:8].tolist()}")
            assert same(got, outs), (stage, round_)
        layer.lib.layer_teardown(layer.handle)


def hazard_a_process_ends_in_the_middle_of_a_step():
    """Without teardown, with steps queued."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_submission as t; case = t.Case(); " \
           "case.step(300); t.torch.cuda._sleep(200_000_000); [case.step(300) for _ in range(50)]; print('left')"
    done = subprocess.run([sys.executable, "-c", code, str(tools.ROOT / "tests")], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "left\n")


NEVER_STORED = "    store_relaxed(words + column + half, tagged(y.high, epoch));\n"


def hazard_values_that_never_come():
    """With DEBUG=1 whoever asks for them gives up after two seconds."""
    source = (tools.ROOT / "stages" / "stage7" / "kernels.cu").read_text(encoding="utf-8")
    assert source.count(NEVER_STORED) == 1
    with tempfile.NamedTemporaryFile("w", suffix=".cu") as kernels:
        kernels.write(source.replace(NEVER_STORED, ""))
        kernels.flush()
        library = compiled("debug.so", "-O3", "-std=c++17", "-arch=native", "-DDEBUG_SPINS", kernels.name,
                           str(tools.build("build/gpu/stage7/layer.o")))
    started = time.monotonic()
    with pytest.raises(Exception):
        Handle("stage7", TINY, library=library).step(100)
        torch.cuda.synchronize()
    assert 1.5 < time.monotonic() - started < 30


# name of the check, environment, seconds that it may take
HAZARDS = [
    ("half_is_held_before", {}, 60), ("half_is_held_afterwards", {}, 60),
    ("first_step_beside_another_kernel", {"CUDA_MODULE_LOADING": "LAZY"}, 60),
    ("first_step_beside_another_kernel", {"CUDA_MODULE_LOADING": "EAGER"}, 60),
    ("all_one_launch_stages_at_once", {}, 60), ("no_memory_for_the_scratch", {}, 90), ("steps_back_to_back", {}, 150),
]
TOGETHER = [   # to these it is all the same what else the GPU does
    ("a_million_steps", {}, 150), ("another_process_is_killed_in_a_step", {}, 120),
    ("numbers", {"LAYERS_ON": "gpu"}, 150), ("counters_that_wrap", {}, 120), ("graphs", {}, 60),
    ("plain_steps", {"CUDA_LAUNCH_BLOCKING": "1"}, 60),
    ("a_cache_of_more_than_2_to_the_31_elements", {}, 90), ("values_that_never_come", {}, 120),
    ("a_process_ends_in_the_middle_of_a_step", {}, 60),
]


@pytest.fixture(scope="module")
def libraries():
    for stage in tools.STAGES:
        tools.build(f"build/gpu/{stage}/liblayer.so")
    new = HOLD.with_suffix(".new")
    subprocess.run([tools.nvcc(), "-shared", "-Xcompiler", "-fPIC", "-arch=native", "-o", str(new),
                    str(tools.ROOT / "tests" / "hold.cu")], check=True)
    new.replace(HOLD)


def watch(check, env, limit):
    return tools.watched([sys.executable, __file__, "hazard_" + check, str(limit)], limit, **env)


@pytest.mark.gpu
@pytest.mark.parametrize("check, env, limit", HAZARDS,
                         ids=lambda v: v if isinstance(v, str) else "-".join(v.values()) if isinstance(v, dict) else "")
def test_hazard(libraries, check, env, limit):
    verdict, output = watch(check, env, limit)
    print(output)
    assert verdict == "passed"


@pytest.fixture(scope="module")
def watched(request, libraries):
    how = {check: (env, limit) for check, env, limit in TOGETHER}
    with tools.started(lambda check: watch(check, *how[check]),
                       tools.chosen(request, "test_hazard_beside_others", "check")) as result:
        yield result


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check for check, _, _ in TOGETHER])
def test_hazard_beside_others(watched, check):
    verdict, output = watched(check)
    print(output)
    assert verdict == "passed"


def test_the_hoard_leaves_less_than_its_smallest_piece():
    left = [1000]

    def take(size):
        if size > left[0]:
            return None
        left[0] -= size
        return size
    assert sum(hoarded([256, 64, 16], take)) == 992 and left == [8]


def test_every_hazard_is_run():
    assert {"hazard_" + name for name, _, _ in HAZARDS + TOGETHER} == {name for name in globals() if name.startswith("hazard_")}


@pytest.mark.gpu
def test_lifetimes_on_the_gpu():
    """What the CPU target is asked about lifetimes, asked of the GPU; alone, because memory is counted."""
    for stage in tools.STAGES:
        tools.build(f"build/gpu/{stage}/liblayer.so")
    verdict, output = tools.watched([sys.executable, "-m", "pytest", "tests/test_lifetimes.py", "-q", "-x",
                                     "-k", "thousand", "-p", "no:xdist"], 150, LAYERS_ON="gpu")
    print(output)
    assert verdict == "passed"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(max(5, float((sys.argv[2:] or ["60"])[0]) - 5), exit=True)
    if sys.argv[1] == "victim":
        faulthandler.cancel_dump_traceback_later()
        victim()
    globals()[sys.argv[1]]()
    print(sys.argv[1], "passed", flush=True)
