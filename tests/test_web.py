"""The web: its chunks are short, it tangles into what is committed, and a broken one changes nothing."""
import re
import statistics

import pytest

import tools

WEB = (tools.ROOT / "layer.nw").read_text(encoding="utf-8")


def faults(web):
    """What is wrong with the chunks of a web."""
    found = tools.chunks(web)
    sizes = sorted(len(body) for _, _, body in found)
    wrong = []
    if statistics.median(sizes) > 12:
        wrong.append(f"the median chunk has {statistics.median(sizes)} lines, more than 12")
    long = [f"{line}: {len(body)} lines: {name}" for line, name, body in found if len(body) > 25]
    if 10 * len(long) > len(sizes):
        wrong.append(f"{len(long)} of {len(sizes)} chunks have more than 25 lines, more than a tenth:\n"
                     + "\n".join(long))
    for line, name, body in found:
        if len(body) > 40:
            wrong.append(f"{line}: {len(body)} lines, more than 40: {name}")
        if not body:
            wrong.append(f"{line}: an empty chunk: {name}")
        for i, text in enumerate(body, line + 1):
            if len(text) > 88:
                wrong.append(f"{i}: {len(text)} columns, more than 88: {text}")
            if "\t" in text:
                wrong.append(f"{i}: a tab: {text}")
            if text != text.rstrip():
                wrong.append(f"{i}: blanks at the end: {text}")
    return wrong


def test_chunks_are_short_and_narrow():
    wrong = faults(WEB)
    if wrong:
        pytest.fail("\n" + "\n".join(wrong), pytrace=False)


GOOD = "".join(f"<<n{i}>>=\n" + "x;\n" * 12 + "@\n" for i in range(20))


@pytest.mark.parametrize("fault, words", [
    ("<<long>>=\n" + "x;\n" * 41, "41 lines, more than 40"),
    ("<<wide>>=\n" + "x" * 89 + "\n", "89 columns"),
    ("<<tab>>=\n\tx;\n", "a tab"),
    ("<<blank>>=\nx; \n", "blanks at the end"),
    ("<<empty>>=\n@\n", "an empty chunk"),
    ("".join(f"<<m{i}>>=\n" + "x;\n" * 13 + "@\n" for i in range(21)), "the median"),
    ("".join(f"<<m{i}>>=\n" + "x;\n" * 26 + "@\n" for i in range(3)), "more than a tenth"),
], ids=["long", "wide", "tab", "blank", "empty", "median", "tenth"])
def test_a_bad_chunk_is_found(fault, words):
    assert faults(GOOD) == []
    wrong = faults(GOOD + fault)
    assert len(wrong) == 1 and words in wrong[0], wrong


def test_stages_is_what_the_web_says(copy):
    before = tools.files(copy / "stages")
    tools.must_make("tangle", cwd=copy)
    assert tools.files(copy / "stages") == before
    assert sorted("stages/" + name for name in before) == sorted(tools.roots())


def test_an_edited_tangled_file_is_restored(copy):
    before = tools.files(copy / "stages")
    edited = copy / tools.roots()[0]
    edited.write_bytes(edited.read_bytes() + b"\n/* edited */\n")
    tools.must_make("tangle", cwd=copy)
    assert tools.files(copy / "stages") == before


def test_tangled_files_say_where_they_come_from():
    for root in tools.roots():
        path = tools.ROOT / root
        assert "tangled from layer.nw" in path.read_text(encoding="utf-8").splitlines()[0], root
        assert path.stat().st_mode & 0o777 == 0o644, root


# Each breaks the web; {root} is one of its files, {name} a chunk that is used somewhere.
BREAK = {
    "a chunk that nobody defines": lambda web, root, name:
        web.replace(f"\n<<{root}>>=\n", f"\n<<{root}>>=\n<<a chunk that nobody defines>>\n", 1),
    "a misspelled file": lambda web, root, name:
        web.replace(f"\n<<{root}>>=\n", f"\n<<{root}x>>=\n"),
    "a misspelled chunk": lambda web, root, name:
        web.replace(f"\n<<{name}>>=\n", f"\n<<{name}, misspelled>>=\n"),
    "a chunk that nobody uses": lambda web, root, name:
        web + "\n@\n<<a chunk that nobody uses>>=\nint x;\n@\n",
    "a file that the Makefile does not list": lambda web, root, name:
        web + "\n@\n<<stages/stage0/extra.c>>=\nint x;\n@\n",
    "a chunk that uses itself": lambda web, root, name:
        web.replace(f"\n<<{name}>>=\n", f"\n<<{name}>>=\n<<{name}>>\n", 1),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_web_changes_nothing(copy, how):
    root = "stages/oracle/oracle.c"
    name = next(n for _, n, _ in tools.chunks(WEB) if re.search(r"^\s*<<%s>>$" % re.escape(n), WEB, re.M))
    broken = BREAK[how](WEB, root, name)
    assert (broken == WEB) is False
    # Besides, a harmless change in another file, which must not come through either.
    broken = broken.replace("\n<<stages/oracle/oracle.h>>=\n", "\n<<stages/oracle/oracle.h>>=\n/* new */\n")
    (copy / "layer.nw").write_text(broken, encoding="utf-8")
    before = tools.files(copy / "stages")
    status, output = tools.make("tangle", cwd=copy)
    assert status != 0, output
    assert "tangle: " in output
    assert tools.files(copy / "stages") == before


def test_prose_alone_rebuilds_nothing(copy):
    target = "build/liboracle.so"
    tools.must_make("tangle", target, cwd=copy)
    times = {p: p.stat().st_mtime_ns for p in (copy / "stages").rglob("*")}
    (copy / "layer.nw").write_text(WEB.replace("\\begin{document}", "\\begin{document}\nOne more word.\n", 1),
                                   encoding="utf-8")
    tools.must_make("tangle", cwd=copy)
    assert {p: p.stat().st_mtime_ns for p in (copy / "stages").rglob("*")} == times
    assert tools.make("-q", target, cwd=copy)[0] == 0


SMALL_WEB = r'''
@
<<x.c>>=
#define TWICE(x) \
    <<in a macro>>
int f(void)
{
    int y = <<in a line>>;
    <<on its own line, [[y]]>>
}
<<in a macro>>=
((x) + \
    <<deeper in a macro>>)
<<deeper in a macro>>=
<<deepest in a macro>>
<<deepest in a macro>>=
(x)
<<in a line>>=
1 +
<<deeper in a line>>
<<deeper in a line>>=
2
<<on its own line, [[y]]>>=
y++;
<<deeper>>
<<deeper>>=
return y;
<<x.py>>=
"""About x."""
<<in Python>>
SOURCE = r"""
<<in C>>
"""
<<in Python>>=
y = 1
<<in C>>=
int y;
@
'''


def tangled(root, tmp_path):
    (tmp_path / "small.nw").write_text(SMALL_WEB)
    status, output = tools.run(["notangle", "-filter", f"awk -v root={root} -f paper/names.awk",
                                f"-R{root}", str(tmp_path / "small.nw")])
    assert status == 0
    return [line for line in output.splitlines() if line]


def test_names_of_chunks_are_left_as_comments_where_they_do_no_harm(tmp_path):
    assert tangled("x.c", tmp_path) == [
        "#define TWICE(x) \\", "    ((x) + \\", "        (x))",
        "int f(void)", "{", "    int y = 1 +", "            2;",
        "    /* on its own line, y */", "    y++;", "    /* deeper */", "    return y;", "}"]


def test_names_of_chunks_in_python_and_in_the_c_inside_it(tmp_path):
    assert tangled("x.py", tmp_path) == [
        '"""About x."""', "# in Python", "y = 1", 'SOURCE = r"""', "/* in C */", "int y;", '"""']
