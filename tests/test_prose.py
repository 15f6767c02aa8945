"""The prose: a number that was measured comes from data/, and what it shows is what happens."""
import re
import shutil

import pytest

import test_cpu_target
import tools

WEB = (tools.ROOT / "layer.nw").read_text(encoding="utf-8")

NUMBER = r"(?<![\w{.])\d[\d.]*(?:\\,\d{3})*"
BETWEEN = r"(?:~|\\,|\s)*"
MEASURE = re.compile(
    rf"{NUMBER}{BETWEEN}(?:\\textmu{BETWEEN}s\b|[uµ]s\b|ms\b|microseconds?\b|TB/s|GB/s|tokens/s|tokens a second)"
    rf"|{NUMBER}{BETWEEN}times{BETWEEN}(?:the|its|that)\s+(?:copy\s+floor|read\s+limit|floor|limit)")
# What a sentence says of a number that nobody measured.
FORETOLD = re.compile(r"predict|expect|assum|no longer than", re.I)


def prose(web):
    """(section title, line number, sentence) of all that is neither code nor an example of it."""
    lines, code, verbatim = [], False, False
    for number, line in enumerate(web.splitlines(), 1):
        if re.match(r"<<.*>>=\s*$", line):
            code = True
        elif re.match(r"@(\s|$)", line):
            code, line = False, ""
        verbatim = (verbatim or r"\begin{verbatim}" in line) and r"\end{verbatim}" not in line
        lines.append("" if code or verbatim or line.startswith("%") else line)
    title, found, sentence, first = "", [], "", 1
    for number, line in enumerate(lines + [""], 1):
        heading = re.match(r"\\(?:chapter|section)\*?\{(.*)\}", line)
        title = heading.group(1) if heading else title
        if not line.strip() or heading or line.startswith(r"\item"):
            if sentence:
                found.append((title, first, sentence))
            sentence = ""
        for part in re.split(r"(?<=[.:?])\s+", line.strip()) if line.strip() and not heading else ():
            first = number if not sentence else first
            sentence += " " * bool(sentence) + part
            if re.search(r"[.:?]$", part):
                found.append((title, first, sentence))
                sentence = ""
    return found


def typed(web):
    """Measured numbers that somebody typed."""
    wrong = []
    for title, line, sentence in prose(web):
        if title == "The prediction" or FORETOLD.search(sentence):
            continue
        bare = re.sub(r"\\measured\{[^}]*\}", "M", sentence)
        wrong += [f"{line}: {found.group(0)!r} in: {sentence}" for found in MEASURE.finditer(bare)]
    return wrong


def test_no_measured_number_is_typed():
    wrong = typed(WEB)
    if wrong:
        pytest.fail("\n" + "\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("text", [
    "It takes 411.9~\\textmu s a step.", "It takes 412\\,\\textmu s.", "It draws\n4.3~TB/s.",
    "It is 1.11 times the\nread limit.", "It takes 380 microseconds.", "That is 2428 tokens/s.",
    "From \\measured{a} to 12~\\textmu s.", "\\item It takes 5~\\textmu s", "It took 28\\,672~\\textmu s.",
])
def test_a_typed_number_is_found(text):
    assert len(typed("@\n\\section{The measurement}\n" + text)) == 1


@pytest.mark.parametrize("text", [
    "It takes \\measured{a}~\\textmu s, \\measured{b} times the copy floor.",
    "We expected 380~\\textmu s.", "\\section{The prediction}\nIt takes 380~\\textmu s.",
    "@\n<<x>>=\n/* 380 us */\n@\n", "\\begin{verbatim}\n380 us\n\\end{verbatim}", "It takes 28\\,672 numbers.",
])
def test_what_is_allowed_is_not_found(text):
    assert typed("@\n\\section{The measurement}\n" + text) == []


def test_every_key_has_a_value():
    """Of the keys that the text asks for, those that data/ could have and has not."""
    status, made = tools.run(["python3", "paper/numbers.py", "data"])
    assert status == 0, made
    defined = set(re.findall(r"\\define(?:measured|shape)\{([^}]*)\}", made))
    asked = set(re.findall(r"\\(?:measured|ifmeasured|shape)\{([^}#]*)\}", WEB))
    assert len(asked) > 50
    assert sorted(asked - defined) == []


SHOWN = re.compile(r"\\begin\{verbatim\}\n\$ CPU_SEED=(\d+) selftest (\w+) (\d+)\n(.*?)\\end\{verbatim\}", re.S)


def plain(report):
    """A report without what differs from run to run."""
    lines = []
    for line in report.splitlines():
        line = re.sub(r" \(pid=\d+\)| at 0x[0-9a-f]+| \(tid=.*| \([\w.+-]*\+0x[0-9a-f]+\)$", "", line)
        lines.append(re.sub(r"\S*/(stages/cpu/)", r"\1", line))
    return lines


def test_the_report_that_is_shown_is_the_report():
    """The text shows some lines of what the program says, in their order."""
    seed, case, fault, shown = SHOWN.search(WEB).groups()
    ending, text = test_cpu_target.selftest("tsan", case, fault, seed=int(seed))
    assert ending == "race"
    said = iter(plain(text))
    missing = [line for line in shown.splitlines() if line not in said]   # `in` moves on
    assert missing == [], text
    for build in ("plain", "asan"):
        assert test_cpu_target.selftest(build, case, fault, seed=int(seed))[0] == "missed"


# ---------------------------------------------------------------- the PDF, where one was woven
PDF = tools.ROOT / "build" / "paper" / "layer.pdf"
needs_pdf = pytest.mark.skipif(not PDF.exists() or not shutil.which("pdftotext"),
                               reason="needs a woven document and poppler's tools")


def pages():
    status, text = tools.run(["pdftotext", "-layout", str(PDF), "-"])
    assert status == 0
    return text.split("\f")[:-1]


@needs_pdf
def test_the_pdf_says_what_it_is():
    status, text = tools.run(["pdfinfo", str(PDF)])
    told = dict(re.findall(r"^(\w[\w ]*):\s*(.*)$", text, re.M))
    assert told["Title"] == "One Layer, One Launch" and told["Author"] == "The layer.nw authors"
    assert re.search(r"layer\.nw SHA-256 [0-9a-f]{64}$", told["Keywords"])
    assert int(told["File size"].split()[0]) < 5_000_000
    assert "CreationDate" not in told and "ModDate" not in told


@needs_pdf
def test_all_fonts_are_embedded():
    status, text = tools.run(["pdffonts", str(PDF)])
    rows = [line.split() for line in text.splitlines()[2:] if line.strip()]
    assert len(rows) > 5
    assert [row[0] for row in rows if row[-5] != "yes" or row[-4] != "yes"] == []
    assert not any("Type 3" in line for line in text.splitlines())


def stranded(text):
    """Headings that end a page: what they head stands on the next one."""
    found = []
    for number, page in enumerate(text, 1):
        body = [line.strip() for line in page.splitlines() if line.strip()]
        if body and re.fullmatch(r"[ivxlcdm]+|\d+", body[-1]):
            body = body[:-1]
        if body and re.fullmatch(r"(?:\d+|[A-Z])\.\d+(?:\.\d+)?\s+[A-Z][^.]*", body[-1]):
            found.append(f"page {number}: {body[-1]}")
    return found


@needs_pdf
def test_no_heading_is_stranded():
    assert stranded(pages()) == []
    assert stranded(["Some text.\n\n5.2 The prediction\n\n   17\n"]) == ["page 1: 5.2 The prediction"]
