#!/usr/bin/env python3
"""Plants single faults in stage 7's kernels and says which of them the CPU runs catch.

Each mutant is stages/stage7/kernels.cu with one text replaced by another. It is built for
the CPU target in its three builds, plain, asan and tsan, and run at small shapes; a run that
ends with anything but PASS catches it. A text that does not stand in the source exactly
once, and a mutant that does not compile, are errors: the list must follow the source.

Exit status: 0 when all faults are caught but those with a reason why not, 1 when not, 2 when
the list does not fit the source, or when the source without a fault does not pass."""
import argparse
import concurrent.futures
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

ONE_KV = "--d=128 --ffn=192 --n-q=2 --n-kv=1 --hd=64 --prefill=70"     # 2 pieces, unequal
PIECES = "--d=128 --ffn=384 --n-q=4 --n-kv=2 --hd=64 --prefill=70"     # 2 pieces, equal
OCTETS = "--d=64 --ffn=64 --n-q=12 --n-kv=1 --hd=64 --prefill=70"      # 12 heads a KV head
UNITS = "--d=64 --ffn=64 --n-q=16 --n-kv=16 --hd=64 --prefill=1000"    # 8 units of 2 tiles
LONG = "--d=64 --ffn=64 --n-q=65 --n-kv=65 --hd=64 --rows=640 --at=600,5"   # 10 tiles a unit
RUNS = {           # of each build: shape, CPU_SMS, seed
    "plain": [(ONE_KV, 2, 1), (PIECES, 3, 2), (PIECES, 4, 3), (OCTETS, 2, 1), (UNITS, 3, 1),
              (LONG, 3, 1)],
    "asan": [(ONE_KV, 3, 1), (PIECES, 3, 2)],
    "tsan": [(ONE_KV, 2, 1), (PIECES, 3, 2), (LONG, 2, 1)],
}

# name, the text, what takes its place; REASONS says why some are not caught.
MUTANTS = [
    # barriers and waits within a block
    ("block barrier gone after mbarrier_init", "    __syncthreads();\n", ""),
    ("loaders never meet", "named_barrier_sync(1, LOADERS)", "(void)0"),
    ("loaders' barrier expects a warp too few", "named_barrier_sync(1, LOADERS)",
     "named_barrier_sync(1, LOADERS - 32)"),
    ("producer's barrier with the loaders expects a warp too many",
     "named_barrier_arrive(2, LOADERS + 32)", "named_barrier_arrive(2, LOADERS + 64)"),
    ("vector published before all loaders have stored it",
     "    loaders_meet();\n    if (loader_thread(a) == 0) publish_in_block",
     "    if (loader_thread(a) == 0) publish_in_block"),
    ("loaders do not meet after one has waited for a phase",
     "(launch + 1) * (uint32_t)each);\n    loaders_meet();\n",
     "(launch + 1) * (uint32_t)each);\n"),
    ("loaders do not meet before they put a piece in place",
     "        loaders_meet();\n        put_vector(a, s, a->act", "        put_vector(a, s, a->act"),
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
    ("block's chunks of gate and up not counted",
     "lane_id() == 0) add_in_block(&s->gated, chunks);", "lane_id() == 0) ;"),
    ("block's chunks of gate and up not waited for",
     "if (t == 0) wait_in_block(&s->gated, (uint32_t)chunks_of_block(a, GATE_UP));", ""),
    ("block's chunks of gate and up: half of them waited for",
     "return left > 0 ? (left - 1) / step + 1 : 0;", "return left > 0 ? (left - 1) / step / 2 + 1 : 0;"),
    ("block's chunks of gate and up: one too many waited for",
     "return left > 0 ? (left - 1) / step + 1 : 0;", "return left > 0 ? left / step + 1 : 0;"),
    # mbarriers: counts, parities, bytes
    ("tiles: two arrivals expected of each", "mbarrier_init(s->tiles + i, 1)",
     "mbarrier_init(s->tiles + i, 2)"),
    ("slot: two arrivals expected to free it", "mbarrier_init(s->empty + w, 1)",
     "mbarrier_init(s->empty + w, 2)"),
    ("a tile of a unit not waited for", "i < first + count; i++) {", "i < first + count - 1; i++) {"),
    ("a tile does not wait for its place", "vector + vector_of_tile(t - start),", "vector,"),
    ("a tile's place given away before it is merged",
     "        merge_tiles(a, s, &m, i % UNIT_TILES, step);\n"
     "        if (i + UNIT_TILES < tiles) publish(a, s, ++vector);\n",
     "        if (i + UNIT_TILES < tiles) publish(a, s, ++vector);\n"
     "        merge_tiles(a, s, &m, i % UNIT_TILES, step);\n"),
    ("consumers' parity never flips", "parity ^= 1)", "parity ^= 0)"),
    ("producer's parity never flips", "p->parities ^= (uint32_t)used << p->w;", "(void)used;"),
    ("producer's first wait does not pass", "evict_first(), 0, ~0u }", "evict_first(), 0, 0u }"),
    ("parity of a block's second unit", "*parities ^= 1u << i;", ";"),
    ("half of the bytes expected", "(uint32_t)(4 * r.count * n)", "(uint32_t)(2 * r.count * n)"),
    # between blocks: waits, epochs, counts, order
    ("no wait for queries, keys and values",
     "if (units_of_block(a, n)) wait_for_phase(a, QKV, 0, launch, a->g.chunks[QKV]);", ""),
    ("no wait for attention", "    wait_for_phase(a, ATTEND, 0, launch, a->g.groups);\n", ""),
    ("no wait for the residual stream",
     "    wait_for_phase(a, OUT, 0, launch, a->g.chunks[OUT]);\n", ""),
    ("no wait for gate and up", "        wait_for_phase(a, GATE_UP, piece, launch, rows);\n", ""),
    ("wait for the first piece of gate and up alone", "wait_for_phase(a, GATE_UP, piece, launch, rows)",
     "wait_for_phase(a, GATE_UP, 0, launch, rows)"),
    ("a chunk of gate and up too few waited for", "launch, rows);", "launch, rows - 1);"),
    ("no wait for the piece of down before",
     "if (before >= 0) wait_for_phase(a, DOWN, before, launch, a->g.chunks[DOWN]);", ""),
    ("waits for the step before", "(launch + 1) * (uint32_t)each", "launch * (uint32_t)each"),
    ("launch count stands still", "a->launches[blockIdx.x] = launch + 1",
     "a->launches[blockIdx.x] = launch"),
    ("all pieces of gate and up counted as the first",
     "phase == GATE_UP ? c * a->g.pairs[GATE_UP] / a->g.piece : 0", "0"),
    ("a chunk of gate and up counted with the next one's piece",
     "phase == GATE_UP ? c * a->g.pairs", "phase == GATE_UP ? (c + 1) * a->g.pairs"),
    ("chunks counted with the phase's first piece", "atomic_add_release(counter(a, tag.phase, tag.part)",
     "atomic_add_release(counter(a, tag.phase, 0)"),
    ("down counted in no step", "(tag.phase != DOWN || a->g.pieces > (int)gridDim.x)",
     "tag.phase != DOWN"),
    ("chunks counted without release", "atomic_add_release(counter(a, tag.phase, tag.part)",
     "atomic_add_relaxed(counter(a, tag.phase, tag.part)"),
    ("attention counted without release", "atomic_add_release(counter(a, ATTEND, 0)",
     "atomic_add_relaxed(counter(a, ATTEND, 0)"),
    ("attention counted before all loaders have stored it",
     "    loaders_meet();\n    if (loader_thread(a) == 0) atomic_add_release(counter(a, ATTEND",
     "    if (loader_thread(a) == 0) atomic_add_release(counter(a, ATTEND"),
    ("last unit does not acquire the others", "atomic_add_acq_rel(a->units_done",
     "atomic_add_release(a->units_done"),
    ("pieces counted without release or acquire", "atomic_add_acq_rel(count, 1)",
     "atomic_add_relaxed(count, 1)"),
    ("units not counted from zero in the next step",
     "store_relaxed(a->units_done + group * LINE, 0);", ";"),
    ("pieces not counted from zero in the next step", "store_relaxed(count, 0);", ";"),
    # who does what
    ("last chunk of a phase not marked", "int last = next >= a->g.chunks[phase]",
     "int last = next > a->g.chunks[phase]"),
    ("last chunk of a piece of gate and up not marked", " || part_of(a, phase, next) != part;", ";"),
    ("last chunk of a piece of down not marked",
     "int last = c + a->g.warps * share.teams >= a->g.chunks[DOWN]",
     "int last = c + a->g.warps * share.teams > a->g.chunks[DOWN]"),
    ("tag with the tile of the group, not of the unit", "{ ATTEND, unit, t - start, vector",
     "{ ATTEND, unit, t, vector"),
    ("blocks beyond the last team work too", "s.team < s.teams ? b % pieces : pieces",
     "b % pieces"),
    ("each team does the chunks of all", "c < a->g.chunks[DOWN]; c += share.teams)",
     "c < a->g.chunks[DOWN]; c++)"),
    ("a row's pieces done by different warps", "while (p->w) next_slot(a, p, 0);", ""),
    ("finishing warp adds another warp's rows", "first = tag.item % step", "first = share.team"),
    ("columns of the first piece of down for all", "at = (int64_t)piece * a->g.piece;", "at = 0;"),
    ("last piece of down as wide as the others", "return left < a->g.piece ? left : a->g.piece;",
     "return a->g.piece;"),
    ("query heads of the wrong group", "*first = group / a->g.octets * rep",
     "*first = group / a->g.octets"),
    ("query heads of a KV head's first octet for all", "rep + octet * HEADS;", "rep;"),
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
    ("a bad position is not remembered", "*a.status = 4;", ";"),
    ("half of a cache row is an element off", "cache[at + half] =", "cache[at + half + 1] ="),
    # arithmetic
    ("scores not scaled", "q.v[j] *= a->score_scale;", ";"),
    ("eps left out", "squares / (float)n + a->eps)", "squares / (float)n)"),
    ("mean over d - 1", "squares / (float)n +", "squares / (float)(n - 1) +"),
    ("norm's weight left out", "x->v[i] *= w.v[i];", ";"),
    ("a vector without a norm keeps the scale before it",
     "if (!weight && loader_thread(a) == 0) s->scale = 1;", ""),
    ("hi of a vector for its lo", "(hi + n + i)", "(hi + i)"),
    ("lo of a vector left out", "    multiply_16_bytes(c[1], r.low, r.high, r.lo);\n", ""),
    ("lo of a weight of attention left out", "f32_to_bf16(e - bf16_to_f32(hi))", "0"),
    ("no residual around attention", "bf16_to_f32(a->x[i]) + y.low", "y.low"),
    ("no residual around the MLP", "float sum = a->x1[row];", "float sum = 0;"),
    ("rotation in the wrong direction", "*high = b * c + a * s;", "*high = b * c - a * s;"),
    ("merge of tiles does not rescale", "float e = expf(m->max", "float e = 1 + 0 * expf(m->max"),
    ("merge of units: each lane takes its own maximum",
     "larger = fmaxf(larger, shfl_xor_f32(larger, s));", ";"),
    ("merge of units: each lane takes its own factor", "float f = shfl_f32(e, u);", "float f = e;"),
    ("merge of units: each lane takes its own weight", "shfl_f32(weight, u)", "weight"),
    ("merge of units: sums merged before not rescaled", "m->sum[j] *= old;", ";"),
    ("merge of units: weight merged before not rescaled", "m->weight *= old;", "m->weight *= 1;"),
    ("merge of units: a unit too few", "n.units - u, head, i);", "n.units - u - 1, head, i);"),
]

REASONS = {
    "proxy fence gone after writing to a slot":
        "the CPU target wants the fence before a bulk copy reads what was stored, not "
        "before one overwrites it",
    "lo of a weight of attention left out":
        "a weight is then off by 2^-9 of itself at most: below the tolerance",
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
        kernels, driver = self.folder / f"kernels-{build}.cu", self.folder / f"driver-{build}"
        compiled = self.folder / f"kernels-{build}.o"
        kernels.write_text(source, encoding="utf-8")
        sanitizer = [flag for flag in compiler if flag.startswith("-fsanitize=")]
        objects = [f"{STAGE}/probes.o", f"{STAGE}/layer.o", f"{STAGE}/driver.o", "cpu/cpu.o",
                   "oracle/oracle.o"]
        for command in (
                [*compiler, "-w", "-x", "c", "-I", str(self.folder / "stages" / "cpu"), "-c",
                 str(kernels), "-o", str(compiled)],
                [compiler[0], *sanitizer, "-o", str(driver), str(compiled),
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

    def catch_all(self, source):
        """The same of each build, two builds at a time."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:   # the slowest build first
            seen = {build: pool.submit(self.catch, build, source) for build in reversed(RUNS)}
        return {build: seen[build].result() for build in RUNS}


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
                results[name] = bench.catch_all(source)
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
