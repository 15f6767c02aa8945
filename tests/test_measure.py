"""Measuring: what is checked before and after, the tables, the figures, the README."""
import concurrent.futures
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

import sanitize
import tools

sys.path[:0] = [str(tools.ROOT), str(tools.ROOT / "plots")]
import draw        # noqa: E402
import measure     # noqa: E402
import reference   # noqa: E402
import tables      # noqa: E402

SHAPE = reference.Shape(d=128, ffn=192, n_q=4, n_kv=2, hd=64, prefill=5, max_seq_len=64)
LIMITS = (4.25, 4.6)   # TB/s
HEADER = dict(gpu="NVIDIA H200", driver="1.2", cuda="13.0", clocks="1, 2", commit="abc",
              date="2026-01-02T03:04:05Z", protocol="none: these numbers are made up")


def row(first, title, us, graph=None, launches=1):
    made = measure.row_of(first, title, [us - 1, us, us + 1], 1_728_153_600, LIMITS, 1_728_184_320,
                          launches=launches, rel_err=1e-3, us_graph_median=graph)
    return made


def ladder_text():
    rows = [row(dict(stage=0), "one & all, at 43", 1900.0, 1500.0, 43),
            row(dict(stage=5), 'a "few"', 480.0, 470.0, 5), row(dict(stage=7), "stream", 388.0)]
    return tables.text_of(tables.LADDER, HEADER, rows)


def peers_text():
    rows = [row(dict(peer="eager"), "PyTorch, eager", 900.0, None, 43),
            measure.row_of(dict(peer="cublas o"), "product", [30.0], 134217728, LIMITS, rel_err=1e-3),
            row(dict(peer="stage 7"), "stream", 388.0)]
    return tables.text_of(tables.PEERS, HEADER, rows)


def shape_row(name, keys, us, **sizes):
    made = row(dict(dict(shape=name, d=8192, ffn=28672, n_q=64, n_kv=8, hd=128, keys=keys, stage=7),
                    **sizes), "stream", us)
    return made


def shapes_text():
    rows = [shape_row("llama-3-70b", 128, 380.0), shape_row("llama-3-70b", 4096, 385.0),
            shape_row("llama-3.2-1b", 4096, 35.0, d=2048, ffn=8192, n_q=32, hd=64)]
    return tables.text_of(tables.SHAPES, HEADER, rows)


TIMELINE = "# gpu: none\nsm,phase,start_us,end_us\n0,O,0,10\n1,O,0.5,11\n0,down,12,20\n1,down,12,21\n"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "ladder.csv").write_text(ladder_text(), encoding="utf-8")
    (folder / "peers.csv").write_text(peers_text(), encoding="utf-8")
    (folder / "timeline-7.csv").write_text(TIMELINE, encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------- tables

def test_a_table_comes_back_as_it_was_written(data):
    header, rows = tables.read_ladder(data / "ladder.csv")
    assert header == HEADER
    assert [r["stage"] for r in rows] == [0, 5, 7]
    assert rows[0]["title"] == "one & all, at 43" and rows[1]["title"] == 'a "few"'
    assert rows[0]["us_median"] == 1900 and rows[0]["us_p10"] == 1899.2
    assert rows[2]["us_graph_median"] is None
    assert rows[0]["x_copy_floor"] == pytest.approx(1900e-6 * 4.25e12 / 1_728_184_320, abs=1e-4)


def test_the_columns_are_those_of_the_design():
    assert ladder_text().splitlines()[7] == (
        "stage,title,launches,us_median,us_p10,us_p90,us_graph_median,tokens_per_s,bytes,copy_tbs,"
        "read_tbs,x_copy_floor,x_read_limit,rel_err")
    assert [line.split(":")[0] for line in ladder_text().splitlines()[:7]] == [
        "# " + key for key in tables.PROVENANCE]


def test_shapes_have_the_columns_of_the_ladder_and_their_sizes():
    columns = shapes_text().splitlines()[7].split(",")
    assert columns[:7] == ["shape", "d", "ffn", "n_q", "n_kv", "hd", "keys"]
    assert columns[7:] == ladder_text().splitlines()[7].split(",")


def test_nan_is_not_written():
    with pytest.raises(tables.BadTable):
        tables.text_of(tables.LADDER, HEADER, [row(dict(stage=0), "t", math.nan)])


BAD = {
    "is empty": lambda text: "",
    "has no rows": lambda text: "\n".join(text.splitlines()[:8]) + "\n",
    "no column us_p90": lambda text: text.replace("us_p90", "us_p99"),
    "us_median is nan": lambda text: text.replace("1900.00", "nan"),
    "us_median is inf": lambda text: text.replace("1900.00", "inf"),
    "'1900,5' is not a number": lambda text: text.replace("1900.00", '"1900,5"'),
    "us_median is empty": lambda text: text.replace("1900.00", ""),
    "row 3: 15 cells": lambda text: text.rstrip() + ",1\n",
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_table_says_what_is_wrong(tmp_path, message):
    bad = BAD[message](ladder_text())
    assert bad != ladder_text()
    (tmp_path / "ladder.csv").write_text(bad, encoding="utf-8")
    with pytest.raises(tables.BadTable, match=message):
        tables.read_ladder(tmp_path / "ladder.csv")


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(tables.BadTable, match="not there"):
        tables.read_ladder(tmp_path / "ladder.csv")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "ladder.csv"
    tables.write_whole(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        tables.write_whole(path, "half a table \ud800")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tables.write_whole(path, "new\n")
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["ladder.csv"]


# ---------------------------------------------------------------------------- commands

def test_without_a_gpu_it_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("ladder", "peers", "shapes", "queue"):
        assert measure.main([command]) == 2
        assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ladder", "shapes", "queue"])
@pytest.mark.parametrize("raised, status", [(measure.Failed("no"), 1), (KeyboardInterrupt(), None)])
def test_what_goes_wrong_leaves_the_old_table(tmp_path, monkeypatch, raised, status, command):
    def fail(*_):
        raise raised
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "measure_" + command, fail)
    out = tmp_path / "table.csv"
    out.write_text("old\n")
    if status is None:
        with pytest.raises(KeyboardInterrupt):
            measure.main([command, "--out", str(out)])
    else:
        assert measure.main([command, "--out", str(out)]) == status
    assert out.read_text() == "old\n"


QUEUE = ("copy_kb,slots,in_flight_kb,us,tbs,load_median_ns,load_p90_ns,load_p99_ns\n"
         "16,12,192,374.02,4.6205,1890,3760,5340\n16,12,64,377.00,4.5743,450,880,1250\n")


def test_the_queue_from_end_to_end_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "run_queue", lambda: QUEUE)
    monkeypatch.setattr(measure, "header_of", lambda protocol: dict(HEADER, protocol=protocol))
    out = tmp_path / "queue.csv"
    assert measure.main(["queue", "--out", str(out)]) == 0
    header, rows = tables.read_queue(out)
    assert header["gpu"] == "NVIDIA H200" and "7 samples of 6 passes" in header["protocol"]
    assert [row["x_best"] for row in rows] == [1.0, 0.99]
    assert out.read_text().splitlines()[-2] == "16,12,192,374.02,4.6205,1890,3760,5340,1.0000"


@pytest.mark.parametrize("text, words", [
    ("", "no rows"), (QUEUE.split("\n", 1)[0], "no rows"), (QUEUE + "16,12,48,1,2,3,4\n", "not of copy_kb"),
    (QUEUE.replace(",450,", ",nan,"), "not positive"), (QUEUE.replace("450", "0"), "not positive"),
    (QUEUE.replace("450", "x"), "no number"), (QUEUE.replace("slots", "places"), "not of copy_kb")])
def test_what_the_queue_prints_is_not_believed(text, words):
    with pytest.raises(measure.Failed, match=words):
        measure.queue_rows(text)


@pytest.mark.parametrize("script, words", [
    ("echo 'queue: no CUDA device' >&2; exit 2", "ended with 2: queue: no CUDA device"), (None, "make queue builds it")])
def test_a_queue_that_does_not_run_is_a_failure(tmp_path, monkeypatch, script, words):
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    if script:
        program = tmp_path / "build/gpu/stage7/queue"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(measure.Failed, match=words):
        measure.run_queue()


def test_too_few_samples_are_refused():
    with pytest.raises(SystemExit):
        measure.parse(["ladder", "--samples", "8"])


# --------------------------------------------------------------------------- the protocol

def test_no_set_is_used_twice_within_three_steps():
    sets = [measure.set_of(i) for i in range(measure.SETS)] \
        + [measure.set_of(i) for i in range(measure.STEPS)]
    assert all(len(set(sets[i:i + 3])) == 3 for i in range(len(sets) - 2))
    assert sets[-1] == 0


@pytest.mark.parametrize("name, shape", measure.shapes_of(), ids=lambda v: v if isinstance(v, str)
                         else str(v.prefill))
def test_every_layer_leaves_the_l2_cache(name, shape):
    sets = measure.sets_for(shape)
    assert sets >= measure.SETS and (sets * measure.step_bytes(shape) >= 5e9 or sets == 8)
    assert (sets - 1) * measure.step_bytes(shape) > 10 * 60e6   # read between two uses of a set
    used = [measure.set_of(i, sets) for i in range(sets)] \
        + [measure.set_of(i, sets) for i in range(measure.STEPS)]
    assert all(len(set(used[i:i + measure.SETS])) == measure.SETS for i in range(len(used) - 2))
    assert used[-1] == 0


def test_the_shapes_are_those_promised():
    shapes = measure.shapes_of()
    assert {(s.d, s.ffn, s.n_q, s.n_kv, s.hd) for _, s in shapes} == {
        (4096, 14336, 32, 8, 128), (8192, 28672, 64, 8, 128), (2048, 8192, 32, 8, 64),
        (3072, 8192, 24, 8, 128), (3584, 18944, 28, 4, 128), (8192, 29568, 64, 8, 128)}
    assert [s.prefill for name, s in shapes if "3-70b" in name] == [128, 4096, 32768, 131072]
    assert len({name for name, _ in shapes}) == 7
    assert [name for name, _ in measure.shapes_of(["72b", "mistral"])] == ["qwen2.5-72b", "mistral-7b"]


def test_bytes_of_a_step():
    assert measure.step_bytes(reference.Shape()) == 1_711_276_032 + 2 * 8192 * 2 + 4096 * 4112.5


def test_percentiles_and_distances():
    times = [float(t) for t in range(101)]
    made = measure.row_of(dict(stage=1), "t", times, 10**9, (4.0, 5.0), 2 * 10**9, rel_err=0.0)
    assert (made["us_median"], made["us_p10"], made["us_p90"]) == (50, 10, 90)
    assert made["x_copy_floor"] == pytest.approx(50 / 500)
    assert made["x_read_limit"] == pytest.approx(50 / 200)
    assert made["tokens_per_s"] == pytest.approx(20000)


@pytest.mark.parametrize("stage", tools.STAGES)
def test_a_stage_says_what_it_is(stage):
    facts = measure.facts_of(int(stage[5:]))
    assert facts["STAGE"] == int(stage[5:]) and facts["LAUNCHES"] > 0 and facts["TITLE"]
    assert 0 < facts["TOLERANCE"] <= reference.TOLERANCE


def test_a_stage_that_does_not_say_is_refused(tmp_path):
    driver = tmp_path / "stages" / "stage3" / "driver.c"
    driver.parent.mkdir(parents=True)
    driver.write_text('#define STAGE 3\n#define TITLE "t"\n#define TOLERANCE 5e-3\n')
    with pytest.raises(measure.Failed, match="LAUNCHES"):
        measure.facts_of(3, tmp_path)
    driver.write_text(driver.read_text().replace("STAGE 3", "STAGE 4") + "#define LAUNCHES 11\n")
    with pytest.raises(measure.Failed, match="stage 4"):
        measure.facts_of(3, tmp_path)
    with pytest.raises(measure.Failed, match="no stages/stage5"):
        measure.facts_of(5, tmp_path)


class Fake(measure.Eager):
    """The eager layer in the place of a stage, with a fault."""
    launches, tolerance = 43, reference.TOLERANCE

    def __init__(self, number, inputs, fault=None):
        super().__init__(inputs)
        self.number, self.name, self.title, self.fault = number, f"stage {number}", "fake", fault
        self.torn_down = False

    def step(self, i, s):
        out = super().step(i, s)
        if self.fault == "wrong":
            out = out * 1.1
        if self.fault == "nan":
            out[0, 7] = math.nan
        if self.fault == "no row":
            self.caches[s][0][1][:, :, self.inputs.shape.prefill + i] = 0
        if self.fault == "stale" and i == measure.STEPS - 1:
            out = getattr(self, "last", out)
        return out

    def teardown(self):
        self.torn_down = True


@pytest.fixture(scope="module")
def inputs():
    return measure.Inputs(SHAPE, 1, "cpu")


@pytest.mark.parametrize("fault", ["wrong", "nan", "no row"])
def test_a_fault_is_found_before_timing(inputs, fault):
    with pytest.raises(measure.Failed, match="stage 3: first step on set 0"):
        Fake(3, inputs, fault).check_first()


def test_a_fault_is_found_after_timing(inputs):
    good, stale = Fake(3, inputs), Fake(3, inputs, "stale")
    for fake in (good, stale):
        assert 0 < fake.check_first() <= reference.TOLERANCE
        fake.sample()
    assert good.check_last() <= reference.TOLERANCE
    with pytest.raises(measure.Failed, match="last timed step"):
        stale.check_last()


def fake_the_gpu(monkeypatch, inputs, launches=43):
    monkeypatch.setattr(measure, "Inputs", lambda shape, seed: inputs)
    monkeypatch.setattr(measure, "Stage", Fake)
    monkeypatch.setattr(measure, "bandwidths", lambda: LIMITS)
    monkeypatch.setattr(measure, "prove_profiler", lambda: None)
    monkeypatch.setattr(measure, "count_launches", lambda contestant: launches)
    monkeypatch.setattr(measure, "header_of", lambda protocol, **more: HEADER)

    class Graph(measure.Contestant):
        def __init__(self, of):
            self.of, self.name, self.tolerance = of, of.name + " in a graph", of.tolerance
            self.sample, self.errors = of.sample, of.errors
        last = property(lambda self: self.of.last)

    def timed(contestant):
        contestant.sample()
        return 100.0 if isinstance(contestant, Graph) else 200.0
    monkeypatch.setattr(measure, "InGraph", Graph)
    monkeypatch.setattr(measure, "timed", timed)


def test_the_ladder_from_end_to_end_without_a_gpu(monkeypatch, inputs, capsys):
    fake_the_gpu(monkeypatch, inputs)
    header, rows = measure.measure_ladder([0, 7], SHAPE, 1, 9)
    assert [r["stage"] for r in rows] == [0, 7]
    assert [r["us_graph_median"] for r in rows] == [100.0, None]
    assert all(r["us_median"] == 200 and r["launches"] == 43 for r in rows)
    printed = capsys.readouterr().out
    assert "noise: stage 7 twice: 200.00 and 200.00 us" in printed
    assert printed.count("stage 0: ") == 2 and "suspect" not in printed
    tables.text_of(tables.LADDER, header, rows)


REAL_INPUTS = measure.Inputs


def fake_the_shapes(monkeypatch, launches=43):
    fake_the_gpu(monkeypatch, None, launches)
    monkeypatch.setattr(measure, "Inputs", lambda shape, seed, sets: REAL_INPUTS(shape, seed, "cpu", sets))
    return [("a", SHAPE), ("b", reference.Shape(d=64, ffn=128, n_q=6, n_kv=2, hd=64, prefill=40,
                                                max_seq_len=80))]


def test_the_shapes_from_end_to_end_without_a_gpu(monkeypatch, capsys):
    shapes = fake_the_shapes(monkeypatch)
    header, rows = measure.measure_shapes(shapes, 1, 9)
    assert [(r["shape"], r["keys"], r["d"], r["n_q"], r["stage"]) for r in rows] == [
        ("a", 5, 128, 4, 7), ("b", 40, 64, 6, 7)]
    assert all(r["us_median"] == 200 and r["launches"] == 43 and 0 < r["rel_err"] for r in rows)
    assert rows[1]["x_read_limit"] == pytest.approx(200 * LIMITS[1] * 1e6 / measure.step_bytes(shapes[1][1]))
    printed = capsys.readouterr().out
    assert "a, 5 keys, 8 sets: 200.00 us" in printed and printed.count("noise:") == 1
    assert printed.count("b, 40 keys") == 2
    text = tables.text_of(tables.SHAPES, header, rows)
    assert text.splitlines()[8].startswith("a,128,192,4,2,64,5,7,fake,43,200.00,")


def test_a_wrong_shape_fails_before_it_is_timed(monkeypatch):
    shapes = fake_the_shapes(monkeypatch)
    monkeypatch.setattr(measure, "Stage", lambda number, inputs: Fake(number, inputs, "wrong"))
    monkeypatch.setattr(measure, "timed", lambda contestant: pytest.fail("timed"))
    with pytest.raises(measure.Failed, match="first step on set 0"):
        measure.measure_shapes(shapes, 1, 9)
    shapes = fake_the_shapes(monkeypatch, launches=44)
    with pytest.raises(measure.Failed, match="44 launches a step"):
        measure.measure_shapes(shapes, 1, 9)


def test_the_values_make_attention_count(monkeypatch):
    """One key in four left out of attention is an error that the check sees."""
    fake_the_shapes(monkeypatch)
    shape = reference.Shape(d=64, ffn=64, n_q=2, n_kv=1, hd=64, prefill=4000, max_seq_len=4064)
    inputs = measure.inputs_of(shape, 1, 1)
    peer = Fake(7, inputs)
    peer.caches[0][0][1][:, :, :1000] = 0
    with pytest.raises(measure.Failed, match="first step"):
        peer.check_first()


def test_faster_than_the_limit_is_suspect(capsys):
    measure.print_row("stage 7", row(dict(stage=7), "t", 300.0))
    assert "suspect the measurement" in capsys.readouterr().out


def test_a_wrong_number_of_launches_fails(monkeypatch, inputs):
    fake_the_gpu(monkeypatch, inputs, launches=44)
    with pytest.raises(measure.Failed, match="44 launches a step, not the 43 it claims"):
        measure.measure_ladder([0], SHAPE, 1, 9)


@pytest.mark.parametrize("compiler", ["works", "fails"])
def test_the_peers_from_end_to_end_without_a_gpu(monkeypatch, inputs, capsys, compiler):
    def compiled(function, fullgraph):
        assert compiler == "works", "no compiler"
        return function
    fake_the_gpu(monkeypatch, inputs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", compiled, raising=False)
    header, rows = measure.measure_peers(SHAPE, 1, 9)
    expected = ["eager", "eager in a graph", "torch.compile", "cublas"] + [
        f"cublas {n}" for n in ("q+k+v", "o", "gate+up", "down")] + ["stage 7"]
    if compiler == "fails":
        expected.remove("torch.compile")
        assert "torch.compile: left out: AssertionError: no compiler" in capsys.readouterr().out
    assert [r["peer"] for r in rows] == expected
    assert [r["us_median"] for r in rows] == [200.0] + [100.0] * (len(rows) - 2) + [200.0]
    assert all(r["title"].endswith(", in a CUDA graph") for r in rows[1:-1])
    whole = [r["x_copy_floor"] is not None for r in rows]
    assert whole == [True] * (len(rows) - 5) + [False] * 4 + [True]
    assert [r["peer"] for r in rows if r["tokens_per_s"]] == \
        [r["peer"] for r in rows if "cublas" not in r["peer"]]
    tables.text_of(tables.PEERS, header, rows)


def test_what_is_compiled_is_the_layer(inputs):
    peer = measure.Compiled(inputs, measure.layer_for_a_compiler)
    assert peer.check_first() <= reference.TOLERANCE
    peer.sample()
    assert peer.check_last() <= reference.TOLERANCE


def test_the_products_are_checked_one_by_one(inputs):
    products = measure.make_products(inputs)
    assert [p.name for p in products] == ["cublas q+k+v", "cublas o", "cublas gate+up", "cublas down"]
    together = measure.Products(products)
    assert together.bytes == SHAPE.weight_bytes()
    assert together.check_first() <= reference.EXACT_TOLERANCE
    products[2].matrices[1] = products[2].matrices[1].clone()
    exact = products[2].errors(products[2].step(0, 1), 0, 1)
    products[2].matrices[1][0] *= 1.5
    wrong = products[2].errors(products[2].vector @ inputs.weights[1]["layers"][0]["gate"].T.repeat(1, 2),
                               0, 1)
    assert exact[0] <= reference.EXACT_TOLERANCE < wrong[0]


def test_a_time_box_closes():
    """In a process of its own: a runner's tests are not always in the main thread."""
    program = ("import measure\n"
               "try:\n    with measure.at_most_seconds(1):\n        while True: pass\n"
               "except TimeoutError as e: print(e)")
    assert tools.run([sys.executable, "-c", program], timeout=60) == (0, "no result after 1 s\n")


def test_outside_the_main_thread_a_time_box_is_open():
    def enter():
        with measure.at_most_seconds(1):
            return 5
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() == 5


def test_a_failing_peer_is_none():
    assert measure.unless_it_fails("x", lambda: 1 / 0) is None


# ------------------------------------------------------------------------------- figures

needs_gnuplot = pytest.mark.skipif(shutil.which("gnuplot") is None, reason="needs gnuplot")
ALL = {"ladder", "roofline", "waterfall", "timeline"}


def plot(data, out, *more):
    return tools.run([sys.executable, str(tools.ROOT / "plots/draw.py"), "--data", str(data),
                      "--readme", str(out / "svg"), "--paper", str(out / "tex"), *more])


@needs_gnuplot
def test_all_figures_from_data_alone(data, tmp_path):
    status, output = plot(data, tmp_path)
    assert status == 0, output
    svg, tex = (tools.files(tmp_path / folder) for folder in ("svg", "tex"))
    assert set(svg) == {f"{name}.svg" for name in ALL}
    assert set(tex) == {f"figure-{name}.{kind}" for name in ALL for kind in ("tex", "pdf")}
    assert b"one &amp; all, at 43" in svg["ladder.svg"] and b"PyTorch, eager" in svg["ladder.svg"]
    assert rb"one \& all, at 43" in tex["figure-ladder.tex"]
    assert plot(data, tmp_path / "again")[0] == 0
    assert tools.files(tmp_path / "again" / "svg") == svg


@needs_gnuplot
@pytest.mark.parametrize("message", BAD)
def test_a_bad_table_keeps_the_old_figure(data, tmp_path, message):
    assert plot(data, tmp_path)[0] == 0
    before = tools.files(tmp_path / "svg"), tools.files(tmp_path / "tex")
    (data / "ladder.csv").write_text(BAD[message](ladder_text()), encoding="utf-8")
    status, output = plot(data, tmp_path)
    assert status == 1 and message in output and "the old figure stays" in output
    now = tools.files(tmp_path / "svg"), tools.files(tmp_path / "tex")
    assert {n: b for n, b in now[0].items() if "timeline" not in n} == \
        {n: b for n, b in before[0].items() if "timeline" not in n}
    assert now[1].keys() == before[1].keys()
    assert now[1]["figure-ladder.pdf"] == before[1]["figure-ladder.pdf"]


@needs_gnuplot
def test_a_script_that_is_wrong_is_an_error(data, tmp_path):
    plots = tmp_path / "plots"
    shutil.copytree(tools.ROOT / "plots", plots)
    (plots / "ladder.gp").write_text("plot 'nothing.dat'\n")
    status, output = tools.run([sys.executable, str(plots / "draw.py"), "--data", str(data),
                                "--readme", str(tmp_path / "svg")])
    assert status == 1 and "ladder.gp" in output
    assert "ladder.svg" not in tools.files(tmp_path / "svg")


def test_without_data_there_is_nothing_to_draw(tmp_path):
    assert plot(tmp_path, tmp_path)[0] == 1
    assert plot(tmp_path, tmp_path, "--if-any")[0] == 0
    assert not (tmp_path / "svg").exists()


@needs_gnuplot
def test_the_layers_are_drawn_once_they_are_measured(data, tmp_path):
    (data / "shapes.csv").write_text(shapes_text(), encoding="utf-8")
    files, variables = draw.shapes(data, draw.plain)
    points = [line.split("\t") for line in files["shapes.dat"].splitlines()]
    assert [(float(us), kind) for _, us, _, kind in points] == [(380.0, "1"), (385.0, "0"), (35.0, "0")]
    limit = 1_728_153_600 / 4.6e6
    assert variables["above"] == pytest.approx((385 + 35) / 2 - limit, abs=0.1)   # the median of two
    status, output = plot(data, tmp_path)
    assert status == 0 and "shapes" in output
    assert {"shapes.svg"} == set(tools.files(tmp_path / "svg")) - {f"{name}.svg" for name in ALL}
    (data / "shapes.csv").write_text(shapes_text().replace(",4096,", ",100,"), encoding="utf-8")
    assert "no shapes: shapes.csv has no layer with 4096 keys" in plot(data, tmp_path)[1]


def test_the_time_above_the_limit_adds_up(data):
    files, _ = draw.waterfall(data, draw.plain)
    for line, us, graph in zip(files["waterfall.dat"].splitlines(), (1900, 480, 388),
                               (1500, 470, 388)):
        _, rest, above, *_ = line.split("\t")
        limit = 1_728_153_600 / 4.6e6
        assert float(above) == pytest.approx(us - limit, abs=0.1)
        assert float(above) - float(rest) == pytest.approx(us - graph)


# ------------------------------------------------------------------- the README, the text

def test_the_readme_says_what_the_data_says():
    readme = (tools.ROOT / "README.md").read_text(encoding="utf-8")
    block = tables.readme_block(tools.ROOT / "data", tools.ROOT / "plots")
    assert tables.with_block(readme, block) == readme, "run: make plots"
    result = tables.result_block(tools.ROOT / "data", tools.ROOT / "plots")
    assert tables.with_block(readme, result, tables.RESULT) == readme, "run: make plots"


def test_a_stage_that_reads_fewer_bytes_is_not_taken_for_the_result(data, tmp_path):
    packed = measure.row_of(dict(stage=8), "packed", [300.0] * 3, 1_303_808_000, LIMITS, 1_728_184_320, launches=1)
    _, rows = tables.read_ladder(data / "ladder.csv")
    (data / "ladder.csv").write_text(tables.text_of(tables.LADDER, HEADER, rows + [packed]), encoding="utf-8")
    said = tables.result_block(data, tmp_path)
    assert said.startswith("**Stage 7, stream: 388.0 µs a layer**, 0.95 × the copy floor, 1.03 × the read limit, "
                           "4.90 times as fast as stage 0. **Stage 8, packed: 300.0 µs a layer**, from 75 % of the "
                           "bytes, 0.74 × the copy floor of all bytes, 1.06 × the read limit of its own, 6.33 times")
    assert said.count("Measured on") == 1


def test_the_readme_follows_the_data(data, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.RESULT}\n{tables.END}\n{tables.BEGIN}\n{tables.END}\nafter\n",
                      encoding="utf-8")
    assert tables.main(readme) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| 7 | stream | 1 | 388.0 (387.2 to 388.8) |" in text and "NVIDIA H200, driver 1.2" in text
    assert "**Stage 7, stream: 388.0 µs a layer**, " in text.partition(tables.BEGIN)[0]
    (data / "ladder.csv").write_text("", encoding="utf-8")
    assert tables.main(readme) == 1 and readme.read_text(encoding="utf-8") == text
    readme.write_text("no markers\n")
    assert tables.main(readme) == 1


def test_the_readme_has_the_shapes_once_they_are_measured(data, tmp_path):
    assert "other layers" not in tables.readme_block(data, tmp_path)
    (data / "shapes.csv").write_text(shapes_text(), encoding="utf-8")
    block = tables.readme_block(data, tmp_path)
    assert "Stage 7 on other layers:" in block
    assert "With 4096 keys -341 to 9 µs of a layer are above the read limit." in block
    assert "| llama-3.2-1b | 4096 | 2048 | 8192 | 32/8 × 64 | 1728 | 35.0 (34.2 to 35.8) |" in block
    (data / "shapes.csv").write_text(shapes_text().replace("35.00", "nan"), encoding="utf-8")
    with pytest.raises(tables.BadTable, match="us_median is nan"):
        tables.readme_block(data, tmp_path)


def test_nothing_measured_is_said(tmp_path):
    assert "not measured yet" in tables.readme_block(tmp_path, tmp_path)


def test_the_text_has_its_numbers(data):
    (data / "grade.json").write_text(json.dumps(
        {"pass": True, "measured": {"us_median": 385.14, "read_tbs": None},
         "derived": {"x_read_us_rotation": 1.0312}}))
    (data / "shapes.csv").write_text(shapes_text(), encoding="utf-8")
    made = subprocess.run([sys.executable, str(tools.ROOT / "paper/numbers.py"), str(data)],
                          check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for key, value in {"ladder-7-us": "388.0", "ladder-0-launches": "43", "ladder-0-graph": "1500.0",
                       "ladder-5-xfloor": "1.18", "ladder-5-xlimit": "1.28", "ladder-7-err": "1.0e-3",
                       "ladder-gpu": "NVIDIA H200", "ladder/7/us_median": "388.00",
                       "peers-eager-us": "900.0", "grade-us": "385.1", "grade-xlimit": "1.031",
                       "grade-pass": "pass", "shapes-llama-3-70b-128-us": "380.0",
                       "shapes/llama-3.2-1b-4096/hd": "64"}.items():
        assert r"\definemeasured{%s}{%s}" % (key, value) in made
    table = [line for line in made if line.startswith(r"\definemeasured{shapes-table}{\begin{tabular}")]
    assert len(table) == 1
    assert r"llama-3.2-1b & 4096 & 2048 & 8192 & 32/8 $\times$ 64 & 1728 & 35.0 & " in table[0]
    assert not [line for line in made if "ladder-7-graph" in line or "grade-read" in line]


def test_what_is_computed_from_the_shapes(tmp_path):
    """Worked out by hand: at 4.6 TB/s the limits are 100 and 150 us."""
    rows = [shape_row("a-1b", keys, us, d=2048) for keys, us in ((4096, 125.0), (8192, 180.0))]
    for made, us in zip(rows, (100, 150)):
        made["bytes"], made["x_read_limit"] = us * 4_600_000, made["us_median"] / us
    (tmp_path / "shapes.csv").write_text(tables.text_of(tables.SHAPES, HEADER, rows), encoding="utf-8")
    (tmp_path / "changes-8.csv").write_text("key,change,us_before,us_after\none,x,3.5,2\ntwo,y,2,3.5\n")
    made = subprocess.run([sys.executable, str(tools.ROOT / "paper/numbers.py"), str(tmp_path)],
                          check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for key, value in {"shapes-a-1b-4096-limit": "100.0", "shapes-a-1b-4096-above": "25.0",
                       "shapes-a-1b-8192-above": "30.0", "shapes-a-1b-4096-mb": "460",
                       "shapes-a-1b-longer": "55.0", "shapes-a-1b-longer-limit": "50.0",
                       "shapes-a-1b-longer-times": "1.10", "changes-8-one-gain": "1.5",
                       "changes-8-two-gain": r"\ensuremath{-}1.5"}.items():
        assert r"\definemeasured{%s}{%s}" % (key, value) in made, key
    assert any("shapes-table" in line and "& 125.0 & " in line and " & 25.0 " in line for line in made)


def test_make_without_a_gpu_says_so():
    if tools.gpu_is_here():
        pytest.skip("there is a GPU")
    for target in ("ladder", "peers", "shapes", "queue"):
        status, output = tools.make(target)
        assert status == 2 and f"{target}: no NVIDIA GPU here" in output


@pytest.mark.parametrize("given, wanted", [("0123456789ab", "0123456789ab"), ("", "57a1e0000000"), (None, "57a1e0000000")])
def test_a_commit_that_is_given_is_that_of_all_tables(tmp_path, monkeypatch, given, wanted):
    """Whatever the git says that is found: what is copied may lie beside an older history."""
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\ncase $1 in status) ;; *) echo 57a1e0000000;; esac\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("COMMIT", raising=False)
    if given is not None:
        monkeypatch.setenv("COMMIT", given)
    assert reference.commit() == wanted
    assert f"# commit: {wanted}" in sanitize.provenance()
    status, output = tools.make("-n", "resources", "NVCC=none")
    told = re.search('--commit (".*?") ', output).group(1)
    assert status == 0 and tools.run(["bash", "-c", "echo " + told]) == (0, wanted + "\n")
    rest = (tools.ROOT / "Makefile").read_text().split("\ncommit = ")
    assert rest[1].count('"$(commit)"') == 2 and "COMMIT:-" not in rest[0] + rest[1].split("\n", 1)[1]


TWO = [int(tools.STAGES[0][5:]), 7]
SMALL = "reference.Shape(**reference.SMALL)"
PROGRAMS = {   # what is measured, the kind of table, how its rows begin
    "two stages": (f"measure_ladder({TWO}, {SMALL}, 1, 9)", "LADDER", [f"\n{n}," for n in TWO]),
    "a shape": (f"measure_shapes([('small', {SMALL})], 1, 9)", "SHAPES", ["\nsmall,2048,4096,16,2,128,512,7,"]),
}


def measured(name):
    call, kind, _ = PROGRAMS[name]
    return tools.run([sys.executable, "-c", "import measure, reference, tables\n"
                      "measure.bandwidths = lambda: (4.25, 4.6)\n"
                      f"h, r = measure.{call}\nprint(tables.text_of(tables.{kind}, h, r))\n"])


@pytest.fixture(scope="module")
def small_measurements(request):
    """At once: nobody looks at the times."""
    for number in TWO:
        tools.build(f"build/gpu/stage{number}/liblayer.so")
    with tools.started(measured, tools.chosen(request, "test_measuring_on_the_gpu", "name")) as result:
        yield result


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_measuring_on_the_gpu(small_measurements, name):
    status, output = small_measurements(name)
    assert status == 0, output
    assert "# gpu: " in output and all(row in output for row in PROGRAMS[name][2])
