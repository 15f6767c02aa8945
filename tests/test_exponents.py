"""How weights use their exponents: counting, the network in its package, the table, the figure."""
import json
import sys
import types
import zipfile

import numpy
import pytest

import tools

sys.path.insert(0, str(tools.ROOT / "plots"))
import draw        # noqa: E402
import exponents   # noqa: E402
import tables      # noqa: E402


def patterns(exponent, seed=1):
    """Random signs and mantissas for given exponents."""
    rng, exponent = numpy.random.default_rng(seed), numpy.asarray(exponent)
    return (rng.integers(0, 2, exponent.shape) << 15 | exponent << 7
            | rng.integers(0, 128, exponent.shape)).astype(numpy.uint16)


def test_what_a_window_leaves_out():
    even = numpy.tile(numpy.arange(100, 116), 4096)
    places, figures = exponents.measured([exponents.counted(patterns(even))])
    assert figures["odd16"] == "0.0e+00" and figures["exponent-bits"] == "4.00"
    assert figures["odd8"] == "5.0e-1" and figures["bits11"] == "27.00" and figures["bits12"] == "12.000"
    assert 11.9 < float(figures["entropy"]) <= 12
    assert all(places[i] == 1 / 16 for i in range(16)) and places[-1] == places[16] == 0

    odd = even.copy()
    odd[:64] = 0          # zeros and denormals,
    odd[64:128] = 255     # infinities and NaNs,
    odd[128:192] = 99     # the first below the window
    _, figures = exponents.measured([exponents.counted(patterns(odd))])
    assert figures["odd16"] == exponents.short(192 / 65536) and figures["bits12"] == f"{12 + 32 * 192 / 65536:.3f}"


def test_each_matrix_has_its_own_window():
    low, high = (exponents.counted(patterns(numpy.tile(numpy.arange(at, at + 16), 256))) for at in (90, 120))
    assert exponents.measured([low, high])[1]["odd16"] == "0.0e+00"
    assert exponents.measured([low + high])[1]["odd16"] == "5.0e-1"


def test_rounding_is_to_nearest_even():
    bits = numpy.array([0x3f800000, 0x3f808000, 0x3f818000, 0x3f808001, 0xbf80ffff], dtype=numpy.uint32)
    assert exponents.bf16(bits.view(numpy.float32)).tolist() == [0x3f80, 0x3f80, 0x3f82, 0x3f81, 0xbf81]


@pytest.fixture
def wheel(tmp_path):
    """A package with a model of two matrices, a vector and a tensor of integers."""
    parts = [("a", "F32", [2, 3]), ("bias", "F32", [4]), ("b", "F32", [4, 4]), ("ids", "I64", [1, 2])]
    header, content = {"__metadata__": {"format": "pt"}}, b""
    for name, dtype, shape in parts:
        data = numpy.full(shape, 1.5, dtype="<f4" if dtype == "F32" else "<i8").tobytes()
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[len(content), len(content) + len(data)])
        content += data
    text = json.dumps(header).encode()
    path = tmp_path / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model/model.safetensors", len(text).to_bytes(8, "little") + text + content)
    return path


def test_the_matrices_of_a_package(wheel):
    counts = list(exponents.matrices_of(wheel))
    assert [int(count.sum()) for count in counts] == [6, 16]
    assert all(count[0x3fc0] == count.sum() for count in counts)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(exponents, "SIZE", 256)
    monkeypatch.setattr(exponents, "drawn", lambda rng, kind, draw=exponents.drawn: draw(rng, kind, 4))


def test_the_table_and_its_figure(tmp_path, wheel, few):
    out = tmp_path / "exponents.csv"
    assert exponents.main(["--out", str(out), "--wheel", str(wheel)]) == 0
    header, rows = tables.read(out, ("place",))
    assert list(rows[0]) == ["place", "normal", "heavy", "network"]
    assert header["network-weights"] == "22" and header["normal-weights"] == "65536"
    assert 12 <= float(header["normal-bits12"]) < 12.1
    files, variables = draw.exponents(tmp_path, draw.plain)
    assert variables == dict(kinds=3, names="normal heavy-tailed trained")
    lines = files["exponents.dat"].splitlines()
    assert len(lines) == len(rows) and all(len(line.split("\t")) == 4 for line in lines)
    assert any("NaN" in line for line in lines)


def test_a_network_that_cannot_be_had_is_left_out(tmp_path, few, monkeypatch, capsys):
    answer = types.SimpleNamespace(returncode=1, stderr="ERROR: no network here\n")
    monkeypatch.setattr(exponents.subprocess, "run", lambda *args, **more: answer)
    out = tmp_path / "exponents.csv"
    assert exponents.main(["--out", str(out)]) == 0
    assert "cannot be had (ERROR: no network here)" in capsys.readouterr().out
    header, rows = tables.read(out, ("place",))
    assert list(rows[0]) == ["place", "normal", "heavy"] and "network-weights" not in header


def test_the_committed_table():
    header, rows = tables.read(tools.ROOT / "data" / "exponents.csv", ("place",), needed=("place",))
    assert [row["place"] for row in rows] == list(exponents.PLACES)
    assert int(header["normal-weights"]) == exponents.SIZE ** 2
