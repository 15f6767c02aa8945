"""The front page: every command and every example in it is run, or as much of it as runs here."""
import ast
import re
import shutil
import subprocess
import sys
import types

import pytest

import tools

README = (tools.ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (tools.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def commands(page):
    """The make commands of a page, each as a tuple of words."""
    code = re.findall(r"^```\n(.*?)^```", page, re.S | re.M) \
        + [text for text in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))]
    found = []
    for text in code:
        for line in re.sub(r"\n(?!make)", " ", text).splitlines():
            line = line.partition("#")[0].strip()
            if line.split()[:1] == ["make"]:
                found.append(tuple(line.split()[1:]))
    return sorted(set(found))


# How a command is checked: RUN it, in a copy; it must END with a message where there is no
# GPU; or LIST what it would do, for what takes minutes or runs this very test.
RUN, END, LIST = "run", "end", "list"
HOW = {"": RUN, "deps": RUN, "stage7": RUN, "plots": RUN, "tangle": RUN, "dist": RUN,
       "deps-paper": RUN, "weave": RUN, "check": LIST, "mutants": LIST, "stage9": LIST,
       "stage8": RUN, "exponents": LIST, "resources": LIST, "fuzz": LIST, "shapes": END, "sanitize": END, "check-gpu": END,
       "grade": END, "ladder": END, "peers": END, "queue": END, "timeline": END, "traffic": END}
KNOWN = {words for page in (README, CONTRIBUTING) for words in commands(page)}


def targets(words):
    return [word for word in words if "=" not in word] or [""]


def test_the_commands_are_found():
    assert {("deps", "stage7"), ("deps", "check"), (), ("grade", "SUBMISSION=mine.py"),
            ("tangle", "LINE=-L"), ("deps-paper", "weave")} <= KNOWN
    assert {target for words in KNOWN for target in targets(words)} <= HOW.keys()


def ways(words):
    return {HOW[target] for target in targets(words)}


def once(known):
    """Without a command that another one does among others: weaving takes its time."""
    return sorted(w for w in known if not w or not any(set(w) < set(other) for other in known if "weave" in w))


@pytest.mark.parametrize("words", once({w for w in KNOWN if ways(w) == {RUN}}), ids=" ".join)
def test_what_runs_anywhere(copy, words):
    if {"deps-paper", "weave"} & set(words) and not (shutil.which("latexmk") and shutil.which("gnuplot")):
        pytest.skip("needs TeX and gnuplot")
    if "plots" in words and not shutil.which("gnuplot"):
        pytest.skip("needs gnuplot")
    if "D=4096" in words:
        pytest.skip("too large for the CPU target")
    if "weave" in words and (tools.ROOT / "build/paper").exists():   # TeX goes on from there
        shutil.copytree(tools.ROOT / "build/paper", copy / "build/paper")
    output = tools.must_make(*words, cwd=copy)
    if {"stage7", "stage8"} & set(words):
        assert output.splitlines()[-1].startswith("PASS")
    if words == ():
        assert "make deps" in output
    if "weave" in words:
        assert re.search(r"weave: paper/layer.pdf, \d+ pages", output)


@pytest.mark.skipif(tools.gpu_is_here(), reason="there is a GPU")
@pytest.mark.parametrize("words", sorted(w for w in KNOWN if END in ways(w)), ids=" ".join)
def test_what_needs_a_gpu_says_so(words):
    assert ways(words) == {END}
    status, output = tools.make(*words)
    first = targets(words)[0]
    assert status == 2 and f"{first}: no NVIDIA GPU here" in output, output


@pytest.mark.parametrize("words", sorted(w for w in KNOWN if LIST in ways(w) and "stage9" not in w),
                         ids=" ".join)
def test_what_takes_long_can_be_listed(words):
    status, output = tools.make("-n", *words)
    assert status == 0 and "python" in output, output


def block(language):
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)
    assert len(blocks) == 1
    return blocks[0]


def test_the_python_example_calls_what_there_is():
    """The five lines run against functions with the submission's own parameters."""
    source = (tools.ROOT / "stages/stage7/submission.py").read_text(encoding="utf-8")
    calls, module = [], types.ModuleType("submission")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("build_layer", "layer_step", "teardown"):
            names = [a.arg for a in node.args.args]
            assert not node.args.defaults
            exec(f"def {node.name}({', '.join(names)}):\n"
                 f"    calls.append('{node.name}')\n    return {names[0]}\n",
                 {"calls": calls}, module.__dict__)
    sys.modules["submission"] = module
    try:
        cache = [[types.SimpleNamespace(shape=(8, 1, 4224, 128))]]
        exec(block("python"), {"weights": {}, "kv_cache": cache, "cfg": {}, "x": None})
    finally:
        del sys.modules["submission"]
    assert calls == ["build_layer"] + ["layer_step"] * 32 + ["teardown"]
    assert len(block("python").splitlines()) == 5


def test_the_c_example_compiles(tmp_path):
    (tmp_path / "example.c").write_text(
        '#include <stdio.h>\n#include "layer.h"\nvoid example(void *in_norm, void *post_norm, void *q, void *k, '
        'void *v,\n    void *o, void *gate, void *up, void *down, void *k_cache, void *v_cache, void *x, void *x_out,\n'
        '    cudaStream_t stream)\n{\n' + block("c") + "}\n", encoding="utf-8")
    done = subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                           f"-I{tools.ROOT / 'stages/cpu'}", f"-I{tools.ROOT / 'stages/stage7'}",
                           str(tmp_path / "example.c")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_the_tour_goes_where_there_is_something():
    web = (tools.ROOT / "layer.nw").read_text(encoding="utf-8")
    chapters = set(re.findall(r"^\\chapter\{(.*)\}", web, re.M))
    tour = README[README.index("## The document"):README.index("Everything below is details")]
    named = [" ".join(name.split()) for name in re.findall(r"(?<!\*)\*{1,2}([A-Z][^*]+)\*{1,2}", tour)]
    assert len(named) >= 8 and [name for name in named if name not in chapters] == []


def test_two_screens_before_the_details():
    lines = README[:README.index("Everything below is details")].splitlines()
    assert len(lines) <= 60 and any("ladder.svg" in line for line in lines)
