"""The submission: what it refuses, how it compiles, that it runs; on a GPU if there is one.

Without a GPU its kernels run on the CPU target: tensors in that target's memory say that they
are on a CUDA device, and the few functions of torch.cuda that the submission calls are replaced.
What needs a GPU runs in processes of its own, by `python3 tests/test_submission.py NAME`."""
import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

import tools

sys.path.insert(0, str(tools.ROOT))
import reference as ref  # noqa: E402

STAGE = tools.ROOT / "stages" / "stage7"
SHAPE = ref.Shape(d=128, ffn=192, n_q=2, n_kv=1, hd=64, prefill=70, max_seq_len=80)


def load(path=STAGE / "submission.py"):
    spec = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def submission():
    return load()


# ------------------------------------------------------------------------- one file, one source

def code(text):
    """The lines of a text that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["kernels.cu", "layer.h", "layer.c"])
def test_the_source_inside_is_the_stage(submission, name):
    file = (STAGE / name).read_text(encoding="utf-8")
    assert code(submission.SOURCES[name]) == code(file)[1:]   # but for where it comes from


def test_the_header_is_what_python_takes_it_for(submission):
    header = (STAGE / "layer.h").read_text(encoding="utf-8")
    status = re.search(r"enum \{(.*?)\};", header, re.S).group(1)
    names = re.findall(r"\bLAYER_\w+", status)
    for name in ("LAYER_BAD_SHAPE", "LAYER_NO_MEMORY"):
        assert names[getattr(submission, name)] == name

    structs = re.findall(r"typedef struct \{(.*?)\} (layer_\w+);", header, re.S)
    fields = {name: re.findall(r"\*?(\w+)[,;]", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
              for body, name in structs}
    assert fields["layer_config"] == [name for name, _ in submission.Config._fields_]
    assert fields["layer_weights"] == [name for name, _ in submission.Weights._fields_]


def test_it_imports_without_anything_of_this_project(tmp_path):
    (tmp_path / "alone.py").write_bytes((STAGE / "submission.py").read_bytes())
    status, output = tools.run([sys.executable, "-W", "error::SyntaxWarning", "-c",
                                "import alone; print(alone.build_layer.__name__)"], cwd=tmp_path)
    assert (status, output) == (0, "build_layer\n")


# ---------------------------------------------------------------------------------- compiling

needs_nvcc = pytest.mark.skipif(tools.nvcc() is None, reason="needs nvcc")
COMPILE = "import sys; sys.path.insert(0, sys.argv[1]); import submission; print(repr(str(submission.library('90a'))))"
ODD = "ein 'Cache'\n\"$(touch here)\"; touch there #"     # a shell would make something of it


@needs_nvcc
def test_two_processes_compile_at_once(tmp_path, submission, monkeypatch, capsys):
    cache = tmp_path / ODD
    env = tools.clean_environment(LAYER_CACHE=str(cache), PYTHONDONTWRITEBYTECODE="1")
    both = [subprocess.Popen([sys.executable, "-c", COMPILE, str(STAGE)], env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    path, = cache.iterdir()                       # one library, and nothing left beside it
    assert {out.strip() for out, _ in results} == {repr(str(path))}
    assert path.stat().st_mode & 0o777 == cache.stat().st_mode & 0o777 == 0o700
    assert all(message == "" or re.fullmatch("stage 7: compiling for sm_90a, once, to .*\n", message)
               for _, message in results) and any(message for _, message in results)

    monkeypatch.setenv("LAYER_CACHE", str(cache))
    before = path.stat().st_mtime_ns
    assert submission.library("90a") == path and path.stat().st_mtime_ns == before
    monkeypatch.setattr(submission, "find_nvcc", lambda: None)
    assert submission.library("90a") == path      # a compiled one serves without a compiler
    assert capsys.readouterr().err == ""
    lib = submission.load(path)
    assert lib.layer_strerror(submission.LAYER_BAD_SHAPE).startswith(b"sizes not served")
    assert lib.layer_teardown(None) == 0


@needs_nvcc
def test_what_the_compiler_says_is_in_the_error(tmp_path, submission, monkeypatch):
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path))
    monkeypatch.setitem(submission.SOURCES, "layer.c", "#error this is wrong\n")
    with pytest.raises(RuntimeError, match="this is wrong"):
        submission.library("90a")
    assert list(tmp_path.iterdir()) == []


@needs_nvcc
def test_a_cache_that_cannot_be_written_is_said_clearly(tmp_path, submission, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="file.*LAYER_CACHE"):
        submission.library("90a")


def test_no_compiler_is_said_clearly(tmp_path, submission, monkeypatch):
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(submission, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="no nvcc.*CUDA_HOME.*" + re.escape(str(tmp_path))):
        submission.library("90a")


def test_the_compiler_of_cuda_home_comes_first(tmp_path, submission, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho fake\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert submission.find_nvcc() == str(nvcc)
    assert submission.version_of(str(nvcc)) == "fake\n"


def test_a_relative_path_is_made_absolute(tmp_path, submission, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, meant in ((".", tmp_path), ("x", tmp_path / "x"), ("~", tmp_path / "~")):
        monkeypatch.setenv("LAYER_CACHE", given)
        assert str(submission.cache_folder()) == str(meant)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"        # it will be run in another folder
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho fake\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", "cuda")
    assert submission.find_nvcc() == str(nvcc)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "cuda/bin")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert submission.find_nvcc() == str(nvcc)


def planted(submission, folder, monkeypatch):
    """A cache folder with a file in it that would be loaded."""
    monkeypatch.setenv("LAYER_CACHE", str(folder))
    monkeypatch.setattr(submission, "find_nvcc", lambda: "/fake/nvcc")
    monkeypatch.setattr(submission, "version_of", lambda nvcc: "1")
    monkeypatch.setattr(submission, "compile_to", lambda path, arch, nvcc: path.write_text(""))
    return submission.library("90a")


@pytest.mark.parametrize("nvcc", [True, False])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(tmp_path, submission, monkeypatch, which, mode, nvcc):
    path = planted(submission, tmp_path / "cache", monkeypatch)
    if not nvcc:
        monkeypatch.setattr(submission, "find_nvcc", lambda: None)
    assert submission.library("90a") == path
    changed = path if which == "file" else path.parent
    changed.chmod(mode)
    with pytest.raises(RuntimeError, match=f"{re.escape(repr(str(changed)))}: got owner .*mode {mode:o}; accepted: "):
        submission.library("90a")
    changed.chmod(0o755)                              # that others may read it does no harm
    assert submission.library("90a") == path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_another_user_is_not_loaded(tmp_path, submission, monkeypatch, which):
    path = planted(submission, tmp_path / "cache", monkeypatch)
    os.chown(path if which == "file" else path.parent, 12345, 12345)
    with pytest.raises(RuntimeError, match="got owner 12345.*LAYER_CACHE"):
        submission.library("90a")


def test_a_link_to_what_belongs_to_others_is_not_followed(tmp_path, submission, monkeypatch):
    path = planted(submission, tmp_path / "cache", monkeypatch)
    (tmp_path / "theirs.so").write_text("")
    (tmp_path / "theirs.so").chmod(0o666)
    path.unlink()
    path.symlink_to(tmp_path / "theirs.so")
    with pytest.raises(RuntimeError, match="mode 666"):
        submission.library("90a")


def test_a_compiler_that_fails_or_is_stopped_leaves_nothing(tmp_path, submission, monkeypatch, capsys):
    nvcc = tmp_path / "nvcc"
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(submission, "find_nvcc", lambda: str(nvcc))
    for script, error in (("touch layer.so; exit 1", RuntimeError), ("exit 0", RuntimeError)):
        nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho words; {script}\n')
        nvcc.chmod(0o755)
        with pytest.raises(error, match="words|layer.so"):
            submission.library("90a")
        assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(submission.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(submission, "version_of", lambda nvcc: "1")
    with pytest.raises(KeyboardInterrupt):
        submission.library("90a")
    assert list((tmp_path / "cache").iterdir()) == []
    assert capsys.readouterr().err.count("\n") == 3       # a line each time


def test_where_libraries_are_kept(tmp_path, submission, monkeypatch):
    monkeypatch.delenv("LAYER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert submission.cache_folder().parent == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert submission.cache_folder().parent == tmp_path / "x"
    monkeypatch.setenv("LAYER_CACHE", str(tmp_path / "y"))
    assert submission.cache_folder() == tmp_path / "y"


# -------------------------------------------------- on the CPU target, in the place of a GPU

@pytest.fixture(scope="module")
def cpu_library(tmp_path_factory):
    """The stage and the CPU target in one shared library."""
    path = tools.stage_and_cpu("stage7", tmp_path_factory.mktemp("cpu"), load().SOURCES["record.c"])
    os.environ["CPU_SMS"] = "2"
    library = ctypes.CDLL(str(path))
    library.path = path
    return library


class Fake(torch.Tensor):
    """A tensor that says it is on a GPU."""
    number = 0
    device = property(lambda self: torch.device("cuda", self.number))

    def get_device(self):
        return self.number


class Chip:
    """The CPU target as the submission sees it."""

    def __init__(self, library):
        self.library = library
        self.current, self.entered, self.launched = 0, [], 0
        self.device = torch.device("cuda", 0)

    def tensor(self, like):
        """A fake CUDA tensor with the values of a CPU tensor."""
        address, size = ctypes.c_void_p(), like.numel() * like.element_size()
        assert self.library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        own = torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        own.copy_(like)
        return own.as_subclass(Fake)

    def values(self, tensor):
        assert self.library.cudaDeviceSynchronize() == 0
        return tensor.as_subclass(torch.Tensor).clone()

    @contextlib.contextmanager
    def enter(self, device):
        before, self.current = self.current, getattr(device, "index", device)
        self.entered.append(self.current)
        yield
        self.current = before

    def layer(self, shape=SHAPE, seed=1):
        """weights, cache, cfg, max_seq_len as build_layer takes them"""
        weights = {name: self.tensor(t) for name, t in ref.make_weights(shape, seed)["layers"][0].items()}
        cache = tuple(self.tensor(t) for t in ref.make_cache(shape, seed)[0])
        return [{"layers": [weights]}, [cache], shape.cfg(), shape.max_seq_len]


@pytest.fixture
def chip(cpu_library, submission, monkeypatch):
    return pretend(cpu_library, submission, monkeypatch)


def pretend(cpu_library, submission, monkeypatch):
    """A chip that the submission takes for a GPU."""
    chip = Chip(cpu_library)
    for owner, name, value in (
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch._C, "_cuda_getDriverVersion", lambda: 12080),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)),
            (torch.cuda, "get_device_name", lambda device: "a fake"),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device", chip.enter),
            (submission, "current_device", lambda: chip.current),
            (submission, "empty", lambda shape, strides, dtype: chip.tensor(torch.zeros(shape, dtype=dtype)))):
        monkeypatch.setattr(owner, name, value, raising=False)
    monkeypatch.setattr(submission, "library", lambda arch: cpu_library.path)
    return chip


def test_steps_on_the_cpu_target(submission, chip):
    arguments = chip.layer()
    exact = ref.ExactLayer(ref.make_weights(SHAPE, 1), ref.make_cache(SHAPE, 1), SHAPE.cfg(), 80)
    handle = submission.build_layer(*arguments)
    assert chip.entered == [0]
    outs = []
    for pos in range(70, 74):
        x = ref.make_x(SHAPE, 1, pos)
        at = [pos, torch.tensor(pos).numpy()[()], chip.tensor(torch.tensor([pos])),
              chip.tensor(torch.tensor([pos]))[0]][pos - 70]   # an int, NumPy's, two on the device
        outs.append(submission.layer_step(handle, chip.tensor(x), at))
        assert not ref.relative_error(chip.values(outs[-1]), exact.step(x, pos)) > 5e-3
        assert not ref.row_error(chip.values(arguments[1][0][0])[0, :, pos], exact.k_row) > 5e-3
    assert chip.entered == [0, 0]                  # in build, and for the first step's stream
    assert len({out.data_ptr() for out in outs}) == 4
    assert all(tuple(out.shape) == (1, 128) and out.dtype == torch.bfloat16 for out in outs)
    chip.current = 1
    right, devices = handle.fast[0], []
    handle.fast = (lambda record: devices.append(chip.current) or right(record), *handle.fast[1:])
    submission.layer_step(handle, chip.tensor(x), 74)
    assert chip.entered == [0, 0, 0] and devices == [0] and chip.current == 1   # for this step alone
    submission.teardown(handle)
    submission.teardown(handle)
    with pytest.raises(RuntimeError, match="after teardown"):
        submission.layer_step(handle, chip.tensor(x), 75)


def test_a_handle_holds_its_tensors_and_lets_go_of_them(submission, chip):
    arguments = chip.layer()
    addresses = {t.data_ptr() for t in [*arguments[0]["layers"][0].values(), *arguments[1][0]]}
    handle = submission.build_layer(*arguments)
    del arguments
    assert {t.data_ptr() for t in handle.tensors} == addresses   # used in place, and alive
    release = handle.release
    del handle
    gc.collect()
    assert not release.alive


def changed(position, key, change):
    def act(chip, arguments):
        if key is None:
            arguments[position] = change(arguments[position])
            return
        owner = arguments[position]
        for step in key[:-1]:
            owner = owner[step]
        if isinstance(owner, tuple):
            arguments[position][0] = tuple(change(t) if i == key[-1] else t for i, t in enumerate(owner))
        else:
            owner[key[-1]] = change(owner[key[-1]])
    return act


def weight(name, change):
    return changed(0, ("layers", 0, name), change)


def cfg(name, value):
    return changed(2, (name,), lambda _: value)


def cache(i, change):
    return changed(1, (0, i), change)


def misaligned(t):
    """The same shape, contiguous, two bytes past where it could be."""
    base = torch.zeros(t.numel() + 8, dtype=t.dtype).as_subclass(Fake)
    offset = (-base.data_ptr() // 2) % 8 + 1
    return base[offset:offset + t.numel()].view(t.shape)


def elsewhere(t):
    other = t.clone().as_subclass(type("Other", (Fake,), {"number": 1}))
    return other


def overlapping(t):
    """Two tensors of the same shape, the second a row on in the same memory."""
    base = torch.zeros(t.numel() + 64, dtype=t.dtype).as_subclass(Fake)
    return base[:-64].view(t.shape), base[64:].view(t.shape)


def strided(t):
    return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype).as_subclass(Fake)[..., ::2]


def without(key):
    return lambda d: {k: v for k, v in d.items() if k != key}


# What is wrong, and the argument that the refusal must name.
REFUSED = {
    "weights are no dict": (changed(0, None, lambda w: [w]), "weights"),
    "another key in weights": (changed(0, None, lambda w: {**w, "embedding": 0}), "weights"),
    "two layers": (changed(0, ("layers",), lambda ls: ls * 2), "weights['layers']"),
    "no layers": (changed(0, ("layers",), lambda ls: []), "weights['layers']"),
    "a weight is missing": (changed(0, ("layers", 0), without("up")), "weights['layers'][0]"),
    "a weight too many": (changed(0, ("layers", 0), lambda l: {**l, "bias": 0}), "weights['layers'][0]"),
    "a weight is None": (weight("q", lambda t: None), "weights['layers'][0]['q']"),
    "a weight on the CPU": (weight("k", lambda t: t.as_subclass(torch.Tensor)), "weights['layers'][0]['k']"),
    "a weight on another GPU": (weight("v", elsewhere), "weights['layers'][0]['v']"),
    "a weight in fp32": (weight("o", lambda t: t.float()), "weights['layers'][0]['o']"),
    "a weight in fp16": (weight("in_norm", lambda t: t.half()), "weights['layers'][0]['in_norm']"),
    "a weight of another shape": (weight("gate", lambda t: t[:-1]), "weights['layers'][0]['gate']"),
    "a flat weight": (weight("gate", lambda t: t.reshape(-1)), "weights['layers'][0]['gate']"),
    "a transposed weight": (weight("down", lambda t: t.t().contiguous().t()), "weights['layers'][0]['down']"),
    "a weight with strides": (weight("post_norm", strided), "weights['layers'][0]['post_norm']"),
    "a misaligned weight": (weight("up", misaligned), "weights['layers'][0]['up']"),
    "no cache": (changed(1, None, lambda c: []), "kv_cache"),
    "a cache that is a pair": (changed(1, None, lambda c: c[0]), "kv_cache"),
    "a cache that is a dict": (changed(1, None, lambda c: dict(k=c)), "kv_cache"),
    "a cache of three": (changed(1, None, lambda c: [c[0] * 2]), "kv_cache[0]"),
    "a cache with two sequences": (cache(0, lambda t: torch.cat([t, t])), "kv_cache[0][0]"),
    "a cache in fp32": (cache(1, lambda t: t.float()), "kv_cache[0][1]"),
    "a cache on the CPU": (cache(0, lambda t: t.as_subclass(torch.Tensor)), "kv_cache[0][0]"),
    "k and v that overlap": (changed(1, None, lambda c: [overlapping(c[0][0])]), "kv_cache[0]"),
    "a cache with strides": (cache(1, strided), "kv_cache[0][1]"),
    "a misaligned cache": (cache(0, misaligned), "kv_cache[0][0]"),
    "k and v the same": (changed(1, None, lambda c: [(c[0][0], c[0][0])]), "kv_cache[0]"),
    "a cfg that is no dict": (changed(2, None, lambda c: list(c)), "cfg"),
    "a key missing in cfg": (changed(2, None, without("theta")), "cfg"),
    "a key too many in cfg": (changed(2, None, lambda c: {**c, "bias": 1}), "cfg"),
    "two layers in cfg": (cfg("layers", 2), "cfg['layers']"),
    "fp8": (cfg("wdtype", "fp8"), "cfg['wdtype']"),
    "a negative size": (cfg("d", -128), "cfg['d']"),
    "a size that is a float": (cfg("d", 128.0), "cfg['d']"),
    "a size that is a bool": (cfg("n_kv", True), "cfg['n_kv']"),
    "another d": (cfg("d", 192), "weights['layers'][0]['in_norm']"),
    "an odd d": (cfg("d", 130), "cfg['d']"),
    "an odd ffn": (cfg("ffn", 200), "cfg['ffn']"),
    "hd 96": (cfg("hd", 96), "cfg['hd']"),
    "n_kv that does not divide n_q": (cfg("n_q", 3), "weights['layers'][0]['q']"),
    "no eps": (cfg("eps", 0), "cfg['eps']"),
    "negative eps": (cfg("eps", -1e-5), "cfg['eps']"),
    "eps NaN": (cfg("eps", float("nan")), "cfg['eps']"),
    "eps a string": (cfg("eps", "1e-5"), "cfg['eps']"),
    "infinite theta": (cfg("theta", float("inf")), "cfg['theta']"),
    "max_seq_len of another cache": (changed(3, None, lambda n: n + 1), "max_seq_len"),
    "max_seq_len a float": (changed(3, None, float), "max_seq_len"),
    "max_seq_len a bool": (changed(3, None, lambda n: True), "max_seq_len"),
}


def refusal(name):
    """A pattern for the message: the argument, what was got, what is accepted."""
    return rf"^{re.escape(name)}: got (.|\n)+; accepted: .+"


@pytest.mark.parametrize("what", REFUSED)
def test_build_layer_refuses(submission, chip, what, monkeypatch):
    change, named = REFUSED[what]
    arguments = chip.layer()
    before = [chip.values(t) for t in arguments[1][0]]
    given = arguments[1][0]
    change(chip, arguments)
    monkeypatch.setattr(submission, "library", lambda arch: pytest.fail("it went on to compile"))
    with pytest.raises(ValueError, match=refusal(named)):
        submission.build_layer(*arguments)
    assert all(ref.differing(a, chip.values(b)) == 0 for a, b in zip(before, given))


def test_a_cache_inside_a_weight_is_refused(submission, chip):
    arguments = chip.layer(ref.Shape(d=128, ffn=192, n_q=2, n_kv=1, hd=64, prefill=20, max_seq_len=24))
    w = arguments[0]["layers"][0]["down"]
    arguments[1][0] = (arguments[1][0][0], w.reshape(-1)[512:512 + 24 * 64].view(1, 1, 24, 64))
    with pytest.raises(ValueError, match=refusal("kv_cache[0][1]").replace("(.|", "(.*'down'.*|")):
        submission.build_layer(*arguments)


def test_batch_sizes_other_than_one_are_refused_by_name(submission, chip):
    arguments = chip.layer()
    handle = submission.build_layer(*arguments)
    words = "got shape .*, batch size 2; accepted: shape .*, batch size 1"
    with pytest.raises(ValueError, match="^x: " + words):
        submission.layer_step(handle, chip.tensor(torch.zeros(2, 128, dtype=torch.bfloat16)), 70)
    k, v = arguments[1][0]
    with pytest.raises(ValueError, match=r"^kv_cache\[0\]\[1\]: " + words):
        submission.build_layer(arguments[0], [(k, torch.cat([v, v]))], *arguments[2:])


@pytest.mark.parametrize("n_q, n_kv", [(3, 2), (17, 1), (64, 3)])
def test_head_counts_that_do_not_fit(submission, n_q, n_kv):
    with pytest.raises(ValueError, match=refusal("cfg['n_q']") + f"n_kv'\\] = {n_kv}"):
        submission.check_cfg(dict(SHAPE.cfg(), n_q=n_q, n_kv=n_kv))


def test_integers_of_other_libraries_are_integers(submission):
    numpy = pytest.importorskip("numpy")
    c = submission.check_cfg(dict(SHAPE.cfg(), d=numpy.int32(128), eps=numpy.float32(1e-5)))
    assert type(c["d"]) is int and type(c["eps"]) is float


def test_an_old_gpu_is_refused(submission, chip, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"a fake.*8\.0.*9\.0"):
        submission.build_layer(*chip.layer())


@pytest.mark.parametrize("capability, arch", [((9, 0), "90a"), ((10, 0), "100"), ((12, 1), "121")])
def test_the_architecture_is_the_devices_own(submission, chip, monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert submission.architecture(chip.device) == arch


def test_what_the_library_refuses(submission, chip, monkeypatch):
    class Refusing:
        def __init__(self, lib, status):
            self.layer_strerror, self.layer_build = lib.layer_strerror, lambda *a: status
    lib = submission.load(chip.library.path)
    for status, error, words in ((3, ValueError, "cfg: got .*; accepted: "),
                                 (6, RuntimeError, "out of device memory.*12.8")):
        monkeypatch.setattr(submission, "load", lambda path: Refusing(lib, status))
        with pytest.raises(error, match=words):
            submission.build_layer(*chip.layer())


def test_what_the_library_refuses_comes_with_its_rule_and_the_number(submission, chip):
    wide = ref.Shape(d=19264, ffn=64, n_q=1, n_kv=1, hd=64, prefill=5, max_seq_len=16)
    with pytest.raises(ValueError, match="cfg: .*at most 19200 on this device, and is 19456"):
        submission.build_layer(*chip.layer(wide))


BAD_X = {"no tensor": lambda x: x.tolist(), "fp32": lambda x: x.float(), "on the CPU": torch.clone,
         "one dimension": lambda x: x[0], "two rows": lambda x: torch.cat([x, x]),
         "too short": lambda x: x[:, :-8].contiguous(), "on another GPU": elsewhere,
         "strided": strided, "misaligned": misaligned}
BAD_POS = {"negative": -1, "max_seq_len": 80, "beyond 64 bits": 2**64 + 70, "a bool": True,
           "a float": 70.0, "a string": "70", "None": None, "on the CPU": torch.tensor([70])}


@pytest.fixture
def built(submission, chip):
    arguments = chip.layer()
    handle = submission.build_layer(*arguments)
    yield submission, chip, handle, arguments
    submission.teardown(handle)


@pytest.mark.parametrize("what", BAD_X)
def test_layer_step_refuses_x(built, what):
    submission, chip, handle, arguments = built
    x = ref.make_x(SHAPE, 1, 70)
    x = BAD_X[what](x if what == "on the CPU" else chip.tensor(x))
    check_that_nothing_happens(built, refusal("x"), x, 70)


@pytest.mark.parametrize("what", BAD_POS)
def test_layer_step_refuses_pos(built, what):
    check_that_nothing_happens(built, refusal("pos"), built[1].tensor(ref.make_x(SHAPE, 1, 70)), BAD_POS[what])


@pytest.mark.parametrize("pos", [torch.tensor([70], dtype=torch.int32), torch.tensor([70, 71]),
                                 torch.tensor([70.0])], ids=["int32", "two", "float"])
def test_layer_step_refuses_a_tensor_as_pos(built, pos):
    check_that_nothing_happens(built, refusal("pos"), built[1].tensor(ref.make_x(SHAPE, 1, 70)),
                               built[1].tensor(pos))


def check_that_nothing_happens(built, words, x, pos):
    submission, chip, handle, arguments = built
    before = [chip.values(t) for t in arguments[1][0]]
    with pytest.raises(ValueError, match=words):
        submission.layer_step(handle, x, pos)
    assert all(ref.differing(a, chip.values(b)) == 0 for a, b in zip(before, arguments[1][0]))


def test_something_else_as_handle(submission):
    for call in (lambda: submission.layer_step(None, None, 0), lambda: submission.teardown({})):
        with pytest.raises(ValueError, match=refusal("handle")):
            call()


def returning(handle, status, stream=0):
    """Lets the C of a handle's steps return a status at once, and its stream be this one."""
    handle.fast = (lambda record: status, *handle.fast[1:5], lambda device: stream, handle.fast[6])


def test_a_failed_step_says_why(built):
    submission, chip, handle, arguments = built
    returning(handle, 4)
    with pytest.raises(RuntimeError, match="position outside"):
        submission.layer_step(handle, chip.tensor(ref.make_x(SHAPE, 1, 70)), 70)


def test_another_stream_waits_for_the_last(built, monkeypatch):
    submission, chip, handle, arguments = built
    calls = []

    class Stream:
        def __init__(self, pointer, device):
            self.pointer = pointer

        def wait_stream(self, other):
            calls.append((self.pointer, other.pointer))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("now", device))
    x = chip.tensor(ref.make_x(SHAPE, 1, 70))
    for stream in (7, 7, 8, 8, 7):
        returning(handle, 0, stream)
        submission.layer_step(handle, x, 70)
    assert calls == [("now", 7), ("now", 8)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for stream in (9, 7):
        returning(handle, 0, stream)
        submission.layer_step(handle, x, 70)
    assert len(calls) == 2 and handle.stream == 7     # a capture is not the last step


# ------------------------------------------------------------------------------------- lifetimes

def test_values_written_in_place_are_seen_and_new_tensors_after_refresh(submission, chip):
    arguments, other = chip.layer(), chip.layer(seed=2)
    handle, x = submission.build_layer(*arguments), chip.tensor(ref.make_x(SHAPE, 1, 70))
    theirs = chip.values(submission.layer_step(submission.build_layer(*other), x, 70))
    ours = chip.values(submission.layer_step(handle, x, 70))
    mine, new = arguments[0]["layers"][0], other[0]["layers"][0]
    before = {name: t.clone() for name, t in mine.items()}
    for name in mine:
        mine[name].copy_(new[name])                     # in place: the next step sees it
    arguments[1][0][0].copy_(other[1][0][0]), arguments[1][0][1].copy_(other[1][0][1])
    assert ref.differing(chip.values(submission.layer_step(handle, x, 70)), theirs) == 0
    arguments[0]["layers"][0] = {name: chip.tensor(t.as_subclass(torch.Tensor)) for name, t in before.items()}
    arguments[1][0] = tuple(chip.tensor(t) for t in ref.make_cache(SHAPE, 1)[0])
    assert ref.differing(chip.values(submission.layer_step(handle, x, 70)), theirs) == 0
    submission.refresh(handle)                          # others in the dict: refresh sees them
    assert ref.differing(chip.values(submission.layer_step(handle, x, 70)), ours) == 0
    assert {t.data_ptr() for t in handle.tensors} == {
        t.data_ptr() for t in [*arguments[0]["layers"][0].values(), *arguments[1][0]]}
    arguments[0]["layers"][0]["up"] = None              # refused, and the handle stays as it was
    with pytest.raises(ValueError, match=re.escape("weights['layers'][0]['up']: got")):
        submission.refresh(handle)
    assert ref.differing(chip.values(submission.layer_step(handle, x, 70)), ours) == 0
    submission.teardown(handle)
    with pytest.raises(RuntimeError, match="after teardown"):
        submission.refresh(handle)


def chip_bytes(chip):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert chip.library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_a_thousand_handles_leave_no_memory_behind(submission, chip):
    arguments, x = chip.layer(), chip.tensor(ref.make_x(SHAPE, 1, 70))
    free = chip_bytes(chip)
    for i in range(1000):
        handle = submission.build_layer(*arguments)
        if i % 50 == 0:
            submission.refresh(handle)
        if i % 3:
            submission.teardown(handle)                 # every third is only dropped
    del handle
    gc.collect()
    assert chip_bytes(chip) == free and not submission.LIVE
    assert all(t.data_ptr() for t in arguments[1][0])
    assert submission.layer_step(submission.build_layer(*arguments), x, 70) is not None


def test_a_build_that_fails_leaves_nothing(submission, chip):
    arguments = chip.layer()
    free, failures = chip_bytes(chip), 0
    for nth in range(1, 50):
        chip.library.cpu_fail_call(nth)
        try:
            handle = submission.build_layer(*arguments)
            break
        except RuntimeError as error:
            assert "stage 7: " in str(error) and "driver" in str(error)
            failures += 1
        finally:
            chip.library.cpu_fail_call(0)
        gc.collect()
        assert chip_bytes(chip) == free and not submission.LIVE, nth
    assert failures >= 5
    submission.teardown(handle)
    assert chip_bytes(chip) == free


def test_steps_in_other_modes_and_with_parameters(submission, chip):
    arguments, x = chip.layer(), chip.tensor(ref.make_x(SHAPE, 1, 70))
    handle = submission.build_layer(*arguments)
    expected = chip.values(submission.layer_step(handle, x, 70))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert ref.differing(chip.values(submission.layer_step(handle, x, 70)), expected) == 0
            fresh = submission.build_layer(*arguments)
        assert ref.differing(chip.values(submission.layer_step(fresh, x, 70)), expected) == 0
    x.requires_grad_()                                  # no gradient flows, and nothing breaks
    out = submission.layer_step(handle, x, 70)
    assert not out.requires_grad and ref.differing(chip.values(out), expected) == 0


def test_the_allocator_is_pytorchs_own_or_the_fast_one(submission, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(torch._C, "_dynamo", None, raising=False)        # as before PyTorch 2
    submission.allocator()((1, 128), (128, 1), torch.bfloat16)
    assert calls == [(((1, 128), (128, 1)), dict(dtype=torch.bfloat16, device="cuda"))]
    fast = types.SimpleNamespace(guards=types.SimpleNamespace(_empty_strided_cuda=print))
    monkeypatch.setattr(torch._C, "_dynamo", fast)
    assert submission.allocator() is print


def test_operators_are_made_where_there_are_operators(submission):
    has = hasattr(torch.library, "custom_op")
    assert submission.HAS_OPERATORS == has == hasattr(submission, "step_operator")
    assert submission.tracing() is False
    if has:
        assert load().step_operator is not submission.step_operator     # loaded twice: two names


# --------------------------------------------------------------------------------------- grading

def test_grading_without_a_gpu_says_so():
    if tools.gpu_is_here():
        pytest.skip("there is a GPU")
    status, output = tools.make("grade", "SUBMISSION=nowhere.py")
    assert status == 2 and "grade: no NVIDIA GPU here" in output


# ------------------------------------------------------------------------------------ on a GPU

GPU = ref.Shape(d=1024, ffn=2048, n_q=16, n_kv=2, hd=128, prefill=300, max_seq_len=384)


class Case:
    """Weights, a cache and a handle on a GPU, and what its steps should give."""

    def __init__(self, seed=1, device="cuda", shape=GPU):
        self.m, self.shape, self.seed, self.device = load(), shape, seed, device
        self.weights, self.cache = ref.make_weights(shape, seed, device), ref.make_cache(shape, seed, device)
        self.original = ref.clone_cache(self.cache)
        self.handle = self.build()

    def build(self):
        return self.m.build_layer(self.weights, self.cache, self.shape.cfg(), self.shape.max_seq_len)

    def x(self, pos):
        return ref.make_x(self.shape, self.seed, pos, self.device)

    def step(self, pos, x=None):
        return self.m.layer_step(self.handle, self.x(pos) if x is None else x, pos)

    def exact(self):
        return ref.ExactLayer(self.weights, ref.clone_cache(self.original), self.shape.cfg(),
                              self.shape.max_seq_len)

    def steps(self, positions):
        """The outputs of steps from the original cache, one after the other."""
        for mine, theirs in zip(self.cache[0], self.original[0]):
            mine.copy_(theirs)
        return [self.step(pos).clone() for pos in positions]


def same(a, b):
    return len(a) == len(b) and all(ref.differing(x, y) == 0 for x, y in zip(a, b))


POSITIONS = range(300, 308)


def gpu_steps_are_right():
    case, kept = Case(), []
    exact = case.exact()
    for pos in [*POSITIONS, 383, 0, 1, 63, 64]:      # the last row, then the first ones
        out = case.step(pos)
        kept.append((out, out.clone()))
        error = ref.relative_error(out, exact.step(case.x(pos), pos))
        assert error <= 5e-3, (pos, error)
        assert ref.row_error(case.cache[0][0][0, :, pos], exact.k_row) <= 5e-3, pos
    assert all(ref.differing(a, b) == 0 for a, b in kept)     # no step wrote an earlier result
    assert len({out.data_ptr() for out, _ in kept}) == len(kept)


def gpu_a_dropped_reference_does_no_harm():
    case = Case()
    expected = case.steps(POSITIONS)
    case = Case()
    handle, m, xs = case.handle, case.m, [case.x(pos) for pos in POSITIONS]
    del case
    gc.collect()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    got = [m.layer_step(handle, x, pos) for x, pos in zip(xs, POSITIONS)]
    assert same(got, expected) and len(junk) == 64


def gpu_teardown():
    case = Case()
    case.step(300)
    case.m.teardown(case.handle)
    case.m.teardown(case.handle)
    with pytest.raises(RuntimeError, match="after teardown"):
        case.step(301)


def gpu_memory_stays_flat():
    case = Case()
    free = []
    for i in range(1000):
        handle = case.build()
        case.m.layer_step(handle, case.x(300), 300)
        if i % 3:
            case.m.teardown(handle)                  # every third is only dropped
        del handle
        if i >= 100 and i % 100 == 0:
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    torch.cuda.synchronize()
    assert free[0] - torch.cuda.mem_get_info()[0] < 1 << 20, free


def gpu_side_stream_and_no_waiting():
    case = Case()
    expected = case.steps([300])[0]
    right, x = case.x(300), case.x(301)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.step(300, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.copy_(right)
        start = time.perf_counter()
        seen = case.step(300, x).clone()
        assert time.perf_counter() - start < 0.02
    torch.cuda.synchronize()
    assert ref.differing(seen, expected) == 0


def gpu_build_then_step_on_another_stream():
    expected = Case().steps([300])
    for _ in range(20):
        case = Case()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            case.handle = case.build()
            out = case.step(300).clone()
        torch.cuda.synchronize()
        assert same([out], expected)


def gpu_two_handles_on_two_streams():
    cases = [Case(seed) for seed in (1, 2)]
    expected = [case.steps(POSITIONS) for case in cases]
    streams, got = [torch.cuda.Stream() for _ in cases], [[], []]
    for case in cases:
        case.steps([])
    xs = [[case.x(pos) for pos in POSITIONS] for case in cases]
    torch.cuda.synchronize()
    for j, pos in enumerate(POSITIONS):
        for i, case in enumerate(cases):
            with torch.cuda.stream(streams[i]):
                got[i].append(case.step(pos, xs[i][j]))
    torch.cuda.synchronize()
    assert same(got[0], expected[0]) and same(got[1], expected[1])


def gpu_one_handle_on_two_streams():
    case = Case()
    expected = case.steps(POSITIONS)
    case.steps([])
    xs, streams, got = [case.x(pos) for pos in POSITIONS], [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(20):
        for j, pos in enumerate(POSITIONS):
            with torch.cuda.stream(streams[j % 2]):
                got.append(case.step(pos, xs[j]))
    torch.cuda.synchronize()
    assert same(got, 20 * expected)


def gpu_position_on_the_device():
    case = Case()
    expected = case.steps(POSITIONS)
    case.steps([])
    got = [case.m.layer_step(case.handle, case.x(pos), torch.tensor([pos], device="cuda"))
           for pos in POSITIONS]
    assert same(got, expected)
    before = ref.clone_cache(case.cache)
    for pos in (-1, 384, 2**40):
        out = case.m.layer_step(case.handle, case.x(300), torch.tensor(pos, device="cuda"))
        assert bool(out.isnan().all()), pos
    assert same(case.cache[0], before[0])
    case.steps([])
    assert same([case.step(300)], expected[:1])      # and it goes on as if nothing had been


def gpu_steps_by_launch_and_by_graph():
    """One of each in turn, with nobody waiting: parameters set for later steps leave earlier ones alone."""
    case = Case()
    expected = case.steps(POSITIONS)
    case.steps([])
    xs, at = [case.x(pos) for pos in POSITIONS], [torch.tensor([pos], device="cuda") for pos in POSITIONS]
    graphs, got = [torch.cuda.CUDAGraph() for _ in POSITIONS[::2]], []
    torch.cuda.synchronize()
    outs = []
    for graph, x, pos in zip(graphs, xs[::2], at[::2]):
        with torch.cuda.graph(graph):
            outs.append(case.m.layer_step(case.handle, x, pos))
    torch.cuda.synchronize()
    for i, (x, pos) in enumerate(zip(xs, POSITIONS)):
        if i % 2:
            got.append(case.step(pos, x))
        else:
            graphs[i // 2].replay()
            got.append(outs[i // 2])
    torch.cuda.synchronize()
    assert same(got, expected)


def gpu_dependent_launches():
    """Asked for by the environment: the same bits, in a graph too, and after other work on the stream."""
    case, pos = Case(), torch.tensor([300], device="cuda")
    expected = case.steps(POSITIONS)
    os.environ["LAYER_DEPENDENT"] = "1"
    try:
        case.handle = case.build()
    finally:
        del os.environ["LAYER_DEPENDENT"]
    for _ in range(20):
        assert same(case.steps(POSITIONS), expected)
    outs = [case.step(pos) for pos in POSITIONS]         # nothing between them
    assert same(outs, expected)
    x = case.x(300)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = []
        for _ in POSITIONS[:4]:
            outs.append(case.m.layer_step(case.handle, x, pos))
            pos += 1
    case.steps([])
    x.copy_(case.x(300))
    graph.replay()
    assert same(outs[:1], expected[:1])


def gpu_two_threads_at_once():
    """On one stream: the stream orders the steps, and none gets the parameters of another."""
    case, got = Case(), [[], []]
    expected = case.steps(POSITIONS)
    xs = [case.x(pos) for pos in POSITIONS]
    torch.cuda.synchronize()

    def steps(mine):
        for _ in range(100):
            mine.extend(case.step(pos, x) for pos, x in zip(POSITIONS, xs))
    threads = [threading.Thread(target=steps, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert same(got[0], 100 * expected) and same(got[1], 100 * expected)


def gpu_graph():
    case = Case()
    expected = case.steps(POSITIONS)
    x, pos = case.x(300), torch.tensor([300], device="cuda")
    graph = torch.cuda.CUDAGraph()
    case.m.layer_step(case.handle, x, pos)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = case.m.layer_step(case.handle, x, pos)
        pos += 1
    case.steps([])
    got = []
    for p in POSITIONS:
        x.copy_(case.x(p))
        graph.replay()
        got.append(out.clone())
    assert same(got, expected)
    case.steps([])
    assert same([case.step(300)], expected[:1])      # without the graph again


def gpu_wrong_arguments():
    case = Case()
    x, pos, d = case.x(300), 300, case.shape.d
    before = ref.clone_cache(case.cache)
    wide = torch.zeros(1, 2 * d + 8, dtype=torch.bfloat16, device="cuda")
    for bad in (x.float(), x[0], x.cpu(), wide[:, :2 * d:2], wide[:, 1:d + 1], wide[:, :d - 8],
                x.expand(2, d), x.tolist()):
        with pytest.raises(ValueError, match="^x: got"):
            case.m.layer_step(case.handle, bad, pos)
    for bad in (-1, 384, 2**64, True, 3.0, torch.tensor(3), torch.tensor([3, 4], device="cuda")):
        with pytest.raises(ValueError, match="^pos: got"):
            case.m.layer_step(case.handle, x, bad)
    torch.cuda.synchronize()
    assert same(case.cache[0], before[0])
    layer = case.weights["layers"][0]
    q, norm = layer["q"], torch.zeros(d + 1, dtype=torch.bfloat16, device="cuda")
    for name, bad in (("q", q.t().contiguous().t()), ("q", q.cpu()), ("in_norm", norm[1:])):
        with pytest.raises(ValueError, match=name):
            case.m.build_layer({"layers": [{**layer, name: bad}]}, case.cache, case.shape.cfg(), 384)
    good_x = wide[:, 8:d + 8].copy_(x)               # a view, but contiguous and aligned
    assert ref.differing(case.step(300, good_x), case.step(300)) == 0


def gpu_modes_and_parameters():
    case = Case()
    expected = case.steps(POSITIONS)
    with torch.inference_mode():
        got = case.steps(POSITIONS)
    assert same(got, expected)
    with torch.no_grad():
        assert same(case.steps(POSITIONS), expected)
    case.weights["layers"][0] = {name: torch.nn.Parameter(t) for name, t in case.weights["layers"][0].items()}
    case.handle = case.build()
    assert same(case.steps(POSITIONS), expected)


def gpu_another_thread():
    case, got = Case(), []
    expected = case.steps(POSITIONS)
    thread = threading.Thread(target=lambda: got.extend(case.steps(POSITIONS)))
    thread.start()
    thread.join()
    assert same(got, expected)


def gpu_another_device():
    if torch.cuda.device_count() < 2:
        return print("skipped: there is one GPU only")
    expected = Case().steps(POSITIONS)
    case = Case(device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert same([t.to("cuda:0") for t in case.steps(POSITIONS)], expected)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="^x: got"):
        case.step(300, case.x(300).to("cuda:0"))
    with pytest.raises(ValueError, match=r"kv_cache\[0\]\[0\]"):
        case.m.build_layer(case.weights, [tuple(t.to("cuda:0") for t in case.cache[0])],
                           case.shape.cfg(), 384)


def gpu_rows_beyond_the_position_do_not_matter():
    case = Case()
    expected = case.steps(POSITIONS)
    case.steps([])
    for tensor in case.cache[0]:
        tensor[:, :, 300:] = float("nan")
    assert same([case.step(pos) for pos in POSITIONS], expected)


def host_time(part, xs):
    """median of a call, in us, in bursts of eight after all work is done"""
    calls = []
    for burst in range(60):
        torch.cuda.synchronize()
        for x, pos in zip(xs, POSITIONS):
            start = time.perf_counter_ns()
            part(pos, x)
            calls.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(calls[80:])


def gpu_host_time():
    """In its parts, too: the call of C, with the launch in it, and the new tensor. Whoever else uses a
    core makes each of them longer, and a call that does nothing as well: so on each core in turn, and
    what counts is the one on which a step is quickest."""
    case = Case()
    xs = [case.x(pos) for pos in POSITIONS]
    step, pointer, _, shape, _, stream_of, strides = case.handle.fast
    out = torch.empty_like(xs[0])
    stream = stream_of(0)
    parts = {"layer_step": lambda pos, x: case.m.layer_step(case.handle, x, pos),
             "of it the call of C": lambda pos, x: step(
                 case.m.RECORD(pointer, x.data_ptr(), pos, out.data_ptr(), stream)),
             "a new tensor": lambda pos, x: case.m.empty(shape, strides, case.m.BF16),
             "by empty_like": lambda pos, x: torch.empty_like(x), "nothing": lambda pos, x: None}
    cores, found = os.sched_getaffinity(0), []
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            found.append({name: host_time(part, xs) for name, part in parts.items()})
    finally:
        os.sched_setaffinity(0, cores)
    found.sort(key=lambda medians: medians["layer_step"])
    for which, medians in (("quickest", found[0]), ("slowest", found[-1])):
        print(f"note: host time in us, the {which} of {len(found)} cores:",
              ", ".join(f"{name} {us:.2f}" for name, us in medians.items()))
    assert found[0]["layer_step"] - found[0]["nothing"] <= 8


def gpu_torch_compile():
    """One operator in one graph, with positions that are numbers and positions on the device."""
    if not hasattr(torch.library, "custom_op"):
        return print("skipped: this PyTorch has no custom operators")
    case = Case()
    sys.modules["submission"] = case.m                   # torch.compile imports what it traces
    eager = [case.step(pos) + 1 for pos in POSITIONS]
    compiled = torch.compile(lambda x, pos: case.m.layer_step(case.handle, x, pos) + 1, fullgraph=True)
    case.steps([])
    assert same([compiled(case.x(pos), pos) for pos in POSITIONS], eager)
    case.steps([])
    assert same([compiled(case.x(pos), torch.tensor([pos], device="cuda")) for pos in POSITIONS], eager)
    with torch.inference_mode():
        assert same([compiled(case.x(pos), pos) for pos in POSITIONS], eager)
    with pytest.raises(ValueError, match="^pos: got"):
        compiled(case.x(300), 384)


def gpu_refresh():
    case, other = Case(), Case(seed=2)
    expected = other.steps(POSITIONS)
    case.weights["layers"][0] = dict(other.weights["layers"][0])
    case.cache[0] = other.cache[0]
    case.m.refresh(case.handle)
    assert same([case.step(pos, other.x(pos)) for pos in POSITIONS], expected)


GPU_CHECKS = [name for name in list(globals()) if name.startswith("gpu_")]


@functools.lru_cache(None)
def verdicts():
    return tools.in_one_process(__file__, GPU_CHECKS, limit=200)


@pytest.mark.gpu
@pytest.mark.parametrize("check", GPU_CHECKS)
def test_on_the_gpu(check):
    verdict, output = verdicts()[check]
    print(output)
    assert verdict == "passed"
    skipped = re.search("^skipped: (.*)", output, re.M)
    if skipped:
        pytest.skip(skipped.group(1))


def compiled():
    """What the steps need, compiled before they are tested: make check-gpu asks for it beside its builds."""
    for stage in ("stage7", "stage8"):
        m = load(tools.ROOT / "stages" / stage / "submission.py")
        m.library(m.architecture(torch.device("cuda")))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or GPU_CHECKS:
        globals()[chosen]()
        print(chosen, "passed", flush=True)
