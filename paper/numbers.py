"""Turns what was measured (data/*.csv, data/*.json) into TeX definitions on standard output.

A cell of a table becomes \\measured{FILE/ROW/COLUMN}: FILE is the name without its ending,
ROW the cell in the first column, and for a layer the number of keys as well (NAME-KEYS). A line `# KEY: VALUE` at the head of a file becomes
\\measured{FILE/KEY}. A number at any depth of a JSON file becomes \\measured{FILE/KEY/KEY...}.
Empty cells, and files that are not there, define nothing.

What the text says most often has a short name and is rounded as it is printed. Of a stage:
\\measured{ladder-N-us}, and likewise launches, xfloor, xlimit, graph, err and the others of
SHORT; of a peer: \\measured{peers-eager-us} (spaces in its name become hyphens); where they
were measured: ladder-gpu, ladder-provenance. Of data/grade.json: grade-us and the others of
GRADE. The whole of data/shapes.csv, as a table: shapes-table.
"""
import csv
import json
import pathlib
import sys

ESCAPES = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
           "^": r"\textasciicircum{}", "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_"}


def define(key, value):
    text = "".join(ESCAPES.get(c, c) for c in str(value).strip())
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
    """What a row is called: its first cell, and the length of a layer's cache."""
    first = next(iter(row.values()))
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
        for column, value in row.items():
            if column and value:
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
    define(f"{name}-gpu", header.get("gpu", ""))
    known = [header.get("gpu")] + [f"{word} {header[key]}" for key, word in (
        ("driver", "driver"), ("cuda", "CUDA"), ("commit", "commit")) if key in header]
    known.append(header.get("date", "")[:10])
    define(f"{name}-provenance", ", ".join(part for part in known if part))


LAYERS = (("layer", "l", "shape", None), ("keys", "r", "keys", "%.0f"), ("$d$", "r", "d", "%.0f"),
          ("ffn", "r", "ffn", "%.0f"), ("heads", "r", None, None), ("MB", "r", "bytes", None),
          (r"\textmu s", "r", "us_median", "%.1f"), (r"$\times$ copy", "r", "x_copy_floor", "%.2f"),
          (r"$\times$ read", "r", "x_read_limit", "%.3f"))


def layer_table(path):
    """All of data/shapes.csv as a table in TeX: shapes-table."""
    def cell(row, column, form):
        if column is None:
            return f"{row['n_q']}/{row['n_kv']} $\\times$ {row['hd']}"
        if column == "bytes":
            return f"{float(row[column]) / 1e6:.0f}"
        return row[column] if form is None else form % float(row[column]) if row[column] else ""
    lines = [" & ".join(title for title, *_ in LAYERS) + r" \\ \midrule"]
    lines += [" & ".join(cell(row, column, form) for _, _, column, form in LAYERS) + r" \\"
              for row in split(path)[1]]
    print(r"\definemeasured{shapes-table}{\begin{tabular}{%s}\toprule %s \bottomrule\end{tabular}}"
          % ("".join(side for _, side, *_ in LAYERS), " ".join(lines)))


def readable_grade(tree):
    submission = tree.get("submission", "") if isinstance(tree, dict) else ""
    if submission and "stage7" not in submission:   # the text means the graded default
        return
    for short, (where, form) in GRADE.items():
        value = tree
        for key in where.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        rounded(f"grade-{short}", value, form)
    if isinstance(tree, dict) and "pass" in tree:
        define("grade-pass", "pass" if tree["pass"] else "fail")


def from_tree(key, value):
    if isinstance(value, dict):
        for k, v in value.items():
            from_tree(f"{key}/{k}", v)
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        define(key, value)


def main(folder):
    print("% Generated by paper/numbers.py from data/; do not edit.")
    for path in sorted(pathlib.Path(folder).glob("*.csv")):
        from_table(path)
        if path.stem in ("ladder", "peers", "shapes"):
            readable(path)
        if path.stem == "shapes":
            layer_table(path)
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        from_tree(path.stem, tree)
        if path.stem == "grade":
            readable_grade(tree)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
