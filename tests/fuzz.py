#!/usr/bin/env python3
"""Random input for what reads text or sizes, and random shapes for stage 7.

Three programs of tests/fuzz/ run under libFuzzer with AddressSanitizer and UBSan, two at a time,
for --seconds each: the driver's command line, its reader of data/ladder.csv, and layer_build of the
stages that are one launch. Then --draws legal shapes and positions are drawn, and stage 7's driver
checks each against the oracle on the CPU target.

Exit status: 0 nothing found, 1 something (the input is in build/fuzz/), 2 cannot run."""
import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "fuzz"
SEEDS = {
    "options": [b"--d=64\0--ffn=128\0--n-q=2\0--n-kv=1\0--hd=64\0--prefill=7", b"--seed=3\0--csv\0--quick\0--probe",
                b"--samples=4\0--check", b"--help", b"--d=99999999999999999999", b"--=", b"d=1",
                b"--csv\0--rows=2", b"--rows=2\0--at=0,1"],
    "csv": [(ROOT / "data" / "ladder.csv").read_bytes() if (ROOT / "data" / "ladder.csv").exists() else b"",
            b'7,"a ""quoted"", title",1,2,3,4,5,6,7,8,9,10,11,12\n', b"\n\n7\n7,\n", b"7" + 3000 * b"," + b"\n7,x\n"],
    "config": [bytes(160), bytes(range(160)), b"".join(n.to_bytes(8, "little") for n in (1, 1, 1, 2, 100, 2))
               + bytes.fromhex("f168e388b5f8e43e0000000000c0be40") + bytes(96)],
}
PROGRAMS = {"options": ("options", ["stage7"]), "csv": ("csv", ["stage7"]),
            "config-stage6": ("config", ["stage6"]), "config-stage7": ("config", ["stage7"])}


def build(name):
    """Compiles a program of tests/fuzz/ for a stage; returns its path."""
    source, (stage,) = PROGRAMS[name]
    made = FOLDER / name / "fuzz"
    made.parent.mkdir(parents=True, exist_ok=True)
    stages = ROOT / "stages"
    subprocess.run(["clang", "-g", "-O1", "-w", "-fsanitize=fuzzer,address,undefined",
                    "-fno-sanitize-recover=undefined",
                    "-fno-sanitize=pointer-overflow",   # sizes are found by laying things out from null
                    "-I", str(stages / "cpu"), "-I", str(stages / stage),
                    f'-DSTAGE="{stages / stage / "layer.c"}"' if source == "config" else "-DUNUSED",
                    str(ROOT / "tests" / "fuzz" / f"{source}.c"),
                    *([] if source == "config" else [str(stages / "oracle" / "oracle.c"),
                                                     str(stages / stage / "layer.c"),
                                                     str(ROOT / "tests" / "fuzz" / "runtime.c")]),
                    "-lm", "-o", str(made)], check=True)
    return made


def fuzz(name, *limits):
    """Whether the program found nothing, and what it said last."""
    program, corpus = build(name), FOLDER / name / "corpus"
    corpus.mkdir(exist_ok=True)
    for i, seed in enumerate(SEEDS[PROGRAMS[name][0]]):
        (corpus / f"seed-{i}").write_bytes(seed)
    done = subprocess.run([str(program), *limits, "-max_len=4096", "-timeout=20",
                           "-close_fd_mask=1", "-print_final_stats=1", f"-artifact_prefix={FOLDER / name}/",
                           str(corpus)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, errors="replace", cwd=FOLDER / name)
    found = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    ran = f"{int(found.group(1)):,} inputs" if found else "no count"
    return done.returncode == 0, f"{name}: {ran}" if done.returncode == 0 else f"{name}: {done.stderr[-4000:]}"


# -------------------------------------------------------------------------------------- shapes

def draw(seed):
    """A legal shape, a number of filled rows, a chip and an order, as the driver takes them."""
    r = random.Random(seed)
    hd, n_kv = r.choice((64, 128)), r.choice((1, 1, 2, 3, 4))
    rep = r.choice([n for n in range(1, 17) if n * n_kv * hd <= 1024])
    d, ffn = 64 * r.randint(1, 6), 64 * r.randint(1, 12)
    edge = r.choice((64, 128, 448, 512)) + r.choice((-2, -1, 0, 1))
    prefill = r.choice((r.randint(0, 5), r.randint(0, 500), edge))
    return ([f"--d={d}", f"--ffn={ffn}", f"--n-q={rep * n_kv}", f"--n-kv={n_kv}", f"--hd={hd}",
             f"--prefill={prefill}", f"--seed={seed}"], dict(CPU_SEED=str(seed), CPU_SMS=str(r.randint(1, 4))))


def check_draw(driver, seed):
    """What is wrong with a drawn shape, or None."""
    options, env = draw(seed)
    try:
        done = subprocess.run([str(driver), *options], env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=300)
        wrong = done.returncode or not re.search(r"^PASS$", done.stdout, re.M)
        output = done.stdout
    except subprocess.TimeoutExpired:
        wrong, output = True, "not finished after 300 s"
    return f"{' '.join(f'{k}={v}' for k, v in env.items())} {driver} {' '.join(options)}\n{output}" if wrong else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=600, help="for each program")
    parser.add_argument("--draws", type=int, default=500, help="shapes")
    parser.add_argument("--first", type=int, default=1, help="the first seed of the shapes")
    args = parser.parse_args()
    if not shutil.which("clang"):
        print("fuzz: no clang here; on Debian: apt-get install clang", file=sys.stderr)
        return 2
    good = True
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for fine, words in pool.map(lambda name: fuzz(name, f"-max_total_time={args.seconds}"), PROGRAMS):
            print("fuzz:", words, flush=True)
            good &= fine
        drivers = [ROOT / "build" / "cpu" / build / "stage7" / "driver" for build in ("plain", "asan")]
        seeds = range(args.first, args.first + args.draws)
        wrong = [w for w in pool.map(lambda s: check_draw(drivers[s % 4 == 0], s), seeds) if w]
    for words in wrong:
        print("fuzz:", words)
    print(f"fuzz: {args.draws} shapes, {len(wrong)} wrong")
    return 0 if good and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
