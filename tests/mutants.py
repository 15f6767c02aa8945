#!/usr/bin/env python3
"""Plants single faults in stage 7's kernels and says which of them the CPU runs catch.

Each mutant is stages/stage7/kernels.cu with one text replaced by another. It is built for
the CPU target in its three builds, plain, asan and tsan, and run at small shapes; a run that
ends with anything but PASS catches it. A text that does not stand in the source exactly
once, and a mutant that does not compile, are errors: the list must follow the source.

Exit status: 0 when all faults are caught but those with a reason why not, 1 when not, 2 when
the list does not fit the source, or when the source without a fault does not pass."""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAGE = "stage7"
REQUIRED = 0.9     # of all faults: below it the runs are too weak, whatever the reasons
SECONDS = 90       # of one run; a mutant may spin for ever

ONE_HEAD = "--d=128 --ffn=192 --n-q=2 --n-kv=1 --hd=64 --prefill=70"
PIECES = "--d=128 --ffn=384 --n-q=4 --n-kv=2 --hd=64 --prefill=70"     # two pieces of down
LONG_UNITS = "--d=64 --ffn=64 --n-q=64 --n-kv=64 --hd=64 --prefill=130"  # tiles in a unit
RUNS = {           # of each build: shape, CPU_SMS, seed
    "plain": [(ONE_HEAD, 2, 1), (PIECES, 3, 2), (PIECES, 2, 3), (LONG_UNITS, 3, 1)],
    "asan": [(ONE_HEAD, 3, 1), (PIECES, 3, 2)],
    "tsan": [(ONE_HEAD, 2, 1), (PIECES, 3, 2)],
}

# name, the text, what takes its place; REASONS says why some are not caught.
MUTANTS = [
    # barriers and waits within a block
    ("block barrier gone after mbarrier_init", "    __syncthreads();\n", ""),
    ("loaders never meet", "named_barrier_sync(1, LOADERS)", "(void)0"),
    ("loaders' barrier expects a warp too few", "named_barrier_sync(1, LOADERS)",
     "named_barrier_sync(1, LOADERS - 32)"),
    ("vector published before all loaders have stored it",
     "    loaders_meet();\n    if (loader_thread(a) == 0) publish_in_block",
     "    if (loader_thread(a) == 0) publish_in_block"),
    ("consumers do not wait for the newest vector", "(uint32_t)tag.vector + 1);",
     "(uint32_t)tag.vector);"),
    ("__syncwarp gone after waiting for a vector",
     "(uint32_t)tag.vector + 1);\n        __syncwarp();\n", "(uint32_t)tag.vector + 1);\n"),
    ("__syncwarp gone between storing sums and counting them",
     "store_piece(a, tag.part, i, mine);\n    }\n    __syncwarp();\n",
     "store_piece(a, tag.part, i, mine);\n    }\n"),
    ("__syncwarp gone before a tile's slot is given back",
     "proxy_fence();\n    __syncwarp();\n", "proxy_fence();\n"),
    ("proxy fence gone after writing to a slot", "    proxy_fence();\n    __syncwarp();\n",
     "    __syncwarp();\n"),
    # mbarriers: counts, parities, bytes
    ("tiles: one arrival too few expected", "mbarrier_init(&s->tiles, UNIT_TILES)",
     "mbarrier_init(&s->tiles, UNIT_TILES - 1)"),
    ("slot: two arrivals expected to free it", "mbarrier_init(s->empty + w, 1)",
     "mbarrier_init(s->empty + w, 2)"),
    ("missing tiles not arrived for", "i < UNIT_TILES; i++) mbarrier_arrive(&s->tiles)",
     "i < UNIT_TILES - 1; i++) mbarrier_arrive(&s->tiles)"),
    ("consumers' parity never flips", "parity ^= 1)", "parity ^= 0)"),
    ("producer's parity never flips", "p->parities ^= (uint32_t)used << p->w;", "(void)used;"),
    ("producer's first wait does not pass", "evict_first(), 0, ~0u }", "evict_first(), 0, 0u }"),
    ("parity of a block's second unit", "(uint32_t)turn & 1", "(uint32_t)turn & 0"),
    ("half of the bytes expected", "(uint32_t)(4 * r.count * n)", "(uint32_t)(2 * r.count * n)"),
    # between blocks: waits, epochs, counts, order
    ("no wait for queries, keys and values", "if (units) wait_for_phase(a, QKV, launch);", ""),
    ("no wait for attention", "    wait_for_phase(a, ATTEND, launch);\n", ""),
    ("no wait for the residual stream", "    wait_for_phase(a, OUT, launch);\n", ""),
    ("waits for the step before", "(launch + 1) * each", "launch * each"),
    ("launch count stands still", "a->launches[blockIdx.x] = launch + 1",
     "a->launches[blockIdx.x] = launch"),
    ("chunks counted without release", "atomic_add_release(a->done + tag.phase",
     "atomic_add_relaxed(a->done + tag.phase"),
    ("attention counted without release", "atomic_add_release(a->done + ATTEND",
     "atomic_add_relaxed(a->done + ATTEND"),
    ("attention counted before all loaders have stored it",
     "    loaders_meet();\n    if (loader_thread(a) == 0) atomic_add_release(a->done + ATTEND",
     "    if (loader_thread(a) == 0) atomic_add_release(a->done + ATTEND"),
    ("last unit does not acquire the others", "atomic_add_acq_rel(a->units_done",
     "atomic_add_release(a->units_done"),
    ("pieces counted without release or acquire", "atomic_add_acq_rel(count, 1)",
     "atomic_add_relaxed(count, 1)"),
    ("units not counted from zero in the next step",
     "store_relaxed(a->units_done + group * LINE, 0);", ";"),
    ("pieces not counted from zero in the next step", "store_relaxed(count, 0);", ";"),
    # who does what
    ("last chunk of a phase not marked", "c + a->g.warps * step >= a->g.chunks[phase]",
     "c + a->g.warps * step > a->g.chunks[phase]"),
    ("tag with the tile of the group, not of the unit", "t - first_tile(n, split), vector",
     "t, vector"),
    ("blocks beyond the last team work too", "s.team < s.teams ? b % pieces : pieces",
     "b % pieces"),
    ("a row's pieces done by different warps", "while (p->w) next_slot(a, p, 0);", ""),
    ("finishing warp adds another warp's rows", "first = tag.item % step", "first = share.team"),
    ("query heads of the wrong group", "*first = group / a->g.octets * rep",
     "*first = group / a->g.octets"),
    ("keys of KV head 0 for all", "kv = group / a->g.octets;", "kv = 0;"),
    # bounds
    ("the row being written is copied too soon", "old = pos - first;", "old = pos - first + 1;"),
    ("the row being written is not attended to", "? (int)(pos - first) + 1 : TILE_KEYS",
     "? (int)(pos - first) : TILE_KEYS"),
    ("keys beyond the last are scored", "g + i / 2 * 8 < keys", "g + i / 2 * 8 < TILE_KEYS"),
    ("values beyond the last key are multiplied by zero", "key < keys ? *(", "key < TILE_KEYS ? *("),
    ("no tile for a position at a tile's edge", "(int)(pos / TILE_KEYS) + 1",
     "(int)((pos + TILE_KEYS - 1) / TILE_KEYS)"),
    ("position max_seq_len is taken", "pos < p.rows ? pos : -1", "pos <= p.rows ? pos : -1"),
    ("half of a cache row is an element off", "cache[at + half] =", "cache[at + half + 1] ="),
    # arithmetic
    ("scores not scaled", "q.v[j] *= a->score_scale;", ";"),
    ("eps left out", "squares / (float)n + a->eps)", "squares / (float)n)"),
    ("mean over d - 1", "squares / (float)n +", "squares / (float)(n - 1) +"),
    ("norm's weight left out", "x->v[i] *= w.v[i];", ";"),
    ("no residual around attention", "bf16_to_f32(a->x[i]) + y.low", "y.low"),
    ("no residual around the MLP", "float sum = a->x1[row];", "float sum = 0;"),
    ("rotation in the wrong direction", "*high = b * c + a * s;", "*high = b * c - a * s;"),
    ("merge does not rescale", "e = expf(m->max - larger)", "e = 1"),
]

REASONS = {
    "proxy fence gone after writing to a slot":
        "the CPU target wants the fence before a bulk copy reads what was stored, not "
        "before one overwrites it",
    "eps left out":
        "eps is 1e-5 beside a mean square near 1: below what the tolerance can see "
        "unless x is small or zero",
}


def mutated(source, name, old, new):
    if source.count(old) != 1:
        raise LookupError(f"{name}: stands {source.count(old)} times in the source: {old!r}")
    return source.replace(old, new)


class Bench:
    """A folder with a copy of the stage, in which its mutants are built and run."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copy(ROOT / "Makefile", folder)
        for part in ("cpu", "oracle", STAGE):
            shutil.copytree(ROOT / "stages" / part, folder / "stages" / part)
        self.source = (folder / "stages" / STAGE / "kernels.cu").read_text(encoding="utf-8")
        targets = [f"build/cpu/{build}/{STAGE}/driver" for build in RUNS]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        subprocess.run(["make", "-s", *targets], cwd=folder, env=env, check=True,
                       stdout=subprocess.DEVNULL)

    def build(self, build, source):
        """The path of a driver with these kernels."""
        made = self.folder / "build" / "cpu" / build
        compiler = shlex.split((made / "flags").read_text())
        kernels, driver = self.folder / "kernels.cu", self.folder / f"driver-{build}"
        kernels.write_text(source, encoding="utf-8")
        sanitizer = [flag for flag in compiler if flag.startswith("-fsanitize=")]
        objects = [f"{STAGE}/probes.o", f"{STAGE}/layer.o", f"{STAGE}/driver.o", "cpu/cpu.o",
                   "oracle/oracle.o"]
        for command in (
                [*compiler, "-w", "-x", "c", "-I", str(self.folder / "stages" / "cpu"), "-c",
                 str(kernels), "-o", str(self.folder / "kernels.o")],
                [compiler[0], *sanitizer, "-o", str(driver), str(self.folder / "kernels.o"),
                 *(str(made / name) for name in objects), "-lm"]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True)
            if done.returncode:
                raise LookupError(f"does not compile:\n{done.stdout}")
        return driver

    def catch(self, build, source):
        """How this build catches the source: in a word, or None."""
        driver = self.build(build, source)
        for shape, sms, seed in RUNS[build]:
            env = dict(os.environ, CPU_SMS=str(sms), CPU_SEED=str(seed))
            try:
                done = subprocess.run([str(driver), *shape.split(), f"--seed={seed}"], env=env,
                                      timeout=SECONDS, stdin=subprocess.DEVNULL, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      errors="replace")
            except subprocess.TimeoutExpired:
                return "endless"
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines or not lines[-1].startswith("PASS"):
                return word_for(done.returncode, done.stdout)
        return None


def word_for(status, output):
    """What stopped a run: the kind of report it ended with."""
    if "ThreadSanitizer" in output:
        return "race"
    if status == 3 and "threads asleep" in output:
        return "deadlock"
    if "AddressSanitizer" in output or status == 3 and re.search(r"\bleaves? (their|its|the) ", output):
        return "bounds"
    if status == 3:   # of the CPU target, for the use of a primitive
        return "rule"
    return "crash" if status < 0 else "wrong"


def table(results):
    """The results as lines: what each build saw, and why some saw nothing."""
    width = max(len(name) for name, *_ in MUTANTS)
    lines = [f"{'fault':{width}}  {'plain':9} {'asan':9} {'tsan':9}"]
    for name, seen in results.items():
        words = " ".join(f"{seen[build] or '-':9}" for build in RUNS)
        lines.append(f"{name:{width}}  {words}".rstrip())
        if not any(seen.values()):
            lines.append(f"{'':{width}}  NOT CAUGHT: {REASONS.get(name, 'no reason is known')}")
    return lines


def verdict(results):
    missed = [name for name, seen in results.items() if not any(seen.values())]
    unexplained = [name for name in missed if name not in REASONS]
    summary = f"{len(results) - len(missed)} of {len(results)} faults are caught"
    return summary, not unexplained and len(results) - len(missed) >= REQUIRED * len(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="the table is also written there")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant[0]]
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="mutants.") as folder:
        bench, results = Bench(pathlib.Path(folder)), {}
        try:
            sources = {name: mutated(bench.source, name, old, new) for name, old, new in chosen}
        except LookupError as error:
            print(f"mutants: {error}", file=sys.stderr)
            return 2
        for build in RUNS:
            if bench.catch(build, bench.source):
                print(f"mutants: {build}: the source without a fault does not pass", file=sys.stderr)
                return 2
        for name, source in sources.items():
            try:
                results[name] = {build: bench.catch(build, source) for build in RUNS}
            except LookupError as error:
                print(f"mutants: {name}: {error}", file=sys.stderr)
                return 2
            print("\n".join(table({name: results[name]})[1:]), flush=True)
    summary, good = verdict(results)
    print(f"{summary}, in {time.time() - started:.0f} s")
    if args.out and not args.only:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join([*table(results), summary]) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
