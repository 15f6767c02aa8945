#!/usr/bin/env python3
"""What the kernels of each stage take of a multiprocessor -> data/resources.csv; needs nvcc, no GPU.

    resources.py --nvcc NVCC [--out data/resources.csv] [FLAG ...]

Each stage's kernels.cu is compiled with the FLAGs to a cubin, and what ptxas says of each kernel
becomes a row: registers a thread, bytes of stack and of spilled registers a thread, and the bytes of
its code. A function that is not inlined has registers of its own; its stack and what it spills count
for the kernels of its file, and its code stands in theirs.
"""
import argparse
import datetime
import pathlib
import re
import subprocess
import sys
import tempfile

import tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = ("kernel", "registers", "stack", "spilled", "code")


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        sys.exit(f"resources.py: {' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def told_by_ptxas(text):
    """({kernel: [registers, stack, spilled]} in the order of the text; stack and spills of functions)"""
    kernels, functions, name = {}, [0, 0], None
    entries = set(re.findall(r"Compiling entry function '(\w+)'", text))
    for line in text.splitlines():
        about = re.search(r"Function properties for (\w+)", line)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if about:
            name = about.group(1)
        elif stack and name in entries:
            kernels[name] = [0, int(stack.group(1)), int(stack.group(2)) + int(stack.group(3))]
            last = name
        elif stack:
            functions = [functions[0] + int(stack.group(1)),
                         functions[1] + int(stack.group(2)) + int(stack.group(3))]
        elif "Used" in line and kernels:
            kernels[last][0] = int(re.search(r"Used (\d+) registers", line).group(1))
    return kernels, functions


def code_bytes(sections):
    """{kernel: bytes}, from what readelf says of a cubin's sections"""
    return {name: int(size, 16) for name, size in
            re.findall(r" \.text\.(\w+)\s+PROGBITS\s+\w+\s+\w+\s+(\w+)", sections)}


def rows_of(stage, nvcc, flags):
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(pathlib.Path(folder, "kernels.cubin"))
        told = run(nvcc, *flags, "-cubin", "-Xptxas", "-v", "-o", cubin, str(ROOT / "stages" / stage / "kernels.cu"))
        code = code_bytes(run("readelf", "-SW", cubin))
    kernels, functions = told_by_ptxas(told)
    for name, (registers, stack, spilled) in sorted(kernels.items()):
        yield [f"{stage[len('stage'):]}-{name}", registers, stack + functions[0], spilled + functions[1], code[name]]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=ROOT / "data" / "resources.csv", type=pathlib.Path)
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("flags", nargs="*")
    got = parser.parse_args(arguments)
    release = re.search(r"release [\d.]+, V([\d.]+)", run(got.nvcc, "--version"))
    lines = [f"# date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
             f"# cuda: {release.group(1) if release else 'unknown'}", f"# commit: {got.commit}",
             f"# protocol: nvcc {' '.join(got.flags)}; bytes of stack and spills are of a thread; no GPU",
             ",".join(COLUMNS)]
    for stage in sorted(path.parent.name for path in ROOT.glob("stages/stage*/kernels.cu")):
        print(f"resources: {stage}", flush=True)
        lines += [",".join(map(str, row)) for row in rows_of(stage, got.nvcc, got.flags)]
    tables.write_whole(got.out, "\n".join(lines) + "\n")
    print(f"resources: {got.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
