"""The document: measured numbers come from data/, what it shows is what happens, its PDF is whole."""
import csv
import json
import re
import shutil
import sys

import pytest

import test_cpu_target
import tools

sys.path.insert(0, str(tools.ROOT / "paper"))
import diagrams  # noqa: E402

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


def keys_without_a_value(asked, defined):
    """Those that are misspelled: what was not measured yet has no file, or no stage in the ladder."""
    wrong = []
    for key in sorted(set(asked) - defined):
        stage = re.match(r"(?:ladder|traffic|account)[-/](\d+)[-/]", key)
        if stage and f"ladder-{stage.group(1)}-us" not in defined:
            continue
        name = re.match(r"[^/]*(?=/)|(?:shapes|queue)(?=-)", key)
        if name and not list((tools.ROOT / "data").glob(name.group(0) + ".*")):
            continue
        wrong.append(key)
    return wrong


def test_every_key_has_a_value():
    status, made = tools.run(["python3", "paper/numbers.py", "data"])
    assert status == 0, made
    defined = set(re.findall(r"\\define(?:measured|shape)\{([^}]*)\}", made))
    asked = set(re.findall(r"\\(?:measured|shape)\{([^}#]*)\}", WEB))
    assert len(asked) > 50 and keys_without_a_value(asked, defined) == []
    assert keys_without_a_value({"ladder-7-uss", "ladder-99-us", "nothing/x/us"}, defined) == ["ladder-7-uss"]


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


# ---------------------------------------------------------------- what is computed and drawn
def numbers_of(folder):
    status, made = tools.run([sys.executable, str(tools.ROOT / "paper/numbers.py"), str(folder)])
    assert status == 0, made
    made = re.findall(r"\\definemeasured\{([^}]*)\}\{(.*)\}$", made, re.M)
    return {key: value.replace(r"\ensuremath{-}", "-") for key, value in made}


def test_the_account_of_a_step_adds_up(tmp_path):
    """Two blocks; the second has no attention. Worked out by hand."""
    (tmp_path / "ladder.csv").write_text(
        "stage,us_median,x_read_limit,x_copy_floor,read_tbs\n"
        "6,500,1.25,1.2,4.32\n7,440,1.1,1.05,4.32\n", encoding="utf-8")
    (tmp_path / "timeline-7.csv").write_text(
        "sm,phase,start_us,end_us\n0,QKV,1,41\n0,attention,43,49\n0,O,59,90\n0,gate and up,94,300\n"
        "0,down,302,400\n1,QKV,3,39\n1,O,59,91\n1,gate and up,95,310\n1,down,314,420\n", encoding="utf-8")
    made = numbers_of(tmp_path)
    assert made["ladder-7-saved"] == "60.0" and made["ladder-7-above"] == "40.0"
    for key, value in {"total": "420.0", "tail": "10.0", "QKV-wait": "2.0", "QKV-work": "38.0",
                       "attention-work": "3.0", "attention-wait": "1.0", "O-wait": "15.0",
                       "limit": "400.0", "above": "20.0"}.items():
        assert made[f"account-7-{key}"] == value, key
    parts = sum(float(value) for key, value in made.items()
                if re.fullmatch(r"account-7-(?:.*-wait|.*-work|tail)", key))
    assert parts == pytest.approx(420, abs=0.3)
    assert float(made["model-rest"]) == pytest.approx(20 - 10 - 2 + 4, abs=0.11)
    assert float(made["model-16-1-ms"]) == pytest.approx((16 * (400 + 12) + 12) / 1000, abs=0.06)
    assert float(made["model-16-4-layer"]) == pytest.approx(100 + 12 + 10, abs=0.6)


def test_what_is_computed_from_the_ladder(tmp_path):
    (tmp_path / "ladder.csv").write_text(
        "# noise: stage 8 twice: 303.5 and 302.25 us\n# protocol: as 64 x 64 --quick\n"
        "stage,launches,us_median,us_graph_median,bytes,x_read_limit,x_copy_floor,read_tbs\n"
        "0,43,1000,930,1728153600,2.5,2.0,4.32\n1,17,800,801.5,1728153600,2.0,1.6,4.32\n"
        "8,1,300,,1303808000,1.25,0.6,4.32\n", encoding="utf-8")
    (tmp_path / "timeline-8.csv").write_text(
        "sm,phase,start_us,end_us\n0,gate and up,10,200\n0,down,202,300\n", encoding="utf-8")
    (tmp_path / "grade-8.json").write_text(
        '{"submission": "stages/stage8/submission.py", "measured": {"us_median": 301.25}, "pass": true}', encoding="utf-8")
    (tmp_path / "grade.json").write_text(
        '{"submission": "stages/stage8/submission.py", "measured": {"us_median": 301.25}, "pass": true}', encoding="utf-8")
    made = numbers_of(tmp_path)
    for key, value in {"ladder-noise-stage": "8", "ladder-noise-first": "303.5", "ladder-noise-turns": "300.0",
                       "ladder-apart-us": "3.5", "ladder-1-saved": "200.0", "ladder-1-times": "1.25",
                       "ladder-1-dropped": "26", "ladder-0-gaps": "70.0", "ladder-1-gaps": "-1.5",
                       "ladder-8-limit": "240.0", "ladder-8-above": "60.0", "ladder-limit-us": "400.0",
                       "ladder/protocol": r"as 64\,\texttimes\,64 -{}-quick",
                       "account-8-gateup-wait": "10.0", "account-8-gateup-work": "190.0",
                       "grade-8-us": "301.2", "grade-8-pass": "pass"}.items():
        assert made[key] == value, key
    cache = diagrams.bytes_of()["cache"]
    share = (1303808000 - cache) / (1728153600 - cache)     # stage 8's limit is that of the bytes it reads
    assert float(made["account-8-gateup-limit"]) == pytest.approx(4 * 8192 * 28672 * share / 4.32e6, abs=0.06)
    assert "ladder-8-gaps" not in made and "grade-us" not in made    # another submission's


def test_what_changes_gave_and_waits_took(tmp_path):
    """Worked out by hand. Of the second form the first phase alone waits, and that is no wait."""
    (tmp_path / "changes-7.csv").write_text(
        "key,change,predicted_us,us_before,us_after,kernel_kib,limit_us\n"
        "words,w,9,413.40,410.15,,400\nworse,w,3 to 6,400,401.3,,\nalone,a,,,420.06,,350\n", encoding="utf-8")
    (tmp_path / "stamps-7.csv").write_text(
        "key,moment,args_us,slices_us\na,first,10,20\nb,second,12.5,\nc,third,13,21.26\n", encoding="utf-8")
    (tmp_path / "streams.csv").write_text(
        "key,what,us,tbs,against\nrows,r,200,4.6,\nhalves,h,210,4.37,rows\n", encoding="utf-8")
    (tmp_path / "waits-7.csv").write_text(
        "key,form,chunks,full_cycles,vector_cycles,work_cycles,step_us\n"
        "QKV,slim,2,300,100,600,400\nO,slim,4,200,600,700,400\ndown,slim,1,0,1100,900,400\n"
        "first,halves,1,10,20,70,100\nsecond,halves,1,70,10,20,100\n", encoding="utf-8")
    made = numbers_of(tmp_path)
    for key, value in {"stamps-7-b-args-link": "2.5", "stamps-7-c-args-link": "0.5", "stamps-7-c-slices-link": "1.3",
                       "changes-7-words-gain": "3.2", "changes-7-words-before": "413.4", "changes-7-worse-gain": "-1.3",
                       "changes-7-words-xlimit": "1.025", "changes-7-alone-after": "420.1",
                       "changes-7-alone-xlimit": "1.200", "changes-7/worse/predicted_us": "3 to 6",
                       "streams-halves-less": "5.0", "waits-7-QKV-us": "0.0", "waits-7-O-us": "80.0",
                       "waits-7-down-us": "40.0", "waits-7-slim-us": "120.0", "waits-7-second-us": "0.0",
                       "waits-7-halves-us": "0.0"}.items():
        assert made[key] == value, key
    assert not {"changes-7-alone-gain", "changes-7-worse-xlimit", "streams-rows-less"} & set(made)


def test_what_the_queue_costs(tmp_path):
    """The rows are told apart by both of their sizes."""
    (tmp_path / "queue.csv").write_text(
        "# gpu: A card\n# commit: abc\n# date: 2026-01-02T03:04:05Z\n"
        "copy_kb,slots,in_flight_kb,us,tbs,load_median_ns,load_p90_ns,load_p99_ns,x_best\n"
        "16,12,192,374.02,4.6205,1890,3760,5340,1.0000\n16,12,64,376.65,4.5883,450,880,1250,0.9930\n"
        "4,48,48,425.00,4.0663,200,400,600,0.8801\n", encoding="utf-8")
    made = numbers_of(tmp_path)
    for key, value in {"queue-16-192-median": "1890", "queue-16-64-median": "450", "queue-16-64-p90": "880",
                       "queue-16-64-p99": "1250", "queue-16-64-less": "0.7", "queue-16-64-tbs": "4.59",
                       "queue-16-64-us": "376.6", "queue-4-48-best": "0.880", "queue-16-192-less": "0.0",
                       "queue/16-64/slots": "12", "queue-provenance": "A card, commit abc, 2026-01-02"}.items():
        assert made[key] == value, key
    assert made["queue-table"].count(r"\\ ") == 4 and made["queue-table"].count(r"\addlinespace") == 1
    assert r"16 & 64 & 4.59 & 0.993 & 450 & 880 & 1250 \\" in made["queue-table"]


def test_the_sketches_show_the_shape_that_was_measured():
    shape = json.loads((tools.ROOT / "data/grade.json").read_text())["shape"]
    assert {k: diagrams.SHAPE[k] for k in ("d", "ffn", "n_q", "n_kv", "hd")} == \
        {k: shape[k] for k in ("d", "ffn", "n_q", "n_kv", "hd")}
    assert diagrams.SHAPE["keys"] == sum(range(shape["prefill"] + 1, shape["prefill"] + 33)) / 32
    with open(tools.ROOT / "data/ladder.csv", newline="") as f:
        rows = {r["stage"]: r for r in csv.DictReader(line for line in f if line[0] != "#")}
    norms = 2 * 2 * shape["d"]   # the weights of the two norms, which no sketch shows
    assert sum(diagrams.bytes_of().values()) + norms == int(rows["0"]["bytes"])
    assert len(diagrams.OPERATIONS) == int(rows["0"]["launches"])
    for stage, launches in diagrams.LAUNCHES.items():
        assert len(launches) == int(rows[str(stage)]["launches"])
    for above, stage in ((len(diagrams.OPERATIONS), 1), (len(diagrams.LAUNCHES[1]), 3)):
        parts = [part for _, parts in diagrams.LAUNCHES[stage] for part in parts]
        assert sorted(parts) == list(range(above)), f"stage {stage}: each launch goes to one"


def test_every_sketch_is_in_the_document_and_repeats(tmp_path):
    assert set(re.findall(r"\\diagram\{(\w+)\}", WEB)) >= set(diagrams.DIAGRAMS)
    for folder in ("a", "b"):
        diagrams.main(tmp_path / folder)
    assert tools.files(tmp_path / "a") == tools.files(tmp_path / "b")
    for text in tools.files(tmp_path / "a").values():
        assert text.count(b"{") == text.count(b"}")


def silent(web, most=65):
    """Runs of code with no prose in between that could fill a page: [(line, lines)]."""
    found, run, first, code = [], 0, 0, False
    for number, line in enumerate(web.splitlines() + ["The end."], 1):
        if re.match(r"<<.*>>=\s*$", line):
            first, run, code = first if run else number, run + 3, True
        elif re.match(r"@(\s|$)", line):
            code = False
        elif code:
            run += 1
        elif line.strip():
            found += [(first, run)] * (run > most)
            run = 0
    return found


def test_no_page_is_nothing_but_code():
    assert silent(WEB) == []
    chunk = "<<x>>=\n" + "x;\n" * 30 + "@\n"
    assert silent(chunk + chunk + chunk) == [(1, 99)] and silent(chunk + "Why.\n" + chunk) == []


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


@needs_pdf
def test_chapters_and_sections_are_bookmarks():
    entries = (PDF.with_suffix(".aux")).read_text(errors="replace").count(r"\BKM@entry")
    assert entries >= len(re.findall(r"^\\(?:chapter|section)\{", WEB, re.M))


def stranded(text):
    """Headings, and names of chunks, that end a page: what they head stands on the next one."""
    found = []
    for number, page in enumerate(text, 1):
        body = [line.strip() for line in page.splitlines() if line.strip()]
        if body and re.fullmatch(r"[ivxlcdm]+|\d+", body[-1]):
            body = body[:-1]
        if body and re.fullmatch(r"(?:\d+|[A-Z])\.\d+(?:\.\d+)?\s+[A-Z][^.]*|.*⟩\s*\+?≡.*", body[-1]):
            found.append(f"page {number}: {body[-1]}")
    return found


@needs_pdf
def test_no_heading_is_stranded():
    assert stranded(pages()) == []
    assert stranded(["Some text.\n\n5.2 The prediction\n\n   17\n"]) == ["page 1: 5.2 The prediction"]
    assert len(stranded(["Some text.\n\n84c ⟨stream: the producer 84c⟩≡   (81a)\n", "12\n"])) == 1
