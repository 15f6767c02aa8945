#!/usr/bin/env python3
"""Draws the figures from the tables under data/; needs Python and gnuplot, no GPU.

    draw.py [--data data] [--readme plots] [--paper build/paper]

Each figure has a script NAME.gp and is drawn twice from it: NAME.svg for the README, and
figure-NAME.tex with its figure-NAME.pdf for the document, whose font its text then has.
What gnuplot is given are columns that this file computes; a table that is wrong gives an
error that says where, and the old figure stays. A figure whose table is not there is left
out; exit status 1 when something is wrong, or nothing at all was measured.
"""
import argparse
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import tables

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent

# FLOP of a step at the contract's shape: two for each weight of the seven matrices, and
# four for each of 64 query heads' 128 columns and each key attended to (4112.5 in the mean).
FLOP = 2 * 855_638_016 + 4 * 64 * 128 * 4112.5
DATASHEETS = {"H200": (4.8, 989.0)}   # HBM in TB/s, dense bf16 in TFLOP/s, by what the name holds


class NothingThere(Exception):
    """The table of a figure was not measured yet."""


def plain(text):
    return text


def tex(text):
    """Text for LaTeX; gnuplot takes one of two backslashes away."""
    return re.sub(r"([&%$#_{}])", r"\\\\\1", text)


def quoted(text):
    return '"' + text.replace('"', "'") + '"'


def lines_of(rows):
    return "".join("\t".join(str(value) for value in row) + "\n" for row in rows)


def have(path):
    if not path.exists():
        raise NothingThere(f"{path.name} is not there")
    return path


# A figure is a function of (folder of data, how to escape text) that returns ({file name:
# content}, {gnuplot variable: number or text}).

def limits_of(rows):
    """us: the read limit and the copy floor, from the first row, which is in plain bf16."""
    first = rows[0]
    return (first["us_median"] / first["x_read_limit"],
            first["us_median"] / first["x_copy_floor"])


def ladder(data, escape):
    """y, us, p10, p90, tick label, label at the bar, 0 for a stage and 1 for a peer."""
    _, rows = tables.read_ladder(have(data / "ladder.csv"))
    bars = []
    for row in rows:
        bars.append((-len(bars), row["us_median"], row["us_p10"], row["us_p90"],
                     quoted(escape(f"{row['stage']:.0f}  {row['title']} ({row['launches']:.0f})")),
                     quoted(f"{row['x_read_limit']:.2f} ×"), 0))
    for row in peers_of_a_layer(data):
        count = "" if row["launches"] is None else f" ({row['launches']:.0f})"
        bars.append((-len(bars) - 0.6, row["us_median"], row["us_p10"], row["us_p90"],
                     quoted(escape(row["title"] + count)), quoted(f"{row['x_read_limit']:.2f} ×"),
                     1))
    limit, floor = limits_of(rows)
    return {"ladder.dat": lines_of(bars)}, dict(
        read_limit=limit, copy_floor=floor, lowest=bars[-1][0],
        longest=max(bar[3] for bar in bars))


def peers_of_a_layer(data):
    """The rows of peers.csv that stand for a whole layer and are no stage."""
    if not (data / "peers.csv").exists():
        return []
    _, rows = tables.read_peers(data / "peers.csv")
    return [row for row in rows if row["x_copy_floor"] is not None
            and row["x_read_limit"] is not None and not row["peer"].startswith("stage")]


def roofline(data, escape):
    """FLOP per byte, TFLOP/s, label (of the first and the last stage)."""
    header, rows = tables.read_ladder(have(data / "ladder.csv"))
    points = [(FLOP / row["bytes"], FLOP / row["us_median"] / 1e6,
               quoted(f"stage {row['stage']:.0f}" if row in (rows[0], rows[-1]) else ""))
              for row in rows]
    sheet = next((figures for name, figures in DATASHEETS.items()
                  if name in header.get("gpu", "")), (0, 0))
    return {"roofline.dat": lines_of(points)}, dict(
        read_tbs=rows[0]["read_tbs"], copy_tbs=rows[0]["copy_tbs"], sheet_tbs=sheet[0],
        sheet_tflops=sheet[1])


def waterfall(data, escape):
    """x, us above the read limit that are left in a CUDA graph, all us above it, those of
    the stage before, tick label, label at the bar. A stage that was not measured in a graph
    has no launch gaps to show."""
    _, rows = tables.read_ladder(have(data / "ladder.csv"))
    bars, before = [], None
    for x, row in enumerate(rows):
        above = row["us_median"] - row["us_median"] / row["x_read_limit"]
        graph = row["us_graph_median"]
        gaps = 0 if graph is None else max(0.0, row["us_median"] - graph)
        gaps = min(gaps, max(above, 0.0))
        bars.append((x, above - gaps, above, above if before is None else before,
                     quoted(f"{row['stage']:.0f}"), quoted(f"{above:.0f}")))
        before = above
    return {"waterfall.dat": lines_of(bars)}, dict(
        count=len(bars), highest=max(bar[2] for bar in bars))


def timeline(data, escape):
    """A row a block and phase: sm, start and end in us, colour; and for the name of each phase
    its middle in us, the name, its colour, and which of three lines it goes on, the same in both panels: attention and merge are brief."""
    files, variables, colours = {}, dict(panels=0, longest=1.0), {}
    lines = {quoted(name): line for name, line in (("attention", 1), ("merge", 2))}   # the others: 0
    for stage in (6, 7):
        path = data / f"timeline-{stage}.csv"
        if not path.exists():
            continue
        _, rows = tables.read_timeline(path)
        phases = {}
        for row in rows:
            phases.setdefault(row["phase"], []).append(row)
            colours.setdefault(row["phase"], len(colours))
        names = sorted((sum(r["start_us"] + r["end_us"] for r in mine) / 2 / len(mine),
                        quoted(escape(name)), colours[name]) for name, mine in phases.items())
        names = [(*name, lines.get(name[1], 0)) for name in names]
        panel = variables["panels"] = variables["panels"] + 1
        files[f"panel{panel}.dat"] = "".join(
            f"{row['sm']:.0f} {row['start_us']} {row['end_us']} {colours[row['phase']]}\n"
            for row in rows)
        files[f"panel{panel}-names.dat"] = lines_of(names)
        variables.update({f"title{panel}": f"stage {stage}, block",
                          f"sms{panel}": 1 + max(row["sm"] for row in rows)})
        variables["longest"] = max([variables["longest"]] + [row["end_us"] for row in rows])
    if not files:
        raise NothingThere("timeline-6.csv and timeline-7.csv are not there")
    return files, variables


def exponents(data, escape):
    """place, the share of each kind of weights that was counted."""
    path = have(data / "exponents.csv")
    _, rows = tables.read(path, ("place",), needed=("place",))
    kinds = [column for column in rows[0] if column != "place"]
    shown = {"heavy": "heavy-tailed", "network": "trained"}   # as the tables of the text name them
    shares = [[tables.number(row[kind], f"{path}, place {row['place']:.0f}, {kind}") for kind in kinds]
              for row in rows]
    return {"exponents.dat": lines_of([(f"{row['place']:.0f}", *("NaN" if share is None else share for share in mine))
                                       for row, mine in zip(rows, shares)])}, \
        dict(kinds=len(kinds), names=" ".join(shown.get(kind, kind) for kind in kinds))


def shapes(data, escape):
    """MB a step, us, label (of every layer that is not close to the one before), 1 for a cache that
    is not of 4096 keys; and what a step of 4096 keys takes above the read limit, by the median."""
    _, rows = tables.read_shapes(have(data / "shapes.csv"))
    rows = sorted(rows, key=lambda row: row["bytes"])
    points, above, last = [], [], -1.0
    for row in rows:
        mb, usual = row["bytes"] / 1e6, row["keys"] == 4096
        label = row["shape"] if usual else f"{row['keys']:.0f} keys" if row["keys"] > 4096 else ""
        apart = mb - last > 100
        points.append((mb, row["us_median"], quoted(escape(label if apart else "")), int(not usual)))
        last = mb if apart and label else last
        if usual:
            above.append(tables.above_limit(row))
    if not above:
        raise NothingThere("shapes.csv has no layer with 4096 keys")
    return {"shapes.dat": lines_of(points)}, dict(
        read_tbs=rows[0]["read_tbs"], above=statistics.median(above), most=points[-1][0])


FIGURES = dict(ladder=ladder, roofline=roofline, waterfall=waterfall, timeline=timeline,
               exponents=exponents, shapes=shapes)


def gnuplot(name, files, variables, paper, folder):
    """Runs NAME.gp in `folder`; returns the files it made there."""
    for file, content in files.items():
        (folder / file).write_text(content, encoding="utf-8")
    made = [f"figure-{name}.tex", f"figure-{name}.pdf"] if paper else [f"{name}.svg"]
    settings = dict(variables, paper=int(paper), output=made[0], here=str(HERE) + "/")
    text = "".join(f"{key} = '{value}'\n" if isinstance(value, str) else f"{key} = {value}\n"
                   for key, value in settings.items())
    (folder / "settings.gp").write_text(text, encoding="utf-8")
    done = subprocess.run(["gnuplot", "settings.gp", str(HERE / "common.gp"),
                           str(HERE / f"{name}.gp")], cwd=folder, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=dict(os.environ, LC_ALL="C.UTF-8"))
    empty = [file for file in made if not (folder / file).exists()
             or (folder / file).stat().st_size == 0]
    if done.returncode or done.stdout.strip() or empty:   # it is silent when all is well
        raise tables.BadTable(f"gnuplot on {name}.gp: {done.stdout.strip() or empty}")
    return [folder / file for file in made]


def draw(name, data, targets):
    """One figure; targets: [(for the paper?, folder)]. All of it is drawn, then moved."""
    with tempfile.TemporaryDirectory() as scratch:
        made = []
        for paper, target in targets:
            folder = pathlib.Path(scratch) / str(len(made))
            folder.mkdir()
            files, variables = FIGURES[name](data, tex if paper else plain)
            made += [(file, target) for file in gnuplot(name, files, variables, paper, folder)]
        for file, target in made:
            target.mkdir(parents=True, exist_ok=True)
            temporary = target / (file.name + ".new")
            shutil.copyfile(file, temporary)
            os.replace(temporary, target / file.name)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="draw.py", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "data")
    parser.add_argument("--readme", type=pathlib.Path, help="folder of the svg files")
    parser.add_argument("--paper", type=pathlib.Path, help="folder of the tex and pdf files")
    parser.add_argument("--if-any", action="store_true", help="nothing measured is no error")
    args = parser.parse_args(arguments)
    if not args.readme and not args.paper:
        args.readme, args.paper = HERE, ROOT / "build" / "paper"
    targets = [(paper, folder) for paper, folder in ((False, args.readme), (True, args.paper))
               if folder]
    drawn, wrong = [], False
    for name in FIGURES:
        try:
            draw(name, args.data, targets)
            drawn.append(name)
        except NothingThere as missing:
            print(f"plots: no {name}: {missing}")
        except tables.BadTable as error:
            print(f"plots: {name}: {error}; the old figure stays", file=sys.stderr)
            wrong = True
    print(f"plots: {', '.join(drawn) or 'nothing was measured yet'}")
    return int(wrong or not (drawn or args.if_any))


if __name__ == "__main__":
    sys.exit(main())
