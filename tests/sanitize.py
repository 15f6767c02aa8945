#!/usr/bin/env python3
"""Runs stage 7's driver under compute-sanitizer, tool by tool, and keeps the result with provenance.

memcheck looks for accesses out of bounds, initcheck for device memory that is read before it is
written, synccheck for wrong uses of barriers. racecheck looks for accesses to shared memory that no
barrier orders. It takes no notice of what else orders: counters stored with release and read with
acquire, and mbarriers with bulk copies. So its reports are judged: ORDERED lists the pairs of
functions that these order, and a report of any other pair is a finding. Memory that blocks share it
does not check. All of these orders the CPU target checks under ThreadSanitizer.

`sanitize.py --judge FILE` judges the saved output of racecheck; it needs no GPU.

Exit status: 0 all clean, 1 something was found, 2 a tool could not run."""
import argparse
import collections
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


SLOT = ("a slot: the bulk copies complete a phase of its mbarrier full, which every lane waits for; the "
        "warp meets and arrives at empty, for which the next copy waits")
VECTOR = ("the vector: the loaders meet and one arrives at its mbarrier, which every lane waits for; it is "
          "written over after its chunks were counted with release, and that acquired")
QUERIES = ("a unit's queries: the loaders meet and one publishes them with release, which a lane acquires "
           "before its warp meets; written over after all of the unit's tiles have arrived at their mbarriers")
SUMS = ("a tile's sums: the warp meets and arrives at the place's mbarrier, which every loader waits for; "
        "the place is used again after a number was published that says it is merged")
AFTER = ("the sums of tiles lie where the vector of Q, K and V was: its chunks were counted with release "
         "and that acquired before the queries, which a tile waits for, were published")
TAG = "what is in a slot: written before full is arrived at, read after it; written again after empty"
COUNT = "the counter itself: stored or added to with release, read with acquire"

# Two functions that touch the same shared memory, one of them writing: what orders them, and the fault in
# tests/mutants.py that takes a part of that order away. What barriers or __syncwarp order is not listed:
# racecheck understands these.
ORDERED = {
    ("bulk_load", "bulk_load"): (SLOT, "a slot is read before it is full"),
    ("bulk_load", "dot"): (SLOT, "a slot is read before it is full"),
    ("bulk_load", "score_tile"): (SLOT, "a tile's slot is given back before it is scored"),
    ("bulk_load", "fetch_row"): (SLOT, "a tile's slot is given back before it is scored"),
    ("bulk_load", "sum_tile"): (SLOT, "__syncwarp gone before a tile's slot is given back"),
    ("dot", "put_words"): (VECTOR, "consumers do not wait for the vector"),
    ("multiply_chunk", "put_vector"): (VECTOR, "consumers do not wait for the vector"),
    ("score_tile", "split_pair"): (QUERIES, "queries published before all loaders have stored them"),
    ("merge", "sum_tile"): (SUMS, "a tile's place given away before it is merged"),
    ("merge_tiles", "sum_tile"): (SUMS, "a tile's place given away before it is merged"),
    ("merge_tiles", "soften"): (SUMS, "a tile of a unit not waited for"),
    ("soften", "soften"): (SUMS, "a tile does not wait for the newest queries"),
    ("sum_tile", "sum_tile"): (SUMS, "a tile does not wait for the newest queries"),
    ("dot", "sum_tile"): (AFTER, "no wait for queries, keys and values"),
    ("put_words", "sum_tile"): (AFTER, "a tile of a unit not waited for"),
    ("consume", "offer"): (TAG, "a slot is read before it is full"),
    ("publish_in_block", "wait_in_block"): (COUNT, "a tile does not wait for the newest queries"),
    ("add_in_block", "wait_in_block"): (COUNT, "block's chunks of gate and up not waited for"),
}
ACCESS = r"(?:Read|Write) access at (?:\w+ )*(\w+)\(.*"
REPORT = re.compile(rf"Race reported between {ACCESS}\n((?:=+ +and {ACCESS}\n?)+)")


def pairs_of(output):
    """How many of racecheck's reports there are, and how many of them tell of each pair of functions."""
    reports = REPORT.findall(output)
    pairs = collections.Counter()
    for first, others, _ in reports:
        pairs.update({tuple(sorted((first, second))) for second in re.findall("and " + ACCESS, others)})
    return len(reports), pairs


def readable(output):
    """The names of functions that are not inlined, which racecheck prints mangled, as in the source."""
    def name(mangled):
        rest = mangled.group(1)
        for last in (False, True):   # the file's own namespace, and the function's name
            length = re.match(r"\d+", rest).group()
            rest = rest[len(length):]
            rest = rest[:int(length)] if last else rest[int(length):]
        return rest + "()+"
    return re.sub(r"\$\w+\$_ZN(\w+)\+", name, output)


def judge(output, summary):
    """Whether racecheck's reports are all of pairs in ORDERED: a verdict, and lines that say which."""
    output = readable(output)
    count, pairs = pairs_of(output)
    stopped = "Maximum number of hazards reached" in output   # counted as a warning
    known = [pair for pair in pairs if pair in ORDERED]
    unknown = [pair for pair in pairs if pair not in ORDERED]
    lines = [f"{pairs[pair]} of {' and '.join(pair)}: " + (ORDERED[pair][0] if pair in known else "NOT LISTED")
             for pair in sorted(unknown) + sorted(known)]
    told = sum(map(int, re.findall(r"(\d+) (?:error|warning)s?\b", summary))) - stopped
    if unknown or not count:
        return "found", lines
    if count != told:
        return f"found; {count} of {told} reports are here, of {len(known)} pairs, all of them ordered", lines
    if stopped:
        return f"found; {count} reports, of {len(known)} pairs, all of them ordered, before it stopped counting", lines
    return f"clean but for {count} reports of {len(known)} pairs that counters or mbarriers order", lines


def verdict(tool, status, output, driver_passed):
    """What a run says: clean, perhaps but for reports that are known; found something; or could not
    run. With it the tool's own last line, and lines that say more."""
    lines = [line for line in output.splitlines() if re.search(r"ERROR SUMMARY|RACECHECK SUMMARY", line)]
    summary = lines[-1].strip("= ") if lines else "no summary"
    nothing = re.search(r"SUMMARY: 0 (errors|hazards displayed \(0 errors, 0 warnings\))", summary)
    if nothing and status == 0 and driver_passed:
        return "clean", summary, []
    if nothing or not lines:
        return "could not run", summary, output.splitlines()[:60]
    if tool == "racecheck" and driver_passed:
        end, more = judge(output, summary)
        return end, summary, more + (output.splitlines()[:60] if end == "found" else [])
    return "found", summary, output.splitlines()[:60]


def line_of(tool, end, summary, more, seconds=None):
    took = "" if seconds is None else f" ({seconds:.0f} s)"
    return "\n".join([f"{tool}: {end}: {summary}{took}", *("    " + line for line in more)])


def output_of(*command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def provenance():
    ask = lambda what: output_of("nvidia-smi", "--query-gpu=" + what, "--format=csv,noheader").split("\n")[0]
    release = re.findall(r"release (\S+),", output_of(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"))
    known = os.environ.get("COMMIT") or output_of("git", "describe", "--always", "--dirty=+", "--abbrev=12") or "unknown"
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [f"# gpu: {ask('name')}", f"# driver: {ask('driver_version')}", f"# cuda: {(release or ['unknown'])[0]}",
            f"# commit: {known}", f"# date: {now}", "# protocol: compute-sanitizer on stage 7's driver, --check "
            + " ".join(SHAPE) + "; racecheck's reports judged by the list in tests/sanitize.py"]


def run(sanitizer, tool, driver):
    """The exit status of a tool and what it and the driver print, which build/ keeps whole."""
    more = ["--print-limit", "0"] if tool == "racecheck" else []
    env = {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "100000000", **os.environ}
    done = subprocess.run([sanitizer, "--tool", tool, *more, "--error-exitcode", "99", driver, "--check", *SHAPE],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", timeout=LIMIT, env=env)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / f"sanitize-{tool}.log").write_text(done.stdout, encoding="utf-8")
    return done.returncode, done.stdout


def passed(output):
    return re.search(r"^PASS$", output, re.M)


def status_of(ends):
    return 2 if "could not run" in ends else 0 if all(end.startswith("clean") for end in ends) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--driver", default=str(ROOT / "build" / "gpu" / "stage7" / "driver"))
    parser.add_argument("--judge", type=pathlib.Path, help="the saved output of racecheck, instead of a run")
    args = parser.parse_args()
    if args.judge:
        output = args.judge.read_text(encoding="utf-8", errors="replace")
        end, summary, more = verdict("racecheck", 99, output, passed(output))
        print(line_of("racecheck", end, summary, more))
        return status_of([end])
    if not args.out:
        parser.error("--out or --judge is needed")
    sanitizer = find()
    if not sanitizer:
        print("sanitize: no compute-sanitizer here: not on PATH, and not beside nvcc; it is part of the CUDA toolkit",
              file=sys.stderr)
        return 2
    lines, ends = provenance(), []
    for tool in TOOLS:
        start = time.time()
        try:
            status, output = run(sanitizer, tool, args.driver)
            end, summary, more = verdict(tool, status, output, passed(output))
        except subprocess.TimeoutExpired:
            end, summary, more = "could not run", f"not finished after {LIMIT} s", []
        lines.append(line_of(tool, end, summary, more, time.time() - start))
        print(lines[-1].split("\n")[0], flush=True)
        ends.append(end)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    new = args.out.with_name(args.out.name + ".new")
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.replace(args.out)
    return status_of(ends)


if __name__ == "__main__":
    sys.exit(main())
