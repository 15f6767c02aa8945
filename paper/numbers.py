"""Turns what was measured (data/*.csv, data/*.json) into TeX definitions on standard output.

A cell of a table becomes \\measured{FILE/ROW/COLUMN}: FILE is the name without its ending,
ROW the cell in the first column, and for a layer the number of keys as well (NAME-KEYS), for a
depth of the queue COPY-FLIGHT. A line `# KEY: VALUE` at the head of a file becomes
\\measured{FILE/KEY}. A number at any depth of a JSON file becomes \\measured{FILE/KEY/KEY...}.
Empty cells, and files that are not there, define nothing.

Of a layer in data/shapes.csv, \\measured{shapes-NAME-KEYS-us}, also -limit, its bytes at the read
limit, -above, us above that, and -mb; shapes-NAME-longer, us that the longest cache takes more
than 4096 keys, -limit, those of its bytes, and -times. packed-bits: bits of a weight as stage 8
reads it.

What the text says most often has a short name and is rounded as it is printed. Of a stage:
\\measured{ladder-N-us}, and likewise launches, xfloor, xlimit, graph, err and the others of
SHORT; of a peer: \\measured{peers-eager-us} (spaces in its name become hyphens); where they
were measured: ladder-gpu, ladder-provenance. Of data/grade.json: grade-us and the others of
GRADE; of stage 8's, data/grade-8.json: grade-8-us. The whole of data/shapes.csv, as a table:
shapes-table. What is computed from measured numbers: ladder-N-saved, from the stage before to
N, ladder-N-times, how many times as fast, and ladder-N-dropped, launches; ladder-N-gaps, what
a graph takes off;
ladder-N-limit, us of its own bytes at the read limit, and ladder-N-above, what is above that;
ladder-noise-stage, the one that was also measured twice by itself, ladder-noise-first and
-second, those medians, -turns, that of its turns with the others, and ladder-apart-us, how far
apart the three are; ladder-limit-us and ladder-floor-us; account-N-..., where the time of one
step went; model-..., what a whole model would take under the assumptions of define_model. Of a
row of data/changes-N.csv: changes-N-ROW-before, -after, -gain or -loss, in us, -xlimit, times the read
limit of its run; of data/streams.csv: streams-ROW-less, per cent of the rate of another row; of
data/waits-N.csv: waits-N-ROW-us, what a phase waits for its vector, and waits-N-FORM-us, what of them do; of data/timeline-N.csv: timeline-N-fast, how many blocks end gate and up long before
the others, -early, how many so end down, and -fast-gate, -slow-gate, -fast-down, -slow-down, when
they and the others end it, us; of data/stamps-N.csv: stamps-N-ROW-FORM-link, us since the row before; of
data/queue.csv, with KB of a copy and KB in flight: queue-COPY-FLIGHT-tbs, -best, share of the best
bandwidth, -less, per cent below it, -median, -p90 and -p99 of a load, ns; queue-table, all of it, and
queue-provenance; of data/check-gpu.txt: check-gpu-passed, -failed, -skipped, -cores, and -quickest-PART and -slowest-PART, the
host time of a step and of its parts on two of the cores, us. And from the
shape alone, with nothing measured, \\shape{qkv} and the like: bytes.
"""
import csv
import json
import pathlib
import re
import sys

import diagrams

ESCAPES = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
           "^": r"\textasciicircum{}", "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_"}


def define(key, value):
    text = "".join(ESCAPES.get(c, c) for c in str(value).strip())
    text = re.sub(r"(?<=\d) us\b", r"~\\textmu s", text)
    text = text.replace("--", "-{}-")
    text = re.sub(r"(?<=\d) x (?=\d)", r"\\,\\texttimes\\,", text)
    if text:
        print(r"\definemeasured{%s}{%s}" % (key, text))


def split(path):
    """({key: value} of the lines at the head, [{column: text}])."""
    with open(path, newline="", encoding="utf-8") as f:
        lines = f.read().splitlines(keepends=True)
    heads = [line[1:].split(":", 1) for line in lines if line.startswith("#") and ":" in line]
    return ({key.strip(): value.strip() for key, value in heads},
            list(csv.DictReader(line for line in lines if not line.startswith("#"))))


def name_of(row):
    """What a row is called: its first cell, and the length of a layer's cache or the KB in flight."""
    first = next(iter(row.values()))
    if "in_flight_kb" in row:
        return f"{first}-{row['in_flight_kb']}"
    return f"{first}-{row['keys']}" if "shape" in row else first


def from_table(path):
    name = path.stem
    header, rows = split(path)
    for key, value in header.items():
        define(f"{name}/{key}", value)
    for row in rows:
        if None in row or None in row.values():
            sys.exit(f"numbers.py: {path}: a row with more or fewer fields than the heading: "
                     f"{list(row.values())}")
        first = name_of(row)
        if number_of(row, "us_before") and number_of(row, "us_after"):
            gain = round(number_of(row, "us_before") - number_of(row, "us_after"), 3) + 0.0
            define_tex(f"{name}-{first}-gain", signed(gain))
        for column, value in row.items():
            if column and value and column.startswith("bytes"):
                define_tex(f"{name}/{first}/{column}", f"{int(value):,}".replace(",", r"\,"))
            elif column and value:
                define(f"{name}/{first}/{column}", value)


# The short name, the column or the place in the tree, and how it is printed.
SHORT = {"us": ("us_median", "%.1f"), "p10": ("us_p10", "%.1f"), "p90": ("us_p90", "%.1f"),
         "graph": ("us_graph_median", "%.1f"), "launches": ("launches", "%.0f"),
         "tokens": ("tokens_per_s", "%.0f"), "xfloor": ("x_copy_floor", "%.2f"),
         "xlimit": ("x_read_limit", "%.2f"), "copy": ("copy_tbs", "%.2f"),
         "read": ("read_tbs", "%.2f"), "err": ("rel_err", "%.1e")}
GRADE = {"us": ("measured/us_median", "%.1f"), "rotation": ("measured/us_rotation_median", "%.1f"),
         "host": ("measured/host_us_median", "%.1f"), "share": ("measured/dominant_share", "%.4f"),
         "launches": ("measured/launches_per_step", "%.0f"),
         "tokens": ("derived/tokens_per_s_us_rotation", "%.0f"),
         "xfloor": ("derived/x_copy_us_rotation", "%.3f"),
         "xlimit": ("derived/x_read_us_rotation", "%.3f"),
         "copy": ("measured/copy_tbs", "%.2f"), "read": ("measured/read_tbs", "%.2f")}

GRADED = {"grade": "stage7", "grade-8": "stage8"}   # which submission each file must be of


def rounded(key, text, form):
    """A number as one reads it; an empty cell defines nothing."""
    if text not in ("", None):
        define(key, (form % float(text)).replace("e-0", "e-"))


def readable(path):
    """The short keys of a table in the columns of the ladder."""
    header, rows = split(path)
    name = path.stem
    for row in rows:
        first = "-".join(name_of(row).replace("+", " ").split())
        for short, (column, form) in SHORT.items():
            rounded(f"{name}-{first}-{short}", row.get(column), form)
        if "shape" in row:
            above = above_limit(row)
            rounded(f"{name}-{first}-above", above, "%.1f")
            rounded(f"{name}-{first}-limit", above and number_of(row, "us_median") - above, "%.1f")
            rounded(f"{name}-{first}-mb", float(row["bytes"]) / 1e6, "%.0f")
    provenance_of(name, header)


def provenance_of(name, header):
    """Where and when a table was measured, in a line."""
    define(f"{name}-gpu", header.get("gpu", ""))
    known = [header.get("gpu")] + [f"{word} {header[key]}" for key, word in (
        ("driver", "driver"), ("cuda", "CUDA"), ("commit", "commit")) if key in header]
    known.append(header.get("date", "")[:10])
    define(f"{name}-provenance", ", ".join(part.replace("commit working tree", "a working tree")
                                           for part in known if part))


ABOVE = "above"   # no column of the file: microseconds above the read limit
LAYERS = (("layer", "l", "shape", None), ("keys", "r", "keys", "%.0f"), ("$d$", "r", "d", "%.0f"),
          ("ffn", "r", "ffn", "%.0f"), ("heads", "r", None, None), ("MB", "r", "bytes", None),
          (r"\textmu s", "r", "us_median", "%.1f"), (r"$\times$ copy", "r", "x_copy_floor", "%.2f"),
          (r"$\times$ read", "r", "x_read_limit", "%.3f"), ("above", "r", ABOVE, "%.1f"))


def above_limit(row):
    """Microseconds above the read limit of the row's own bytes, or None."""
    us, times = number_of(row, "us_median"), number_of(row, "x_read_limit")
    return us * (1 - 1 / times) if us and times else None


def layer_table(path):
    """All of data/shapes.csv as a table in TeX: shapes-table."""
    def cell(row, column, form):
        if column is None:
            return f"{row['n_q']}/{row['n_kv']} $\\times$ {row['hd']}"
        if column == "bytes":
            return f"{float(row[column]) / 1e6:.0f}"
        if column == ABOVE:
            return "" if above_limit(row) is None else form % above_limit(row)
        return row[column] if form is None else form % float(row[column]) if row[column] else ""
    lines = [" & ".join(title for title, *_ in LAYERS) + r" \\ \midrule"]
    lines += [" & ".join(cell(row, column, form) for _, _, column, form in LAYERS) + r" \\"
              for row in split(path)[1]]
    print(r"\definemeasured{shapes-table}{\begin{tabular}{%s}\toprule %s \bottomrule\end{tabular}}"
          % ("".join(side for _, side, *_ in LAYERS), " ".join(lines)))


DEPTHS = (("copy, KB", "copy_kb", "%.0f"), ("in flight, KB", "in_flight_kb", "%.0f"), ("TB/s", "tbs", "%.2f"),
          ("of the best", "x_best", "%.3f"), ("median, ns", "load_median_ns", "%.0f"),
          ("p90", "load_p90_ns", "%.0f"), ("p99", "load_p99_ns", "%.0f"))
OF_A_DEPTH = {"us": ("us", "%.1f"), "tbs": ("tbs", "%.2f"), "best": ("x_best", "%.3f"),
              "median": ("load_median_ns", "%.0f"), "p90": ("load_p90_ns", "%.0f"), "p99": ("load_p99_ns", "%.0f")}


def from_queue(path):
    """The stream and the load beside it, for each depth, and all of it as a table in TeX: queue-table."""
    header, rows = split(path)
    provenance_of(path.stem, header)
    lines = [" & ".join(title for title, *_ in DEPTHS) + r" \\ \midrule"]
    for before, row in zip([None] + rows, rows):
        for short, (column, form) in OF_A_DEPTH.items():
            rounded(f"{path.stem}-{name_of(row)}-{short}", row[column], form)
        define(f"{path.stem}-{name_of(row)}-less", "%.1f" % (100 * (1 - float(row["x_best"]))))
        other = before and before["copy_kb"] != row["copy_kb"]
        lines.append(r"\addlinespace " * bool(other)
                     + " & ".join(form % float(row[column]) for _, column, form in DEPTHS) + r" \\")
    print(r"\definemeasured{queue-table}{\begin{tabular}{%s}\toprule %s \bottomrule\end{tabular}}"
          % ("r" * len(DEPTHS), " ".join(lines)))


def readable_grade(name, tree):
    submission = tree.get("submission", "") if isinstance(tree, dict) else ""
    if submission and GRADED[name] not in submission:   # the text means the submissions of this project
        return
    for short, (where, form) in GRADE.items():
        value = tree
        for key in where.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        rounded(f"{name}-{short}", value, form)
    if isinstance(tree, dict) and "pass" in tree:
        define(f"{name}-pass", "pass" if tree["pass"] else "fail")


# ---------------------------------------------------------------- computed from the measured
def signed(value, form="%.1f"):
    """With a minus sign as long as a plus."""
    return (r"\ensuremath{-}" if value < 0 else "") + form % abs(value)


def define_tex(key, text):
    print(r"\definemeasured{%s}{%s}" % (key, text))


def number_of(row, column):
    return float(row[column]) if row.get(column) else None


def twice_of(header):
    """[stage, us, us] of the stage that was also measured twice by itself, or []."""
    found = re.match(r"stage (\d+) twice: ([\d.]+) and ([\d.]+) us", header.get("noise", ""))
    return [found.group(1), float(found.group(2)), float(found.group(3))] if found else []


def from_ladder(path):
    """What each rung removed, and the two limits in us. Returns TB/s of reads, or None."""
    header, rows = split(path)
    twice = twice_of(header)
    if twice:
        turns = [float(row["us_median"]) for row in rows if row["stage"] == twice[0]]
        medians = twice[1:] + turns
        define("ladder-noise-stage", twice[0])
        for key, us in [("noise-first", twice[1]), ("noise-second", twice[2]),
                        ("apart-us", max(medians) - min(medians))] + [("noise-turns", us) for us in turns]:
            define(f"ladder-{key}", "%.1f" % us)
    if not rows:
        return None
    for before, row in zip(rows, rows[1:]):
        if number_of(before, "us_median") and number_of(row, "us_median"):
            define_tex(f"ladder-{row['stage']}-saved",
                       signed(number_of(before, "us_median") - number_of(row, "us_median")))
            define(f"ladder-{row['stage']}-times",
                   "%.2f" % (number_of(before, "us_median") / number_of(row, "us_median")))
        if number_of(before, "launches") and number_of(row, "launches"):
            define(f"ladder-{row['stage']}-dropped", "%.0f" % (number_of(before, "launches") - number_of(row, "launches")))
    first = rows[0]
    for key, column in (("limit", "x_read_limit"), ("floor", "x_copy_floor")):
        if number_of(first, column):
            define(f"ladder-{key}-us", "%.1f" % (number_of(first, "us_median") / number_of(first, column)))
    for row in rows:
        us, above, graph = (number_of(row, column) for column in ("us_median", "x_read_limit", "us_graph_median"))
        if above:
            define(f"ladder-{row['stage']}-limit", "%.1f" % (us / above))
            define(f"ladder-{row['stage']}-above", "%.1f" % above_limit(row))
        if graph:
            define_tex(f"ladder-{row['stage']}-gaps", signed(us - graph))
    return number_of(first, "read_tbs")


# The phases of a time line, and the bytes each of them reads (of diagrams.bytes_of).
PHASE_BYTES = {"QKV": "qkv", "attention": "cache", "merge": None, "O": "o",
               "gate and up": "gate_up", "down": "down"}


def packed_share(path):
    """Bytes that stage 8 reads of the weights, over those of the weights themselves."""
    moved = {row["stage"]: number_of(row, "bytes") for row in split(path)[1]}
    cache = diagrams.bytes_of()["cache"]
    return (moved["8"] - cache) / (moved["0"] - cache) if moved.get("0") and moved.get("8") else 1.0


def from_shapes(path):
    """How much longer more keys take than their bytes: shapes-NAME-longer, from 4096 keys to the most."""
    layers = {}
    for row in split(path)[1]:
        layers.setdefault(row["shape"], {})[int(row["keys"])] = row
    for name, lengths in layers.items():
        first, last = lengths.get(4096), lengths[max(lengths)]
        if first and last["bytes"] != first["bytes"] and number_of(last, "read_tbs"):
            more = number_of(last, "us_median") - number_of(first, "us_median")
            read = (number_of(last, "bytes") - number_of(first, "bytes")) / number_of(last, "read_tbs") / 1e6
            define(f"shapes-{name}-longer", "%.1f" % more)
            define(f"shapes-{name}-longer-limit", "%.1f" % read)
            define(f"shapes-{name}-longer-times", "%.2f" % (more / read))


def account(path, read_tbs, share=1.0):
    """Where the time of one step went, for the average block: at work on each phase, waiting
    before it, and from the block's end to the last block's. They add up to the step. `share`:
    bytes of packed weights over plain ones. Returns {what: us}, or None."""
    _, rows = split(path)
    blocks = {}
    for row in rows:
        blocks.setdefault(row["sm"], []).append(
            (float(row["start_us"]), float(row["end_us"]), row["phase"]))
    if not blocks or not read_tbs:
        return None
    total = max(end for mine in blocks.values() for _, end, _ in mine)
    spent = {"total": total, "tail": 0.0, "waits": 0.0}
    for mine in blocks.values():
        at = 0.0
        for start, end, phase in sorted(mine):
            for what, us in ((f"{phase} wait", start - at), (f"{phase} work", end - start)):
                spent[what] = spent.get(what, 0.0) + us / len(blocks)
            at = end
        spent["tail"] += (total - at) / len(blocks)
    read = {key: n if key == "cache" else n * share
            for key, n in diagrams.bytes_of(dict(diagrams.SHAPE, keys=4097)).items()}
    spent["limit"] = sum(read.values()) / read_tbs / 1e6
    for phase, key in PHASE_BYTES.items():
        if f"{phase} work" in spent:
            spent[f"{phase} limit"] = read[key] / read_tbs / 1e6 if key else 0.0
            spent[f"{phase} over"] = spent[f"{phase} work"] - spent[f"{phase} limit"]
            spent["waits"] += spent[f"{phase} wait"]
    spent["above"] = total - spent["limit"]
    spent["mlp"] = sum(spent.get(key, 0.0) for key in ("gate and up over", "down wait", "down over"))
    return spent


def define_account(stage, spent):
    for what, us in spent.items():
        define_tex("account-%s-%s" % (stage, what.replace("gate and up", "gateup").replace(" ", "-")),
                   signed(us))
    if spent["above"] > 0:
        define(f"account-{stage}-waitshare",
               "%.0f" % (100 * (spent["waits"] + spent["tail"]) / spent["above"]))


# A whole model, on paper. ALLREDUCE_US is assumed, not measured: what it takes several GPUs
# to add up one vector of d numbers; there are two of these a layer.
ALLREDUCE_US = 5.0
MODEL_LAYERS = (16, 80)
MODEL_GPUS = (1, 2, 4, 8)


def define_model(spent, read_tbs):
    """Under the assumptions of the chapter: a layer costs its bytes at the read limit, the
    waits and losses of stage 7's step, but its end only once for all layers."""
    read = diagrams.bytes_of()
    layer = sum(read.values()) / read_tbs / 1e6
    ends = spent["tail"] + spent["QKV wait"]
    boundary = spent["gate and up wait"]          # from x_1 to the next product: the same dependence
    rest = spent["above"] - ends + boundary
    define("model-allreduce", "%.0f" % ALLREDUCE_US)
    for key, us in (("layer", layer), ("ends", ends), ("boundary", boundary), ("rest", rest),
                    ("fused", layer + rest), ("alone", layer + spent["above"])):
        define(f"model-{key}", "%.1f" % us)
    for layers in MODEL_LAYERS:
        for gpus in MODEL_GPUS:
            us = layer / gpus + rest + (2 * ALLREDUCE_US if gpus > 1 else 0)
            define(f"model-{layers}-{gpus}-layer", "%.0f" % us)
            define(f"model-{layers}-{gpus}-ms", "%.1f" % ((layers * us + ends) / 1e3))
            define(f"model-{layers}-{gpus}-tokens", "%.0f" % (1e6 / (layers * us + ends)))
            define(f"model-{layers}-{gpus}-share", "%.0f" % (100 * layer / gpus / us))


def from_changes(path):
    """What a change made of a step, and how far that is above the read limit of its run."""
    for row in split(path)[1]:
        before, after, limit = (number_of(row, c) for c in ("us_before", "us_after", "limit_us"))
        rounded(f"{path.stem}-{row['key']}-before", before, "%.1f")
        rounded(f"{path.stem}-{row['key']}-after", after, "%.1f")
        if before and after and after > before:
            define(f"{path.stem}-{row['key']}-loss", "%.1f" % (after - before))
        if after and limit:
            define(f"{path.stem}-{row['key']}-xlimit", "%.3f" % (after / limit))


def from_streams(path):
    """How much less than the row it is against each shape draws."""
    rows = {row["key"]: row for row in split(path)[1]}
    for key, row in rows.items():
        if row["against"] in rows:
            rate, whole = number_of(row, "tbs"), number_of(rows[row["against"]], "tbs")
            define_tex(f"{path.stem}-{key}-less", signed(100 * (1 - rate / whole)))


def from_waits(path):
    """What a step waits for vectors. The first phase of a form finds its vector in place, and what
    it pays for looking is no wait; the cycles of all phases together are the step."""
    forms = {}
    for row in split(path)[1]:
        forms.setdefault(row["form"], []).append(row)
    for form, rows in forms.items():
        step, looking = number_of(rows[0], "step_us"), number_of(rows[0], "vector_cycles")
        cycles = sum(number_of(row, "chunks") * sum(number_of(row, f"{what}_cycles") for what in
                     ("full", "vector", "work")) for row in rows)
        waits = {row["key"]: step / cycles * number_of(row, "chunks")
                 * max(0.0, number_of(row, "vector_cycles") - looking) for row in rows}
        for key, us in list(waits.items()) + [(form, sum(waits.values()))]:
            define(f"{path.stem}-{key}-us", "%.1f" % us)


def from_shape():
    for key, n in diagrams.bytes_of().items():
        print(r"\defineshape{%s}{%s}" % (key, diagrams.size(n)))
    print(r"\defineshape{all}{%s}" % diagrams.size(sum(diagrams.bytes_of().values())))


def computed(folder):
    """All that follows from several tables."""
    from_shape()
    ladder = folder / "ladder.csv"
    read_tbs = from_ladder(ladder) if ladder.exists() else None
    if (folder / "shapes.csv").exists():
        from_shapes(folder / "shapes.csv")
    if read_tbs and packed_share(ladder) < 1:
        define("packed-bits", "%.2f" % (16 * packed_share(ladder)))
    for key, n in diagrams.bytes_of().items() if read_tbs else ():
        define(f"limit-{key}-us", "%.1f" % (n / read_tbs / 1e6))
    for stage in (6, 7, 8):
        path = folder / f"timeline-{stage}.csv"
        share = packed_share(ladder) if stage == 8 and read_tbs else 1.0
        spent = account(path, read_tbs, share) if path.exists() else None
        if spent:
            define_account(stage, spent)
        if spent and stage == 7 and {"gate and up wait", "QKV wait"} <= spent.keys():
            define_model(spent, read_tbs)


def from_tree(key, value):
    if isinstance(value, dict):
        for k, v in value.items():
            from_tree(f"{key}/{k}", v)
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        define(key, value)


def from_stamps(path):
    """How long after the moment before it each moment comes; the two builds have them in one order."""
    for form in ("args", "slices"):
        last = None
        for row in split(path)[1]:
            moment = number_of(row, f"{form}_us")
            if moment is None:
                continue
            if last is not None:
                define(f"{path.stem}-{row['key']}-{form}-link", "%.1f" % (moment - last))
            last = moment


def from_timeline(path):
    """The blocks that end gate and up long before the others, and when both kinds end it and down."""
    ends = {}
    for row in split(path)[1]:
        ends.setdefault(row["phase"], {})[row["sm"]] = float(row["end_us"])
    gate, down = ends.get("gate and up", {}), ends.get("down", {})
    middle = sorted(gate.values())[len(gate) // 2] if gate else 0
    fast = {sm for sm, end in gate.items() if end < middle - 15}
    last = sorted(down.values())[len(down) // 2] if down else 0
    early = {sm for sm, end in down.items() if end < last - 15}
    define(f"{path.stem}-fast", len(fast))
    define(f"{path.stem}-early", len(early))
    for what, phase, quick in (("gate", gate, fast), ("down", down, early)):
        for kind, some in (("fast", quick), ("slow", phase.keys() - quick)):
            mine = [phase[sm] for sm in some if sm in phase]
            if mine:
                define(f"{path.stem}-{kind}-{what}", "%.0f" % (sum(mine) / len(mine)))


PARTS_OF_A_CALL = {"layer_step": "step", "of it the call of C": "call", "a new tensor": "tensor",
                   "by empty_like": "empty-like", "nothing": "nothing"}


def from_check_gpu(text):
    """How many tests of the last run on a GPU passed, and the host times that one of them noted."""
    for count, verdict in re.findall(r"(\d+) (passed|failed|skipped)", text.splitlines()[-1] if text else ""):
        define(f"check-gpu-{verdict}", count)
    for which, cores, parts in re.findall(r"note: host time in us, the (\w+) of (\d+) cores: (.*)", text):
        define("check-gpu-cores", cores)
        for name, us in re.findall(r"([^,]+?) (\d+\.\d+)", parts):
            define(f"check-gpu-{which}-{PARTS_OF_A_CALL[name.strip()]}", "%.1f" % float(us))


def main(folder):
    print("% Generated by paper/numbers.py from data/; do not edit.")
    for path in sorted(pathlib.Path(folder).glob("*.csv")):
        from_table(path)
        if path.stem in ("ladder", "peers", "shapes"):
            readable(path)
        if path.stem == "shapes":
            layer_table(path)
        if path.stem == "queue":
            from_queue(path)
        for start, read in (("changes-", from_changes), ("streams", from_streams), ("waits-", from_waits),
                            ("stamps-", from_stamps), ("timeline-", from_timeline)):
            if path.stem.startswith(start):
                read(path)
    checked = pathlib.Path(folder) / "check-gpu.txt"
    if checked.exists():
        from_check_gpu(checked.read_text(encoding="utf-8"))
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        from_tree(path.stem, tree)
        if path.stem in GRADED:
            readable_grade(path.stem, tree)
    computed(pathlib.Path(folder))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
