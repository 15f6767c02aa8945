"""Stage 8's packed weights on the CPU target: every bit of every weight comes back, whatever it is,
and a step gives the bits of the twin that reads raw weights."""
import ctypes
import gc
import os
import re
import sys
import weakref

import numpy
import pytest

import mutants
import test_submission as python_side
import tools

sys.path.insert(0, str(tools.ROOT))
import reference as ref  # noqa: E402

STAGE = tools.ROOT / "stages" / "stage8"
NAMES = ("q", "k", "v", "o", "gate", "up", "down")
# Rows of whole steps of 512 and something left, less than a step, and just one; down in two pieces.
SHAPES = [dict(d=640, ffn=1152, n_q=3, n_kv=1, hd=64), dict(d=512, ffn=576, n_q=8, n_kv=4, hd=64)]
DEEP = dict(d=64, ffn=8256, n_q=2, n_kv=1, hd=64)   # two pieces of down
ROWS, POS = 70, 65


class Packing(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_int64), ("exceptions", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("raw", ctypes.c_int32), ("base", ctypes.c_int32)]


def compiled(folder, *options, change=lambda text: text):
    """Stage 8 and the CPU target in one shared library."""
    kernels = change((STAGE / "kernels.cu").read_text(encoding="utf-8"))
    record = python_side.load(STAGE / "submission.py").SOURCES["record.c"]
    path = tools.stage_and_cpu("stage8", folder, record, *options, kernels=kernels)
    os.environ["CPU_SMS"] = "3"
    library = ctypes.CDLL(str(path))
    library.path = path
    library.layer_weight_bytes.restype = ctypes.c_int64
    library.layer_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
                                   ctypes.c_void_p)
    return library


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("twin"), "-DTWIN")


# ---------------------------------------------------------------------------------- weights

def bf16(values):
    """Rounded to nearest, as 16 bits."""
    bits = numpy.asarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def widened(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def normal(rng, rows, n):
    return bf16(rng.standard_normal((rows, n)) / n ** 0.5)


def sprinkled(rng, rows, n, odd, share=400):
    """Normal weights, one in `share` of them replaced by a random one of `odd`."""
    w = normal(rng, rows, n)
    where = rng.random((rows, n)) < 1 / share
    w[where] = rng.choice(numpy.array(odd, dtype=numpy.uint16), size=int(where.sum()))
    return w


def one_odd_row(rng, rows, n):
    """More exceptions in one row than its list has room for, though few in all."""
    w = normal(rng, rows, n)
    w[rows // 3, :rows * n // 1000] = rng.choice(numpy.array([0, 0x8000, 0x0003, 0x4100], dtype=numpy.uint16),
                                                 size=min(n, rows * n // 1000))
    return w


def three_odd_rows(rng, rows, n):
    """Each with more exceptions than its list has room for, and than a warp has lanes."""
    w, odd = normal(rng, rows, n), numpy.array([0, 0x8000, 0x0003, 0x4100], dtype=numpy.uint16)
    for row in (0, rows // 2, rows - 1):
        w[row, rng.permutation(n)[:40]] = rng.choice(odd, size=40)
    return w


def one_outlier(rng, rows, n):
    w = normal(rng, rows, n)
    w[rows // 2, n - 1] = 0x7149        # 1e30
    return w


FINITE = [0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x2000, 0x40a0, 0xc0a0]   # 0, denormals, 2^-126 .., 5
KINDS = {
    "normal": normal,
    "few zeros and others": lambda rng, rows, n: sprinkled(rng, rows, n, FINITE),
    "one odd row": one_odd_row,
    "three odd rows": three_odd_rows,
    "one outlier": one_outlier,
    "infinities and NaNs": lambda rng, rows, n: sprinkled(rng, rows, n, [0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81]),
    "all equal": lambda rng, rows, n: numpy.full((rows, n), 0x3c12, dtype=numpy.uint16),
    "sixteen exponents": lambda rng, rows, n: (rng.integers(0, 2, (rows, n)) << 15 | rng.integers(105, 121, (rows, n)) << 7
                                               | rng.integers(0, 128, (rows, n))).astype(numpy.uint16),
    "heavy tails": lambda rng, rows, n: bf16(rng.standard_t(3, (rows, n)) / n ** 0.5),
    "zeros": lambda rng, rows, n: rng.choice(numpy.array([0, 0x8000], dtype=numpy.uint16), (rows, n)),
    "denormals": lambda rng, rows, n: (rng.integers(0, 128, (rows, n)) | rng.integers(0, 2, (rows, n)) << 15).astype(numpy.uint16),
    "only infinities": lambda rng, rows, n: numpy.full((rows, n), 0xff80, dtype=numpy.uint16),
    "only NaNs": lambda rng, rows, n: (0x7f81 + rng.integers(0, 127, (rows, n))).astype(numpy.uint16),
    "random bits": lambda rng, rows, n: rng.integers(0, 1 << 16, (rows, n)).astype(numpy.uint16),
    "many exponents": lambda rng, rows, n: (rng.integers(0, 2, (rows, n)) << 15 | rng.integers(85, 123, (rows, n)) << 7
                                            | rng.integers(0, 128, (rows, n))).astype(numpy.uint16),
}
ALWAYS_RAW = {"zeros", "denormals", "only infinities", "only NaNs", "random bits", "many exponents"}
STAYS_FINITE = ["normal", "few zeros and others", "one odd row", "three odd rows", "all equal", "sixteen exponents", "heavy tails",
                "many exponents"]


def sizes(c):
    q, kv = c["n_q"] * c["hd"], c["n_kv"] * c["hd"]
    return dict(q=(q, c["d"]), k=(kv, c["d"]), v=(kv, c["d"]), o=(c["d"], q), gate=(c["ffn"], c["d"]),
                up=(c["ffn"], c["d"]), down=(c["d"], c["ffn"]))


def drawn(shape, kinds, seed):
    """All tensors of a layer as 16 bits; kinds: of NAMES, in turn."""
    rng = numpy.random.default_rng(seed)
    w = {name: KINDS[kinds[i % len(kinds)]](rng, *size) for i, (name, size) in enumerate(sizes(shape).items())}
    w["in_norm"], w["post_norm"] = (bf16(1 + 0.1 * rng.standard_normal(shape["d"])) for _ in range(2))
    return w, bf16(rng.standard_normal((2, shape["n_kv"], ROWS, shape["hd"]))), bf16(rng.standard_normal(shape["d"]))


# ----------------------------------------------------------------------- a layer in a library

class Layer:
    def __init__(self, library, shape, w, caches, blocks=0):
        self.library, self.shape, self.w, self.memory = library, shape, w, []
        self.weights = {name: self.put(bits) for name, bits in w.items()}
        self.k, self.v = self.put(caches[0]), self.put(caches[1])
        config = ref.OracleConfig(*(shape[name] for name in ("d", "ffn", "n_q", "n_kv", "hd")), ROWS, 1e-5, 5e5, blocks)
        self.handle = ctypes.c_void_p()
        assert library.layer_build(ctypes.byref(self.handle), ctypes.byref(config),
                                   ctypes.byref(ref.OracleWeights(**self.weights)), self.k, self.v) == 0

    def room(self, size):
        address = ctypes.c_void_p()
        assert self.library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.memory.append(address)
        return address

    def put(self, bits):
        address = self.room(bits.nbytes)
        self.overwrite(address, bits)
        return address

    def overwrite(self, address, bits):
        bits = numpy.ascontiguousarray(bits)
        assert self.library.cudaMemcpy(address, ctypes.c_void_p(bits.ctypes.data), ctypes.c_size_t(bits.nbytes), 1) == 0

    def get(self, address, shape):
        bits = numpy.empty(shape, dtype=numpy.uint16)
        assert self.library.cudaMemcpy(ctypes.c_void_p(bits.ctypes.data), address, ctypes.c_size_t(bits.nbytes), 2) == 0
        return bits

    def packing(self, name):
        told = Packing()
        assert self.library.layer_packing_of(self.handle, NAMES.index(name), ctypes.byref(told)) == 0
        return told

    def unpacked(self, name):
        out = self.put(numpy.full(self.w[name].shape, 0xabcd, dtype=numpy.uint16))
        assert self.library.layer_unpack(self.handle, NAMES.index(name), out) == 0
        return self.get(out, self.w[name].shape)

    def step(self, x, pos=POS):
        """x_out and both caches after the step"""
        d = self.shape["d"]
        x_in, out = self.put(x), self.put(numpy.full(d, 0xffff, dtype=numpy.uint16))
        assert self.library.layer_step(self.handle, x_in, pos, out, None) == 0
        assert self.library.cudaDeviceSynchronize() == 0
        cache = (self.shape["n_kv"], ROWS, self.shape["hd"])
        return self.get(out, d), self.get(self.k, cache), self.get(self.v, cache)

    def close(self):
        assert self.library.layer_teardown(self.handle) == 0
        for address in self.memory:
            assert self.library.cudaFree(address) == 0


def same(a, b):
    """Bits that agree, but for the payload of a NaN."""
    nan = [numpy.isnan(widened(bits)) for bits in (a, b)]
    return (nan[0] == nan[1]).all() and (a[~nan[0]] == b[~nan[1]]).all()


def exceptions_of(bits):
    """The fewest weights that a window of sixteen exponents leaves out."""
    count = numpy.bincount((bits >> 7 & 0xff).ravel(), minlength=256)
    return bits.size - max(int(count[base:base + 16].sum()) for base in range(1, 240))


# ------------------------------------------------------------------------------------- tests

MIXES = [[kind] for kind in KINDS] + [["normal", "random bits", "one odd row"], ["random bits", "few zeros and others"],
                                      ["zeros", "normal", "heavy tails", "infinities and NaNs", "one outlier"]]


@pytest.mark.parametrize("kinds", MIXES, ids=" + ".join)
def test_every_bit_returns(packed, kinds):
    shape = SHAPES[len(kinds) % 2]
    w, caches, _ = drawn(shape, kinds, seed=sum(map(len, kinds)))
    layer = Layer(packed, shape, w, caches)
    read = 4 * shape["d"]
    for i, name in enumerate(NAMES):
        told, kind = layer.packing(name), kinds[i % len(kinds)]
        assert (layer.unpacked(name) == w[name]).all(), (name, kind)
        assert told.weights == w[name].size
        assert told.exceptions == exceptions_of(w[name]), (name, kind)
        assert told.raw == (told.exceptions > told.weights // 256)
        assert told.raw or kind not in ALWAYS_RAW
        assert not told.raw or kind not in ("normal", "all equal", "sixteen exponents", "one odd row", "three odd rows",
                                             "one outlier")
        assert (8 * told.bytes == 16 * told.weights) if told.raw else (12 < 8 * told.bytes / told.weights < 13.5)
        read += told.bytes
    assert packed.layer_weight_bytes(layer.handle) == read
    layer.close()


@pytest.mark.parametrize("seed", range(8))
def test_every_bit_returns_from_random_patterns(packed, seed):
    """Random exponents around a random window, with a random share outside of it."""
    rng, shape = numpy.random.default_rng(1000 + seed), SHAPES[seed % 2]
    w, caches, _ = drawn(shape, ["normal"], seed)
    for name in NAMES:
        base, size = int(rng.integers(1, 240)), w[name].shape
        exponent = base + rng.integers(0, 16, size)
        odd = rng.random(size) < rng.choice([0, 1 / 5000, 1 / 300, 1 / 200])
        exponent[odd] = rng.integers(0, 256, int(odd.sum()))
        w[name] = (rng.integers(0, 512, size) // 256 << 15 | exponent << 7 | rng.integers(0, 128, size)).astype(numpy.uint16)
    layer = Layer(packed, shape, w, caches)
    for name in NAMES:
        assert (layer.unpacked(name) == w[name]).all(), name
        assert layer.packing(name).exceptions == exceptions_of(w[name])
    layer.close()


@pytest.mark.parametrize("kinds", MIXES, ids=" + ".join)
def test_a_step_gives_the_twin_s_bits(packed, twin, kinds):
    shape = SHAPES[len(kinds) % 2]
    w, caches, x = drawn(shape, kinds, seed=len(kinds[0]))
    layers = [Layer(library, shape, w, caches) for library in (packed, twin)]
    results = [layer.step(x) for layer in layers]
    for mine, its in zip(*results):
        assert same(mine, its)
    assert any(not (results[0][i] == caches[i - 1]).all() for i in (1, 2)), "the step wrote no row"
    if all(kind in STAYS_FINITE for kind in kinds):
        assert numpy.isfinite(widened(results[0][0])).all()
    for layer in layers:
        layer.close()


def error_of(out, shape, w, caches, x):
    """The relative error of x_out against the oracle."""
    expected, k, v = numpy.empty(shape["d"]), caches[0].copy(), caches[1].copy()
    oracle = ctypes.CDLL(str(tools.build("build/liboracle.so")))

    def pointer(array):
        return ctypes.c_void_p(array.ctypes.data)
    config = ref.OracleConfig(*(shape[name] for name in ("d", "ffn", "n_q", "n_kv", "hd")), ROWS, 1e-5, 5e5, 0)
    weights = ref.OracleWeights(**{name: pointer(bits) for name, bits in w.items()})
    assert oracle.oracle_step(ctypes.byref(config), ctypes.byref(weights), pointer(k), pointer(v), pointer(x),
                              ctypes.c_int64(POS), pointer(expected)) == 0
    return numpy.linalg.norm(widened(out) - expected) / numpy.linalg.norm(expected)


def test_what_the_stand_ins_add_is_taken_away(packed):
    """All weights but those of a column that is multiplied by zero are as small as the stand-in of
    the zeros among them."""
    shape, rng = SHAPES[0], numpy.random.default_rng(8)
    w, caches, x = drawn(shape, ["normal"], seed=8)
    for name in ("q", "k", "v", "gate", "up"):
        size = w[name].shape
        w[name] = (rng.integers(0, 2, size) << 15 | 123 << 7 | rng.integers(0, 128, size)).astype(numpy.uint16)
        w[name][rng.random(size) < 1 / 300] = 0
        w[name][:, 0] = (123 + 15) << 7
    w["in_norm"][0] = w["post_norm"][0] = 0
    layer = Layer(packed, shape, w, caches)
    assert [layer.packing(name).base for name in ("q", "gate", "up")] == [123] * 3
    assert error_of(layer.step(x)[0], shape, w, caches, x) <= 5e-3
    layer.close()


@pytest.mark.parametrize("kinds", [["few zeros and others"], ["one odd row"], ["sixteen exponents"], ["many exponents"],
                                   ["heavy tails", "many exponents"], ["many exponents", "normal", "one odd row"]], ids=" + ".join)
def test_a_step_is_right_whatever_the_number_of_blocks(packed, kinds):
    shape = SHAPES[1]
    w, caches, x = drawn(shape, kinds, seed=3)
    results = []
    for blocks in (0, 1, 2, 7):
        layer = Layer(packed, shape, w, caches, blocks)
        results.append(layer.step(x))
        layer.close()
    assert error_of(results[0][0], shape, w, caches, x) <= 5e-3
    for result in results[1:]:
        assert all((mine == first).all() for mine, first in zip(result, results[0]))


def test_the_caller_may_drop_the_weights_when_the_layer_owns_them(packed):
    shape, kinds = SHAPES[1], ["normal", "many exponents", "one odd row"]
    w, caches, x = drawn(shape, kinds, seed=5)
    layer = Layer(packed, shape, w, caches)
    before = layer.step(x)
    assert packed.layer_own_weights(layer.handle) == 0
    assert packed.layer_own_weights(layer.handle) == 0      # twice does no harm
    for name, address in layer.weights.items():
        layer.overwrite(address, numpy.full_like(w[name], 0x7fc0))
    for mine, first in zip(layer.step(x), before):
        assert (mine == first).all()
    for name in NAMES:
        assert (layer.unpacked(name) == w[name]).all(), name
    layer.close()


def test_what_cannot_be_asked_is_refused(packed):
    w, caches, _ = drawn(SHAPES[1], ["normal"], seed=6)
    layer, told = Layer(packed, SHAPES[1], w, caches), Packing()
    out = layer.room(w["q"].nbytes + 16)
    for matrix in (-1, 7):
        assert packed.layer_packing_of(layer.handle, matrix, ctypes.byref(told)) == 1
        assert packed.layer_unpack(layer.handle, matrix, out) == 1
    assert packed.layer_packing_of(None, 0, ctypes.byref(told)) == 1
    assert packed.layer_packing_of(layer.handle, 0, None) == 1
    assert packed.layer_unpack(layer.handle, 0, ctypes.c_void_p(out.value + 2)) == 2
    assert packed.layer_own_weights(None) == 1
    layer.close()


# Each packs, or unpacks, a little wrong.
FAULTS = {"a byte in the wrong place": ("w.v[0], w.v[1], 0x6420", "w.v[0], w.v[1], 0x6240"),
          "a sign lost": ("& 0x87878787u) | 0x38383838u", "& 0x07878787u) | 0x38383838u"),
          "an exception lost": ("if (column / 8 * 8 == c) replace", "if (column / 8 * 8 == c && column) replace")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_come_back_is_not_packed(tmp_path, fault):
    def change(text):
        assert text.count(FAULTS[fault][0]) == 1
        return text.replace(*FAULTS[fault])
    library, shape = compiled(tmp_path, change=change), SHAPES[1]
    w, caches, x = drawn(shape, ["normal"], seed=7)
    for name in NAMES:
        w[name][:, 0] = w[name][:, 0] | 0x8000
        w[name][1, 0] = 0
    layer = Layer(library, shape, w, caches)
    assert all(layer.packing(name).raw for name in NAMES)
    assert all((layer.unpacked(name) == w[name]).all() for name in NAMES)
    assert numpy.isfinite(widened(layer.step(x)[0])).all()
    layer.close()


# Faults of what reads the lists; packing and unpacking do without it.
LISTS = ("a list of the row before", "the lists of every piece of down are the first's",
         "exceptions begin at the first word of a list", "room for one exception more than there is",
         "exceptions without room are all the first row's")


def ending_of(work):
    """What work returns, done in a process of its own, which the CPU target may end: with 3."""
    child = os.fork()
    if child == 0:
        status = 4
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("name", LISTS)
def test_lists_that_are_read_wrong_give_other_bits(tmp_path, twin, name, capfd):
    """Or none: a list of another piece may ask for the value of a column that nobody makes."""
    fault = next(fault for fault in mutants.EIGHT if fault[0] == name)
    library = compiled(tmp_path, change=lambda text: mutants.mutated(text, *fault))
    shape = DEEP if "piece" in name else SHAPES[1]
    w, caches, x = drawn(shape, ["three odd rows"], seed=9)
    layers = [Layer(which, shape, w, caches) for which in (library, twin)]
    assert not any(layers[0].packing(name).raw for name in (("down",) if shape is DEEP else NAMES))
    right = layers[1].step(x)[0]
    ending = ending_of(lambda: int(not same(layers[0].step(x)[0], right)))
    assert ending == 1 or ending == 3 and "values that are asked for never come" in capfd.readouterr().err
    for layer in layers:
        layer.close()


# -------------------------------------------------------------------- the Python submission

@pytest.fixture
def submission():
    return python_side.load(STAGE / "submission.py")


@pytest.mark.parametrize("name", ["kernels.cu", "layer.h", "layer.c"])
def test_the_source_inside_is_the_stage(submission, name):
    file = (STAGE / name).read_text(encoding="utf-8")
    assert python_side.code(submission.SOURCES[name]) == python_side.code(file)[1:]


def test_the_header_is_what_python_takes_it_for(submission):
    header = (STAGE / "layer.h").read_text(encoding="utf-8")
    body = header.split("} layer_packing;")[0].rsplit("typedef struct {", 1)[1]
    fields = re.findall(r"(\w+)[,;]", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
    assert fields == [name for name, _ in submission.Packing._fields_] == [name for name, _ in Packing._fields_]


def test_the_submission_steps_and_tells_of_its_weights(submission, packed, monkeypatch):
    chip, shape = python_side.pretend(packed, submission, monkeypatch), python_side.SHAPE
    arguments = chip.layer()
    exact = ref.ExactLayer(ref.make_weights(shape, 1), ref.make_cache(shape, 1), shape.cfg(), 80)
    handle = submission.build_layer(*arguments)
    told = submission.packing(handle)
    assert list(told) == list(NAMES) and not any(one["raw"] for one in told.values())
    assert all(12 < one["bits"] < 14.1 for one in told.values())
    read = submission.bytes_read(handle)
    assert read == 4 * shape.d + sum(one["bytes"] for one in told.values()) < shape.weight_bytes()

    def step(pos):
        x = ref.make_x(shape, 1, pos)
        out = chip.values(submission.layer_step(handle, chip.tensor(x), pos))
        assert ref.relative_error(out, exact.step(x, pos)) <= 5e-3
    step(70)
    submission.own_weights(handle)
    assert len(handle.tensors) == 2                     # the caches
    for tensor in arguments[0]["layers"][0].values():   # the caller's own, which may go now
        tensor.fill_(float("nan"))
    step(71)
    submission.teardown(handle)
    with pytest.raises(RuntimeError, match="after teardown"):
        submission.packing(handle)
    with pytest.raises(ValueError, match="handle"):
        submission.bytes_read("none")


@python_side.needs_nvcc
def test_the_submission_compiles(tmp_path, submission, monkeypatch, capsys):
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path))
    lib = submission.load(submission.library("90a"))
    assert "stage 8: compiling for sm_90a" in capsys.readouterr().err
    assert lib.layer_packing_of(None, 0, None) == 1 and lib.layer_teardown(None) == 0


def test_owning_weights_lets_go_of_them(submission, packed, monkeypatch):
    chip = python_side.pretend(packed, submission, monkeypatch)
    arguments = chip.layer()
    given = [weakref.ref(t) for t in arguments[0]["layers"][0].values()]
    handle = submission.build_layer(*arguments)
    submission.own_weights(handle)
    arguments[0] = None
    gc.collect()
    assert [t for t in given if t() is not None] == []
    with pytest.raises(RuntimeError, match="let go of its weights"):
        submission.refresh(handle)
    submission.teardown(handle)


def test_what_is_written_to_packed_weights_is_seen_after_a_refresh(submission, packed, monkeypatch):
    chip, shape = python_side.pretend(packed, submission, monkeypatch), python_side.SHAPE
    arguments = chip.layer()
    handle = submission.build_layer(*arguments)
    x = chip.tensor(ref.make_x(shape, 1, 70))
    before = chip.values(submission.layer_step(handle, x, 70))
    arguments[0]["layers"][0]["o"].fill_(0)
    assert (before == chip.values(submission.layer_step(handle, x, 70))).all()
    submission.refresh(handle)
    assert not (before == chip.values(submission.layer_step(handle, x, 70))).all()
    submission.teardown(handle)
