"""The repository: no trace of one machine, a README that is true, numbers that come from data."""
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

import tools


def tracked():
    """The files of the repository: what git tracks or would, else all but what is built."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=tools.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if listed.returncode == 0:
        names = [n for n in listed.stdout.decode().split("\0") if n]
    else:
        names = [str(p.relative_to(tools.ROOT)) for p in tools.ROOT.rglob("*")
                 if "build" not in p.relative_to(tools.ROOT).parts]
    return [tools.ROOT / n for n in names if (tools.ROOT / n).is_file()]


def traces(text):
    """What in a text would be true on one machine only."""
    wrong = re.findall(r"(?:(?<![\w.$\\}])|(?<=-[IL]))/(?:work|root|home|Users)/[\w.-]*", text)
    wrong += [name for name in {str(tools.ROOT), str(pathlib.Path.home())}
              if name != "/" and re.search(r"(?<![\w.])%s(?!\w)" % re.escape(name), text)]
    host = socket.gethostname()
    if len(host) > 5 and re.search(r"\b%s\b" % re.escape(host), text):
        wrong.append(host)
    return wrong + re.findall(r"https?://(?:deb\.debian|pypi|files\.pythonhosted|proxy\.)[\w./-]*", text)


def test_no_trace_of_a_machine():
    this = pathlib.Path(__file__).resolve()
    wrong = [f"{path.relative_to(tools.ROOT)}: {what}" for path in tracked() if path != this
             for what in traces(path.read_bytes().decode("utf-8", "replace"))]
    if wrong:
        pytest.fail("\n" + "\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("text", ["see /home/me/x", "-I/work/main", str(tools.ROOT) + "/build",
                                  "https://pypi.org/simple"])
def test_a_trace_is_found(text):
    assert traces(text)


def help_lists():
    return set(re.findall(r"^make ([\w-]+)", tools.must_make("help"), re.M))


def test_the_readme_names_only_what_make_help_lists():
    readme = (tools.ROOT / "README.md").read_text(encoding="utf-8")
    named = set()
    for code in re.findall(r"```.*?```|`[^`\n]+`", readme, re.S):
        for words in re.findall(r"\bmake((?: [\w=*-]+)+)", code):
            named |= {w for w in words.split() if re.fullmatch(r"[a-z][a-z0-9-]*", w)}
    assert {"deps", "check", "stage7"} <= named
    assert named - help_lists() == set()


def test_make_help_lists_only_what_there_is():
    database = tools.make("-p", "-n", "help")[1]
    assert len(help_lists()) > 8
    for target in help_lists():
        assert re.search(rf"^{target}:", database, re.M), f"make {target}: no such target"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(page):
    readme = (tools.ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", readme):
        assert link.startswith("https://") or (tools.ROOT / link).exists(), link


def test_numbers_come_from_the_data(tmp_path):
    (tmp_path / "ladder.csv").write_text(
        "# gpu: H200 & 50 %\n# driver: 1.2\nstage,title,us_median,us_p10\n"
        '0,"one kernel, each",1234.5,\n7,one launch,399.1,398\n', encoding="utf-8")
    (tmp_path / "grade.json").write_text('{"pass": true, "gates": {"tokens_per_s": 2500.5}}', encoding="utf-8")
    made = subprocess.run([sys.executable, str(tools.ROOT / "paper/numbers.py"), str(tmp_path)],
                          check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert r"\definemeasured{ladder/gpu}{H200 \& 50 \%}" in made
    assert r"\definemeasured{ladder/0/us_median}{1234.5}" in made
    assert r"\definemeasured{ladder/0/title}{one kernel, each}" in made
    assert r"\definemeasured{grade/gates/tokens_per_s}{2500.5}" in made
    assert not [line for line in made if "ladder/0/us_p10" in line]


def test_numbers_without_data_define_nothing(tmp_path):
    made = subprocess.run([sys.executable, str(tools.ROOT / "paper/numbers.py"), str(tmp_path / "none")],
                          check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "definemeasured" not in made


def test_no_measured_number_is_typed_in_the_readme():
    readme = (tools.ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"<!-- generated.*?<!-- end -->", "", readme, flags=re.S)
    assert not re.findall(r"\d[\d.,]*\s*(?:µs|us\b|TB/s|GB/s|tokens/s|×)", readme)


def test_dist_holds_what_it_takes(tmp_path, copy):
    tools.must_make("dist", cwd=copy)
    archives = list((copy / "build").glob("layer-*.tar.gz"))
    assert len(archives) == 1
    subprocess.run(["tar", "xzf", str(archives[0]), "-C", str(tmp_path)], check=True)
    inside = tmp_path / archives[0].name[:-len(".tar.gz")]
    assert tools.files(inside / "stages") == tools.files(copy / "stages")
    for name in ("layer.nw", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        assert (inside / name).read_bytes() == (copy / name).read_bytes()
    tools.must_make("build/liboracle.so", cwd=inside)
    assert "nothing" not in os.listdir(inside)
