"""The tables under data/: their columns, reading them with suspicion, writing them whole.

A table is CSV (RFC 4180 quoting, lines end in a newline) under lines `# key: value` that
say where it was measured. An empty cell was not measured; NaN is an error. Needs nothing
but Python, so that figures can be drawn where nothing can be measured.
"""
import argparse
import csv
import io
import math
import os
import pathlib
import re
import sys
import tempfile

NUMBERS = ("launches", "us_median", "us_p10", "us_p90", "us_graph_median", "tokens_per_s",
           "bytes", "copy_tbs", "read_tbs", "x_copy_floor", "x_read_limit", "rel_err")
LADDER = ("stage", "title") + NUMBERS   # data/ladder.csv, one row a stage, in its order
PEERS = ("peer", "title") + NUMBERS     # data/peers.csv
SIZES = ("d", "ffn", "n_q", "n_kv", "hd", "keys")
SHAPES = ("shape",) + SIZES + LADDER    # data/shapes.csv, one row a layer and length
QUEUE = ("copy_kb", "slots", "in_flight_kb", "us", "tbs", "load_median_ns", "load_p90_ns",
         "load_p99_ns", "x_best")       # data/queue.csv, one row a depth of the stream
TIMELINE = ("sm", "phase", "start_us", "end_us")   # data/timeline-N.csv
FORMATS = dict(launches="{:.0f}", us_median="{:.2f}", us_p10="{:.2f}", us_p90="{:.2f}",
               us_graph_median="{:.2f}", tokens_per_s="{:.1f}", bytes="{:.0f}",
               copy_tbs="{:.4f}", read_tbs="{:.4f}", x_copy_floor="{:.4f}",
               x_read_limit="{:.4f}", rel_err="{:.3e}", us="{:.2f}", tbs="{:.4f}", x_best="{:.4f}",
               **{name: "{:.0f}" for name in SIZES + QUEUE[:3] + QUEUE[5:8]})
PROVENANCE = ("gpu", "driver", "cuda", "clocks", "commit", "date", "protocol")


class BadTable(Exception):
    """What is wrong with a file, and where."""


def cell(row, column):
    """The text of a cell; None is an empty one."""
    value = row.get(column)
    if value is None:
        return ""
    if column not in FORMATS:
        return str(value)
    if not math.isfinite(value):
        raise BadTable(f"{column} of {row.get('title', row)} is {value}")
    return FORMATS[column].format(value)


def text_of(columns, header, rows):
    """The text of a table; header: {key: value}, rows: [{column: value or None}]."""
    out = io.StringIO()
    for key, value in header.items():
        out.write(f"# {key}: {' '.join(str(value).split())}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([cell(row, column) for column in columns])
    return out.getvalue()


def write_whole(path, text):
    """Writes beside `path`, then renames: an interruption leaves the old file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def number(text, where):
    """A float, or None for an empty cell."""
    if text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadTable(f"{where}: '{text}' is not a number") from None
    if not math.isfinite(value):
        raise BadTable(f"{where} is {text}")
    return value


def read(path, columns, words=("title", "peer", "phase", "shape"), needed=()):
    """(header, rows) of a table: {key: value} and [{column: text, float or None}].

    `words` are the columns that hold text; `needed` may not be empty in any row.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise BadTable(f"{path} is not there")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header = dict(line[1:].strip().split(": ", 1) for line in lines
                  if line.startswith("#") and ": " in line)
    table = list(csv.reader(line for line in lines if not line.startswith("#")))
    if not table:
        raise BadTable(f"{path} is empty")
    missing = [column for column in columns if column not in table[0]]
    if missing:
        raise BadTable(f"{path} has no column {', '.join(missing)}")
    if len(table) == 1:
        raise BadTable(f"{path} has no rows")
    rows = []
    for count, cells in enumerate(table[1:], 1):
        if len(cells) != len(table[0]):
            raise BadTable(f"{path}, row {count}: {len(cells)} cells, not {len(table[0])}")
        row = dict(zip(table[0], cells))
        for column in columns:
            where = f"{path}, row {count}, {column}"
            if column not in words:
                row[column] = number(row[column], where)
            if column in needed and row[column] in (None, ""):
                raise BadTable(f"{where} is empty")
        rows.append(row)
    return header, rows


def read_ladder(path):
    return read(path, LADDER, needed=("stage", "title", "launches", "us_median", "us_p10",
                                      "us_p90", "bytes", "copy_tbs", "read_tbs"))


def read_peers(path):
    return read(path, PEERS, needed=("peer", "title", "us_median", "us_p10", "us_p90"))


def read_shapes(path):
    return read(path, SHAPES, needed=("shape", *SIZES, "title", "launches", "us_median",
                                      "us_p10", "us_p90", "bytes", "x_read_limit"))


def read_queue(path):
    return read(path, QUEUE, needed=QUEUE)


def read_timeline(path):
    return read(path, TIMELINE, needed=TIMELINE)


# ------------------------------------------------------------- the tables of the README

BEGIN, END = "<!-- generated: the ladder; make plots writes it -->", "<!-- end -->"
RESULT = "<!-- generated: the result; make plots writes it -->"


def shown(row, column, form):
    return "" if row[column] is None else form.format(row[column])


def place(header):
    """Where and when a table was measured, in a line."""
    known = [header.get("gpu", "an unknown GPU")]
    known += [f"{name} {header[key]}" for key, name in (("driver", "driver"), ("cuda", "CUDA"),
                                                        ("commit", "commit")) if key in header]
    known = [part.replace("commit working tree", "a working tree") for part in known]
    return ", ".join(known + [header.get("date", "")[:10]])


def above_limit(row):
    """Microseconds above the read limit of the row's own bytes."""
    return row["us_median"] * (1 - 1 / row["x_read_limit"])


def layer_markdown(header, rows):
    """The README's table of the layers that stage 7 was measured on."""
    columns = ["layer", "keys", "d", "ffn", "heads", "MB a step", "µs a layer (p10 to p90)",
               "× copy floor", "× read limit", "tokens/s", "error"]
    lines = [columns, ["---:" if i else "---" for i in range(len(columns))]]
    for row in rows:
        lines.append([
            row["shape"], *(f"{row[size]:.0f}" for size in ("keys", "d", "ffn")),
            "{n_q:.0f}/{n_kv:.0f} × {hd:.0f}".format(**row), f"{row['bytes'] / 1e6:.0f}",
            f"{row['us_median']:.1f} ({row['us_p10']:.1f} to {row['us_p90']:.1f})",
            shown(row, "x_copy_floor", "{:.2f}"), shown(row, "x_read_limit", "{:.3f}"),
            shown(row, "tokens_per_s", "{:.0f}"),
            shown(row, "rel_err", "{:.1e}").replace("e-0", "e-")])
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    above = [above_limit(row) for row in rows if row["keys"] == 4096]
    said = f"With 4096 keys {min(above):.0f} to {max(above):.0f} µs of a layer are above the read limit.\n\n" * bool(above)
    return f"Stage 7 on other layers:\n\n{text}\n\n{said}Measured on {place(header)}.\n"


def markdown(header, rows, first, heading, graph):
    """A table of the README; `graph`: whether there is a column for CUDA graphs."""
    columns = [heading, "", "launches", "µs a layer (p10 to p90)"]
    columns += ["in a CUDA graph"] * graph
    columns += ["× copy floor", "× read limit", "tokens/s", "error"]
    lines = [columns, ["---:" if i > 1 else "---" for i in range(len(columns))]]
    for row in rows:
        cells = [first(row), row["title"].replace("|", "\\|"), shown(row, "launches", "{:.0f}"),
                 f"{row['us_median']:.1f} ({row['us_p10']:.1f} to {row['us_p90']:.1f})"]
        cells += [shown(row, "us_graph_median", "{:.1f}")] * graph
        cells += [shown(row, "x_copy_floor", "{:.2f}"), shown(row, "x_read_limit", "{:.2f}"),
                  shown(row, "tokens_per_s", "{:.0f}"),
                  shown(row, "rel_err", "{:.1e}").replace("e-0", "e-")]
        lines.append(cells)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    note = re.sub(r"(?<=\d) us\b", " µs", header.get("note", ""))
    return f"{text}\n\nMeasured on {place(header)}.\n" + (f"Note: {note}.\n" if note else "")


def readme_block(data, figures):
    """What stands between the markers of README.md, for these folders."""
    parts = []
    if (data / "ladder.csv").exists():
        header, rows = read_ladder(data / "ladder.csv")
        parts.append(markdown(header, rows, lambda row: f"{row['stage']:.0f}", "stage", True))
    if (data / "peers.csv").exists():
        header, rows = read_peers(data / "peers.csv")
        parts.append(markdown(header, rows, lambda row: row["peer"], "beside it", False))
    if (data / "shapes.csv").exists():
        parts.append(layer_markdown(*read_shapes(data / "shapes.csv")))
    return "\n".join(parts) or "The ladder is not measured yet.\n"


def result_block(data, figures):
    """The result in a sentence, that of a stage that reads fewer bytes in another, and the figure."""
    parts = []
    if (data / "ladder.csv").exists():
        header, rows = read_ladder(data / "ladder.csv")
        first, once = rows[0], [row for row in rows if row["launches"] == 1]
        plain = [row for row in once if row["bytes"] == first["bytes"]][-1:]
        fewer = [row for row in once[-1:] if row["bytes"] and first["bytes"] and row["bytes"] < first["bytes"]]
        said = []
        for row in plain + fewer:
            times = [f"{shown(row, column, '{:.2f}')} × the {name}" + whose * (row in fewer) for column, name, whose in
                     (("x_copy_floor", "copy floor", " of all bytes"), ("x_read_limit", "read limit", " of its own"))
                     if row[column]]
            times += [f"{first['us_median'] / row['us_median']:.2f} times as fast as stage {first['stage']:.0f}"]
            if row in fewer:
                times.insert(0, f"from {100 * row['bytes'] / first['bytes']:.0f} % of the bytes")
            said.append(f"**Stage {row['stage']:.0f}, {row['title']}: {row['us_median']:.1f} µs a layer**, "
                        + ", ".join(times) + ".")
        if said:
            parts.append(" ".join(said) + f" Measured on {place(header)}."
                         + " The code has changed since; see the note under the table." * ("note" in header) + "\n")
    if (figures / "ladder.svg").exists():
        parts.append("![The ladder: microseconds a layer for each stage](plots/ladder.svg)\n")
    return "\n".join(parts) or "Nothing is measured yet.\n"


def with_block(readme, block, marker=BEGIN):
    """The text of a README with the block between its markers."""
    before, begin, rest = readme.partition(marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadTable(f"the README lacks a line {marker} and after it a line {END}")
    return f"{before}{marker}\n{block}{END}{after}"


def main(path):
    path, root = pathlib.Path(path), pathlib.Path(path).resolve().parent
    try:
        old = path.read_text(encoding="utf-8")
        new = with_block(old, readme_block(root / "data", root / "plots"))
        if RESULT in new:
            new = with_block(new, result_block(root / "data", root / "plots"), RESULT)
    except BadTable as error:
        print(f"plots: {error}; {path.name} stays as it is", file=sys.stderr)
        return 1
    if new != old:
        write_whole(path, new)
        print(f"plots: {path.name} has a new table")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tables.py", description="Puts what was measured into a README.")
    parser.add_argument("readme", type=pathlib.Path, help="beside it data/ and plots/")
    sys.exit(main(parser.parse_args().readme))
