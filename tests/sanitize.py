#!/usr/bin/env python3
"""Runs stage 7's driver under compute-sanitizer, tool by tool, and keeps the result with provenance.

memcheck looks for accesses out of bounds, initcheck for device memory that is read before it is
written, synccheck for wrong uses of barriers. racecheck looks for accesses to shared memory that no
barrier orders; what bulk copies and mbarriers order it may see only in part, and memory that blocks
share it does not check: for those the CPU target runs under ThreadSanitizer.

Exit status: 0 all clean, 1 something was found, 2 a tool could not run."""
import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHAPE = "--d=512 --ffn=1024 --n-q=8 --n-kv=2 --hd=64 --prefill=200".split()
LIMIT = 240   # seconds for one tool


def find():
    """The path of compute-sanitizer, or None."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    home = pathlib.Path(os.path.realpath(nvcc)).parents[1]
    return shutil.which("compute-sanitizer") or next(
        (str(p) for p in (home / "bin" / "compute-sanitizer", home / "compute-sanitizer" / "compute-sanitizer",
                          pathlib.Path("/usr/local/cuda/bin/compute-sanitizer")) if os.access(p, os.X_OK)), None)


def verdict(status, output, driver_passed):
    """What a run says: clean, found something, or could not run; and the tool's own last line."""
    lines = [line for line in output.splitlines() if re.search(r"ERROR SUMMARY|RACECHECK SUMMARY", line)]
    summary = lines[-1].strip("= ") if lines else "no summary"
    if status == 0 and lines and driver_passed and re.search(r"SUMMARY: 0 (errors|hazards)", summary):
        return "clean", summary
    if lines and not re.search(r"SUMMARY: 0 (errors|hazards)", summary):
        return "found", summary
    return "could not run", summary


def output_of(*command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def provenance():
    ask = lambda what: output_of("nvidia-smi", "--query-gpu=" + what, "--format=csv,noheader").split("\n")[0]
    release = re.findall(r"release (\S+),", output_of(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"))
    known = output_of("git", "describe", "--always", "--dirty=+", "--abbrev=12") or os.environ.get("COMMIT", "unknown")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [f"# gpu: {ask('name')}", f"# driver: {ask('driver_version')}", f"# cuda: {(release or ['unknown'])[0]}",
            f"# commit: {known}", f"# date: {now}", "# protocol: compute-sanitizer on stage 7's driver, --check "
            + " ".join(SHAPE)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--driver", default=str(ROOT / "build" / "gpu" / "stage7" / "driver"))
    args = parser.parse_args()
    sanitizer = find()
    if not sanitizer:
        print("sanitize: no compute-sanitizer here: not on PATH, and not beside nvcc; it is part of the CUDA toolkit",
              file=sys.stderr)
        return 2
    lines, ends = provenance(), []
    for tool in TOOLS:
        start = time.time()
        try:
            run = subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "99", args.driver, "--check", *SHAPE],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 text=True, errors="replace", timeout=LIMIT)
            passed = re.search(r"^PASS$", run.stdout, re.M)
            end, summary = verdict(run.returncode, run.stdout, passed)
            output = run.stdout
        except subprocess.TimeoutExpired:
            end, summary, output = "could not run", f"not finished after {LIMIT} s", ""
        lines.append(f"{tool}: {end}: {summary} ({time.time() - start:.0f} s)")
        print(lines[-1], flush=True)
        if end != "clean":
            lines += ["    " + line for line in output.splitlines()[:60]]
        ends.append(end)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    new = args.out.with_name(args.out.name + ".new")
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.replace(args.out)
    return 2 if "could not run" in ends else 1 if "found" in ends else 0


if __name__ == "__main__":
    sys.exit(main())
