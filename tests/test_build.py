"""The Makefile: parallel, repeatable, in any folder, under any locale, with few tools at hand."""
import os
import re
import shutil
import subprocess

import pytest

import tools

SMALL = ["D=128", "FFN=192", "NQ=4", "NKV=2", "HD=64", "PREFILL=5"]
DRIVERS = [f"build/cpu/plain/{stage}/driver" for stage in tools.STAGES]


def test_parallel_builds_repeat_and_a_second_make_does_nothing(copy):
    built = []
    for _ in range(2):
        shutil.rmtree(copy / "stages")
        tools.must_make("clean", cwd=copy)
        tools.must_make("-j8", "tangle", cwd=copy)
        tools.must_make("-j8", "build/liboracle.so", *DRIVERS, cwd=copy)
        built.append({**tools.files(copy / "stages"), **tools.files(copy / "build")})
    assert built[0].keys() == built[1].keys()
    assert [name for name in built[0] if built[0][name] != built[1][name]] == []
    files = [p for folder in ("stages", "build") for p in (copy / folder).rglob("*") if p.is_file()]
    times = {p: p.stat().st_mtime_ns for p in files}
    output = tools.must_make("-j8", "tangle", cwd=copy) \
        + tools.must_make("-j8", "build/liboracle.so", *DRIVERS, cwd=copy)
    assert not re.search(r"^  (CC|LINK|NVCC) ", output, re.M), output
    assert {p: p.stat().st_mtime_ns for p in files} == times


def test_clean_leaves_nothing(copy):
    before = tools.files(copy)
    tools.must_make("build/liboracle.so", "tangle", cwd=copy)
    tools.must_make("clean", cwd=copy)
    assert tools.files(copy) == before


def test_a_header_that_changes_means_a_rebuild(copy):
    driver = DRIVERS[0]
    tools.must_make("-j2", driver, cwd=copy)
    stage = driver.split("/")[-2]
    with open(copy / "stages" / stage / "layer.h", "a") as f:
        f.write("\n")
    output = tools.must_make("-j2", driver, cwd=copy)
    assert f"{stage}/layer.o" in output and "cpu/cpu.o" not in output


@pytest.mark.parametrize("stage", tools.STAGES)
def test_runs_in_a_folder_with_spaces_and_other_letters(copy, stage):
    output = tools.must_make(stage, *SMALL, cwd=copy)
    assert "PASS" in output.splitlines()[-1]


def test_runs_under_a_locale_with_a_decimal_comma(copy, tmp_path):
    localedef = shutil.which("localedef")
    if not localedef or not os.path.exists("/usr/share/i18n/locales/de_DE"):
        pytest.skip("no localedef, or no sources of locales")
    subprocess.run([localedef, "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")],
                   check=False, stderr=subprocess.DEVNULL)
    german = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"}
    status, printed = tools.run(["bash", "-c", "printf '%.1f' 0"], **german)
    assert printed == "0,0", "the locale is not in force"
    before = tools.files(copy / "stages")
    shutil.rmtree(copy / "stages")
    tools.must_make("tangle", cwd=copy, **german)
    assert tools.files(copy / "stages") == before
    for stage in tools.STAGES:
        output = tools.must_make(stage, *SMALL, cwd=copy, **german)
        assert "PASS" in output.splitlines()[-1]
        assert not re.search(r"\d,\d", output), output
        status, output = tools.run([f"build/cpu/plain/{stage}/driver", "--d=128", "--ffn=192", "--n-q=4",
                                    "--n-kv=2", "--hd=64", "--prefill=5"], cwd=copy, **german)
        assert status == 0 and not re.search(r"\d,\d", output), output


def path_without(tmp_path, *names):
    """A PATH with every program of the usual folders but these."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in os.listdir(place) if os.path.isdir(place) else []:
            if program not in names and not (folder / program).exists():
                (folder / program).symlink_to(os.path.join(place, program))
    return str(folder)


def test_committed_stages_build_without_noweb(copy, tmp_path):
    path = path_without(tmp_path, "notangle", "noweave", "noroots", "noweb")
    (copy / "layer.nw").unlink()
    for stage in tools.STAGES:
        output = tools.must_make(stage, *SMALL, cwd=copy, PATH=path)
        assert "PASS" in output.splitlines()[-1]
    before = tools.files(copy / "stages")
    status, output = tools.make("tangle", cwd=copy, PATH=path)
    assert status != 0 and "make deps" in output
    assert tools.files(copy / "stages") == before


def test_deps_says_what_is_missing_without_the_rights_to_install(copy, tmp_path):
    path = path_without(tmp_path, "notangle", "sudo", "id")
    fake = tmp_path / "bin" / "id"
    fake.write_text("#!/bin/sh\necho 1000\n")
    fake.chmod(0o755)
    status, output = tools.make("deps", cwd=copy, PATH=path)
    assert status != 0
    assert re.search(r"apt-get install .*\bnoweb\b", output), output


def test_deps_does_nothing_when_nothing_is_missing(copy, tmp_path):
    path = path_without(tmp_path, "apt-get")
    fake = tmp_path / "bin" / "apt-get"
    fake.write_text("#!/bin/sh\necho called >&2\nexit 1\n")
    fake.chmod(0o755)
    output = tools.must_make("deps", cwd=copy, PATH=path)
    assert "nothing is missing" in output


def test_a_stage_that_is_not_there_names_those_that_are(copy):
    missing, *there = sorted(tools.STAGES, reverse=True)
    shutil.rmtree(copy / "stages" / missing)
    status, output = tools.make(missing, cwd=copy)
    assert status != 0 and f"there is no stages/{missing}" in output
    assert all(stage in output for stage in there)


@pytest.mark.parametrize("stage", tools.STAGES)
def test_nvcc_compiles(stage):
    """For sm_90a, with warnings as errors: the driver and the library, also with bounded waits."""
    if tools.nvcc() is None:
        pytest.skip("no nvcc")
    tools.build(f"build/gpu/{stage}/driver")
    tools.build(f"build/gpu/{stage}/liblayer.so")
    with tools.alone():
        tools.must_make("-s", "-j2", f"build/gpu-debug/{stage}/driver", "DEBUG=1")


def test_the_program_of_the_queue_says_what_it_lacks():
    if tools.nvcc() is None or tools.gpu_is_here():
        pytest.skip("no nvcc, or a GPU")
    status, output = tools.run([str(tools.build("build/gpu/stage7/queue"))])
    assert status == 2 and output.startswith("queue: no CUDA device"), output


def test_a_driver_for_the_gpu_says_what_it_lacks():
    """Both versions where the driver is too old, as none at all is; else that there is no device."""
    if tools.nvcc() is None or tools.gpu_is_here():
        pytest.skip("no nvcc, or a GPU")
    status, output = tools.run([str(tools.build("build/gpu/stage7/driver"))])
    assert status == 2
    assert re.search(r"driver is for CUDA \d+\.\d, the runtime \d+\.\d\)|no CUDA device", output), output
