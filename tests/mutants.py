#!/usr/bin/env python3
"""Plants single faults in the stages that are one launch and says which of them are caught.

Each mutant is one file of a stage, kernels.cu or layer.c, with one text replaced by another. It
is built for the CPU target, plain, then asan, then tsan, and its driver run at small shapes, until
a run ends with anything but PASS, which catches it. What passes all of these is given to the tests
of numbers and lifetimes. A text that does not stand in the source exactly once, and a mutant that
does not compile, are errors: the list must follow the source.

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
PYTHON = os.environ.get("PYTHON") or sys.executable
REQUIRED = 0.95    # of all faults: below it the runs are too weak, whatever the reasons
SECONDS = 240      # of one run; a mutant may spin for ever, and the machine be busy

ONE_KV = "--d=128 --ffn=192 --n-q=2 --n-kv=1 --hd=64 --prefill=70"     # 2 pieces, unequal
PIECES = "--d=128 --ffn=384 --n-q=4 --n-kv=2 --hd=64 --prefill=70"     # 2 pieces, equal
OCTETS = "--d=64 --ffn=64 --n-q=12 --n-kv=1 --hd=64 --prefill=70"      # 12 heads a KV head
UNITS = "--d=64 --ffn=64 --n-q=16 --n-kv=16 --hd=64 --prefill=1000"    # 8 units of 2 tiles
LONG = "--d=64 --ffn=64 --n-q=65 --n-kv=65 --hd=64 --rows=640 --at=600,5"   # 10 tiles a unit
SPLITS = "--d=64 --ffn=128 --n-q=6 --n-kv=2 --hd=64 --prefill=255"     # stage 6: 2 splits and 3
WIDE = "--d=64 --ffn=4800 --n-q=1 --n-kv=1 --hd=64 --prefill=5"        # stage 6: a vector fills the memory
RUNS = {           # of each build: shape, CPU_SMS, seed
    "plain": [(ONE_KV, 2, 1), (PIECES, 3, 2), (PIECES, 4, 3), (OCTETS, 2, 1), (UNITS, 3, 1),
              (LONG, 3, 1)],
    "asan": [(ONE_KV, 3, 1), (PIECES, 3, 2)],
    "tsan": [(ONE_KV, 2, 1), (PIECES, 3, 2), (LONG, 2, 1)],
}
RUNS_6 = {
    "plain": [(ONE_KV, 2, 1), (PIECES, 3, 2), (SPLITS, 3, 1)],
    "asan": [(ONE_KV, 3, 1), (WIDE, 2, 1), (SPLITS, 2, 2)],
    "tsan": [(ONE_KV, 2, 1), ("--d=64 --ffn=64 --n-q=2 --n-kv=2 --hd=64 --prefill=130", 3, 2)],
}
BUILDS = {   # in which order they are tried: what tells most of the time first
    "kernels.cu": ("plain", "asan", "tsan", "tests"),
    "layer.c": ("plain", "tests", "asan", "tsan"),
}
TESTS = {"kernels.cu": ["test_numbers.py"], "layer.c": ["test_lifetimes.py", "test_numbers.py"]}
LONG_TESTS = "(thousand or passes_the_wrap or twelve_layers or dependent_launches)"   # asked last

# name, the text, what takes its place; REASONS says why some are not caught. Stage 7's kernels:
MUTANTS = [
    # barriers and waits within a block
    ("block barrier gone after mbarrier_init", "    __syncthreads();\n", ""),
    ("loaders never meet", "named_barrier_sync(1, LOADERS)", "(void)0"),
    ("loaders' barrier expects a warp too few", "named_barrier_sync(1, LOADERS)",
     "named_barrier_sync(1, LOADERS - 32)"),
    ("producer's barrier with the loaders expects a warp too many",
     "named_barrier_arrive(2, LOADERS + 32)", "named_barrier_arrive(2, LOADERS + 64)"),
    ("vector announced before all loaders have stored it",
     "    loaders_meet();\n    if (loader_thread(a) == 0) mbarrier_arrive(s->placed",
     "    if (loader_thread(a) == 0) mbarrier_arrive(s->placed"),
    ("queries published before all loaders have stored them",
     "    loaders_meet();\n    if (loader_thread(a) == 0) publish_in_block",
     "    if (loader_thread(a) == 0) publish_in_block"),
    ("loaders do not meet after one has waited for a phase",
     "(launch + 1) * (uint32_t)each);\n    loaders_meet();\n",
     "(launch + 1) * (uint32_t)each);\n"),
    ("loaders do not meet before they put a piece in place",
     "        loaders_meet();\n        put_vector(a, s, a->act", "        put_vector(a, s, a->act"),
    ("consumers do not wait for the vector", "            mbarrier_wait(s->placed + tag.vector, 0);\n", ""),
    ("every piece of down waits for the vector of the first", "struct tag tag = { DOWN, piece, c, DOWN + piece,",
     "struct tag tag = { DOWN, piece, c, DOWN,"),
    ("a tile does not wait for the newest queries", "(uint32_t)tag.vector + 1);", "(uint32_t)tag.vector);"),
    ("__syncwarp gone after waiting for queries",
     "            wait_for_turn(a, s, w, lap);\n        }\n        __syncwarp();\n",
     "            wait_for_turn(a, s, w, lap);\n        }\n"),
    ("products do not wait for their turn", "            wait_for_turn(a, s, w, lap);\n", ""),
    ("a product waits for the turn of the next lap", "older += a->g.warps, lap--;", "older += a->g.warps;"),
    ("one barrier for the give-backs of all laps",
     "    mbarrier_arrive(s->empty[lap % 2] + w);\n}\n\n"
     "DEVICE void wait_until_given_back(struct shared *s, int w, uint32_t lap)\n{\n"
     "    mbarrier_wait(s->empty[lap % 2] + w, lap / 2 % 2);",
     "    mbarrier_arrive(s->empty[0 * lap] + w);\n}\n\n"
     "DEVICE void wait_until_given_back(struct shared *s, int w, uint32_t lap)\n{\n"
     "    mbarrier_wait(s->empty[0] + w, lap % 2);"),
    ("parity of a give-back is that of its lap",
     "    mbarrier_wait(s->empty[lap % 2] + w, lap / 2 % 2);", "    mbarrier_wait(s->empty[lap % 2] + w, lap % 2);"),
    ("the rest of a lap is left out", "offer(s, p, nothing, 0);", ";"),
    ("nothing is not given back",
     "            if (lane_id() == 0) give_back(s, w, lap);\n            continue;\n", "            continue;\n"),
    ("__syncwarp gone between storing sums and counting them",
     "store_piece(a, tag.part, i, mine);\n    }\n    __syncwarp();\n",
     "store_piece(a, tag.part, i, mine);\n    }\n"),
    ("a slot is read before it is full", "        mbarrier_wait(s->full + w, lap % 2);\n", ""),
    ("a tile's slot is given back before it is scored", "    score_tile(a, K, score);\n",
     "    if (lane_id() == 0) give_back(s, w, lap);\n    score_tile(a, K, score);\n"),
    ("__syncwarp gone before a chunk's slot is given back",
     "    __syncwarp();\n    if (lane_id() == 0) give_back(s, w, lap);\n",
     "    if (lane_id() == 0) give_back(s, w, lap);\n"),
    ('__syncwarp gone after fetching the row that is being written', "(V + i) = zero;\n    __syncwarp();\n",
     "(V + i) = zero;\n"),
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
    ("slot: two arrivals expected to free it", "mbarrier_init(s->empty[odd] + w, 1)",
     "mbarrier_init(s->empty[odd] + w, 2)"),
    ("a tile of a unit not waited for", "i < first + count; i++) {", "i < first + count - 1; i++) {"),
    ("a tile does not wait for its place", "queries + queries_of_tile(t - start),", "queries,"),
    ("a tile's place given away before it is merged",
     "        merge_tiles(a, s, &m, i % UNIT_TILES, step);\n"
     "        if (i + UNIT_TILES < tiles) publish(a, s, ++queries);\n",
     "        if (i + UNIT_TILES < tiles) publish(a, s, ++queries);\n"
     "        merge_tiles(a, s, &m, i % UNIT_TILES, step);\n"),
    ("consumers' parity never flips", "mbarrier_wait(s->full + w, lap % 2);", "mbarrier_wait(s->full + w, 0);"),
    ("producer's laps are not counted", "    p->lap++;\n", ""),
    ("producer's first wait does not pass", "wait_until_given_back(s, p->w, p->lap - 1);",
     "wait_until_given_back(s, p->w, p->lap);"),
    ("parity of a block's second unit", "*parities ^= 1u << i;", ";"),
    ("half of the bytes expected", "(uint32_t)(4 * r.count * n)", "(uint32_t)(2 * r.count * n)"),
    # between blocks: waits, epochs, counts, order
    ("no wait for queries, keys and values",
     "if (units_of_block(a, n)) wait_for_phase(a, QKV, 0, launch, a->g.chunks[QKV]);", ""),
    ('no wait for attention', "    wait_for_phase(a, ATTEND, 0, launch, a->g.groups * a->g.max_units);\n",
     ""),
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
     "while (c >= (part + 1) * part_chunks) part++;", ""),
    ("a chunk of gate and up counted with the next one's piece",
     "while (c >= (part + 1) * part_chunks)", "while (c + 1 >= (part + 1) * part_chunks)"),
    ("chunks counted with the phase's first piece", "atomic_add_release(counter(a, tag.phase, tag.part)",
     "atomic_add_release(counter(a, tag.phase, 0)"),
    ("down counted in no step", "(tag.phase != DOWN || a->g.pieces > (int)gridDim.x)",
     "tag.phase != DOWN"),
    ("chunks counted without release", "atomic_add_release(counter(a, tag.phase, tag.part)",
     "atomic_add_relaxed(counter(a, tag.phase, tag.part)"),
    ("attention counted without release", "atomic_add_release(counter(a, ATTEND, 0)",
     "atomic_add_relaxed(counter(a, ATTEND, 0)"),
    ("attention counted before all loaders have stored it",
     "    loaders_meet();\n    if (t == 0) atomic_add_release(counter(a, ATTEND",
     "    if (t == 0) atomic_add_release(counter(a, ATTEND"),
    ("pieces counted without release or acquire", "atomic_add_acq_rel(count, 1)",
     "atomic_add_relaxed(count, 1)"),
    ("pieces not counted from zero in the next step", "store_relaxed(count, 0);", ";"),
    # who does what
    ("last chunk of a phase not marked", "int last = next >= chunks ||",
     "int last = next > chunks ||"),
    ("rows of a chunk not gone on from the last", "r.low += stride, r.high += stride;",
     "r.low += stride;"),
    ("queries go on as if all heads were one matrix",
     "if (phase == QKV) r = rows_of(a, phase, c);", ""),
    ("pairs of the first chunk for all", "r.count = pairs_in(a, phase, c);", ""),
    ("last chunk of a piece of gate and up not marked", " || next >= (part + 1) * part_chunks;", ";"),
    ("last chunk of a piece of down not marked",
     "int last = c + a->g.warps * step >= chunks", "int last = c + a->g.warps * step > chunks"),
    ('tag with the tile of the group, not of the unit', "{ ATTEND, group, t - start,",
     "{ ATTEND, group, t,"),
    ("blocks beyond the last team work too", "s.team < s.teams ? b % pieces : pieces",
     "b % pieces"),
    ("each team does the chunks of all", "c += step, low += step * pairs",
     "c++, low += pairs"),
    ("rows of down of one team for all", "a->down + share.team * pairs * a->ffn", "a->down"),
    ("a stripe that is left multiplied twice", "                k += STRIPE;\n", ""),
    ("a row's pieces done by different warps", "    finish_lap(a, s, p);   /* each of a row's pieces to the same warp */\n", ""),
    ("finishing warp adds another warp's rows", "first = tag.item % step", "first = share.team"),
    ("columns of the first piece of down for all", "+ (int64_t)piece * a->g.piece;", ";"),
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
    ('keys beyond the last are scored', "8 * n + 2 * t + j < keys",
     "8 * n + 2 * t + j < TILE_KEYS"),
    ('values beyond the last key are multiplied by zero', "        *(bits128 *)(V + i) = zero;\n",
     "        ;\n"),
    ("no tile for a position at a tile's edge", "(int)(pos / TILE_KEYS) + 1",
     "(int)((pos + TILE_KEYS - 1) / TILE_KEYS)"),
    ("position max_seq_len is taken", "pos < p.rows ? pos : -1", "pos <= p.rows ? pos : -1"),
    ("a bad position is not remembered", "*a.status = 4;", ";"),
    ("half of a cache row is an element off", "cache[at + half] =", "cache[at + half + 1] ="),
    # arithmetic
    ('scores not scaled', "q.v[j] *= a->score_scale * LOG2_E;",
     ";"),
    ("eps left out", "squares / (float)n + a->eps)", "squares / (float)n)"),
    ("mean over d - 1", "squares / (float)n +", "squares / (float)(n - 1) +"),
    ("norm's weight left out", "x->v[i] *= w.v[i];", ";"),
    ("a vector without a norm keeps the scale before it",
     "if (!weight && loader_thread(a) == 0) s->scale = 1;", ""),
    ('hi of a vector for its lo', "s.lo = *(const bits128 *)(x + lo);",
     "s.lo = s.hi;"),
    ('lo of a vector left out', "        mma_bf16(c[half][1], s.w[half].v, s.lo.v + 2 * half);\n",
     ""),
    ('lo of a weight of attention left out', "        split_pair(e[0], e[1], two, two + 1);\n",
     "        split_pair(e[0], e[1], two, two + 1), two[1] = 0;\n"),
    ("no residual around attention", "bf16_to_f32(a->x[i]) + y.low", "y.low"),
    ("no residual around the MLP", "float sum = a->x1[row];", "float sum = 0;"),
    ("rotation in the wrong direction", "*high = b * c + a * s;", "*high = b * c - a * s;"),
    ('merge of tiles does not rescale', "float e = exp2_approx(m->max",
     "float e = 1 + 0 * exp2_approx(m->max"),
    ('merge of units: sums merged before not rescaled', "sum[j] = fmaf(e, bits_f32(one->sum.v[j]), sum[j]);",
     "sum[j] += bits_f32(one->sum.v[j]);"),
    ('merge of units: weight merged before not rescaled', "weight = fmaf(e, one->weight, weight);",
     "weight += one->weight;"),
    ('merge of units: a unit too few', "    for (int u = 0; u < units; u++) {\n",
     "    for (int u = 0; u < units - 1; u++) {\n"),
    ("unit counted before all loaders have stored it", "    store_unit(a, &m, group, split);\n    loaders_meet();\n",
     "    store_unit(a, &m, group, split);\n"),
    ("slice merged before all of it is fetched", "    fetch_slice(a, n, group, from, count);\n    loaders_meet();\n",
     "    fetch_slice(a, n, group, from, count);\n"),
    ("slice merged before the other units are there",
     "    if (t == 0) wait_at_least(done, (launch + 1) * (uint32_t)most);\n", ""),
    ("slice merged before all loaders know that the units are there",
     "        loaders_meet();\n        merge_slice(a, n, group, u / a->g.groups);\n",
     "        merge_slice(a, n, group, u / a->g.groups);\n"),
    ("every unit counts for one share", "most * (split + 1) / n.units - most * split / n.units",
     "1"),
    ("merge of units: a slice of the next numbers", "int at = 4 * (from + i % count)",
     "int at = 4 * (from + (i + 1) % count)"),
    ("tag with the tile of the unit, not of the group", "queries_of_tile(t - start), 0, t };",
     "queries_of_tile(t - start), 0, t - start };"),
    ("scores in the wrong base", "a->score_scale * LOG2_E",
     "a->score_scale"),
    ("halves of a stripe by the same half of the vector", "s.hi.v + 2 * half",
     "s.hi.v"),
    ("results of another segment added", "if (lane_id() % 4 != segment) sum = 0;",
     ";"),
    ("odd dimensions as even ones", "pick_bytes(a, b, 0x7632)",
     "pick_bytes(a, b, 0x5410)"),
]

SIX = [
    # the grid barrier
    ("arrivals are not counted on", "    *arrivals += gridDim.x;\n", ""),
    ("grid barrier lets go one arrival early", "wait_at_least(barrier, *arrivals)",
     "wait_at_least(barrier, *arrivals - 1)"),
    ("grid barrier expects one arrival too many", "*arrivals += gridDim.x", "*arrivals += gridDim.x + 1"),
    ("grid barrier does not wait", "        wait_at_least(barrier, *arrivals);\n", ""),
    ("grid barrier arrives without release", "atomic_add_release(barrier, 1)", "atomic_add_relaxed(barrier, 1)"),
    ("grid barrier counts an arrival twice", "atomic_add_release(barrier, 1)", "atomic_add_release(barrier, 2)"),
    ("block does not meet before it arrives", "gridDim.x;\n    __syncthreads();\n", "gridDim.x;\n"),
    ("block does not meet after it was let go", "*arrivals);\n    }\n    __syncthreads();\n", "*arrivals);\n    }\n"),
    ("no barrier before attention", "grid_barrier(a.barrier, &arrivals);\n    TIMED(&a, ATTEND", "TIMED(&a, ATTEND"),
    ("no barrier before the merge", "grid_barrier(a.barrier, &arrivals);\n    TIMED(&a, MERGE", "TIMED(&a, MERGE"),
    ("no barrier before the output projection", "grid_barrier(a.barrier, &arrivals);\n    TIMED(&a, OUT",
     "TIMED(&a, OUT"),
    ("no barrier before gate and up", "grid_barrier(a.barrier, &arrivals);\n    TIMED(&a, GATE_UP",
     "TIMED(&a, GATE_UP"),
    ("no barrier before down", "grid_barrier(a.barrier, &arrivals);\n    TIMED(&a, DOWN", "TIMED(&a, DOWN"),
    ("the count is not kept for the next step", "if (threadIdx.x == 0) a.barrier_base[blockIdx.x] = arrivals;", ""),
    ("the count is kept by block 0 alone", "if (threadIdx.x == 0) a.barrier_base",
     "if (threadIdx.x + blockIdx.x == 0) a.barrier_base"),
    # barriers within a block
    ("block's sum is read before it is written", "= v;\n    __syncthreads();\n    v = 0;", "= v;\n    v = 0;"),
    ("normed vector is read before it is written", "*= scale;\n    }\n    __syncthreads();\n", "*= scale;\n    }\n"),
    ("queries overwrite the scores of the last unit",
     "        __syncthreads();                          /* s of the last unit was read */\n", ""),
    ("scores before the queries are in place", "sizeof *V);\n        __syncthreads();\n", "sizeof *V);\n"),
    ("weights before the scores are in place", "rep, s);\n        __syncthreads();\n", "rep, s);\n"),
    ("sums before the weights are in place", "kv, split);\n        __syncthreads();\n", "kv, split);\n"),
    ("vector is read before it is copied", "sizeof *x);\n    __syncthreads();\n", "sizeof *x);\n"),
    # who does what, and bounds
    ("each unit done by two warps", "return (int)(gridDim.x * (blockDim.x / 32));",
     "return (int)(gridDim.x * (blockDim.x / 32)) - 1;"),
    ("blocks all begin with the same unit", "threadIdx.x / 32 * gridDim.x + blockIdx.x", "threadIdx.x / 32 * gridDim.x"),
    ("keys of KV head 0 for all", "int kv = u % a->n_kv, split", "int kv = 0, split"),
    ("keys of the next KV head", "first) * a->hd;\n        bits128 k[", "first) * a->hd * 2;\n        bits128 k["),
    ("values of KV head 0 for all", "copy_in(V, a->v_cache + at,", "copy_in(V, a->v_cache + first * a->hd,"),
    ("last key of the last split is left out", "left < SPLIT_KEYS ? (int)left", "left < SPLIT_KEYS ? (int)left - 1"),
    ("a key too many in the last split", "left < SPLIT_KEYS ? (int)left", "left < SPLIT_KEYS ? (int)left + 1"),
    ("no split for a position at a split's edge", "splits = (int)(pos / SPLIT_KEYS) + 1;\n    float",
     "splits = (int)((pos + SPLIT_KEYS - 1) / SPLIT_KEYS);\n    float"),
    ("merge leaves out the last split", "splits = (int)(pos / SPLIT_KEYS) + 1;\n    for",
     "splits = (int)(pos / SPLIT_KEYS);\n    for"),
    ("merge takes a split too many", "splits = (int)(pos / SPLIT_KEYS) + 1;\n    for",
     "splits = (int)(pos / SPLIT_KEYS) + 2;\n    for"),
    ("a key beyond the last is loaded and scored", "first + u * step < keys)\n", "first + u * step <= keys)\n"),
    ("a value beyond the last key is added", "key < keys; key++", "key <= keys; key++"),
    ("rows are read past their end", "int inside = i + 256 * u < n;", "int inside = i + 256 * u <= n;"),
    ("products past the end of the vector", "if (i + 256 * u >= n) break;", "if (i + 256 * u > n) break;"),
    ("position max_seq_len is taken", "pos < p.rows ? pos : -1", "pos <= p.rows ? pos : -1"),
    ("a bad position is not remembered", "*a.status = 4;", ";"),
    ("half of a cache row is an element off", "cache[at + half] =", "cache[at + half + 1] ="),
    # arithmetic
    ("upper halves of the vector not apart", "(i & 4 ? n / 2 : 0)", "(i & 4 ? n / 2 - 4 : 0)"),
    ("scores not scaled", "+ i] * a->score_scale;", "+ i];"),
    ("eps left out", "/ (float)d + eps)", "/ (float)d)"),
    ("norm's weight left out", "v * w.v[j / 4].v[j % 4]", "v"),
    ("no residual around attention", "bf16_to_f32(a->x[2 * u + r]) + y[r]", "y[r]"),
    ("no residual around the MLP", "f32_to_bf16(a->x1[2 * u + r] + y[r])", "f32_to_bf16(y[r])"),
    ("gate is not gated", "gate / (1.0f + expf(-gate)) * up", "gate * up"),
    ("merge does not rescale", "expf(a->split_max[head + j] - max)", "expf(0 * (a->split_max[head + j] - max))"),
    ("merge forgets the weights", "weight = fmaf(e, a->split_weight[head + j], weight)", "weight += e"),
    ("maximum of a lane for that of its warp",
     "for (int m = 16; m; m /= 2) max = fmaxf(max, shfl_xor_f32(max, m));\n    float base", "float base"),
    ("rotation in the wrong direction", "*high = b * c + a * s;", "*high = b * c - a * s;"),
    ("values are rotated too", "if (is_q || is_k) rotate", "rotate"),
]

# The host side that the stages share, and what is a stage's own.
HOST = [
    ("scratch is not cleared", "return cudaMemset(l->scratch, 0, bytes) ? LAYER_CUDA_FAILED : LAYER_OK;",
     "return LAYER_OK;"),
    ("residual stream has half of its memory", "a->x1 = take(&at, (size_t)l->c.d * f)",
     "a->x1 = take(&at, (size_t)l->c.d * f / 2)"),
    ("queries have half of their memory", "a->roped_q = take(&at, q * f)", "a->roped_q = take(&at, q * f / 2)"),
    ("one block more than multiprocessors", "c->max_blocks : sms;", "c->max_blocks : sms + 1;"),
    ("eps does not reach the kernel", "a->eps = (float)l->c.eps;", ""),
    ("scores divided by hd", "(float)(1 / sqrt((double)l->c.hd))", "(float)(1 / (double)l->c.hd)"),
    ("RoPE turns by the wrong power", "-2.0 * i / (double)a->hd", "-1.0 * i / (double)a->hd"),
    ("half of the RoPE angles sent", "sizeof(double) * (size_t)a->hd / 2", "sizeof(double) * (size_t)a->hd / 4"),
    ("caches swapped", "a->k_cache = l->k_cache, a->v_cache = l->v_cache;",
     "a->k_cache = l->v_cache, a->v_cache = l->k_cache;"),
    ("gate and up swapped", "a->gate = l->w.gate, a->up = l->w.up", "a->gate = l->w.up, a->up = l->w.gate"),
    ("norms swapped", "a->in_norm = l->w.in_norm, a->post_norm = l->w.post_norm;",
     "a->in_norm = l->w.post_norm, a->post_norm = l->w.in_norm;"),
    ("position max_seq_len is taken by the host", "|| pos >= l->c.max_seq_len)", "|| pos > l->c.max_seq_len)"),
    ("negative positions are taken", "if (pos < 0 || pos >=", "if (pos >="),
    ("alignment by the even byte", "((uintptr_t)p & 15) != 0", "((uintptr_t)p & 1) != 0"),
    ("alignment of x_out is not asked", "if (misaligned(x) || misaligned(x_out))", "if (misaligned(x))"),
    ("alignment of a position is not asked", "if ((uintptr_t)pos_on_device & 7)", "if ((uintptr_t)pos_on_device & 0)"),
    ("a null pointer among the weights", "if (!all[i]", "if (0 && !all[i]"),
    ("any number of KV heads", "c->n_q % c->n_kv", "0"),
    ("rows of the cache for the position on the device", "{ pos_on_device, 0, l->c.max_seq_len }",
     "{ pos_on_device, 0, l->c.max_seq_len + 1 }"),
    ("scratch is not given back", "if (l->scratch && cudaFree(l->scratch)) bad = 1;", ""),
    ("handle is not given back", "    free(l);\n    return bad ?", "    return bad ?"),
    ("a build that fails leaves what it has", "if (bad) layer_teardown(l);\n    else", "if (!bad)"),
    ("a build that fails hands its layer out", "else *out = l;", "*out = l;"),
]
HOST_6 = [
    ("launched as any kernel, not all blocks at once", "together.val.cooperative = 1", "together.val.cooperative = 0"),
    ("a failed launch is not reported", "? LAYER_CUDA_FAILED : LAYER_OK;\n}\n\n/* refuse what no stage",
     "* 0;\n}\n\n/* refuse what no stage"),
    ("shared memory without the room for block sums", "l->shared = (numbers + 32) * sizeof(float)",
     "l->shared = numbers * sizeof(float)"),
    ("half of the shared memory", "(numbers + 32) *", "(numbers / 2 + 32) *"),
    ("shared memory of a tile without its values", " + (size_t)(SPLIT_KEYS *", " + 0 * (size_t)(SPLIT_KEYS *"),
    ("a split too few has memory", "(l->c.max_seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS)", "l->c.max_seq_len / SPLIT_KEYS)"),
]
# How stages 7 and 8 launch.
HOST_7 = [
    ("launched as any kernel, not all blocks at once", "together = { .cooperative = 1 }", "together = { .cooperative = 0 }"),
    ("a failed launch is not reported", "|| cudaGraphLaunch(l->exec, stream) ?", "|| (cudaGraphLaunch(l->exec, stream), 0) ?"),
    ("a step has the parameters of another", "return cudaGraphExecKernelNodeSetParams(l->exec, l->node, &p)", "return 0"),
    ("what is launched is not given back", "l->exec && cudaGraphExecDestroy(l->exec)", "0"),
]

# What stage 8's kernels have of their own; the rest of them are stage 7's chunks.
EIGHT = [
    ("a constant bit of the exponent missing", "| 0x38383838u", "| 0x30303030u"),
    ("the tops of the second four not turned", "upper_bytes(tops << 4 | tops >> 28)", "upper_bytes(tops >> 4)"),
    ("the window an exponent too wide", ">= (uint32_t)WINDOW;", "> (uint32_t)WINDOW;"),
    ("exceptions keep their place among the weights", "return outside(w, base) ? STAND_IN :", "return 0 ? STAND_IN :"),
    ("what the stand-ins add stays", "fmaf(-stand_in, e.inputs, sum)", "fmaf(0 * stand_in, e.inputs, sum)"),
    ("a row's sum not scaled back", "sum), scale, e.products)", "sum), 1, e.products)"),
    ("lo of the input of an exception left out", "bf16_to_f32(hi[column]) + bf16_to_f32(hi[n + column])",
     "bf16_to_f32(hi[column])"),
    ("the first exception of a row skipped", "for (uint32_t i = (uint32_t)lane_id(); i < count; i += 32)",
     "for (uint32_t i = (uint32_t)lane_id() + 1; i < count; i += 32)"),
    ("tops of another step", "(r.at + r.n + k / 2 + 8 * lane_id())", "(r.at + r.n + k / 2 + 8)"),
    ("the rest of a row packed like a whole step", "if (step + STEP > n) return c / 8;", ""),
    ("packed rows as long as with a list behind them", "return m->packed ? n / 2 * 3 : 2 * n;",
     "return m->packed ? n / 2 * 3 + 4 * m->words : 2 * n;"),
    ("a lane's word is of the list before", "m->lists[row * m->words + lane_id()]",
     "m->lists[(row ? row - 1 : row) * m->words + lane_id()]"),
    ("the lists of every piece of down are the first's", "tag.phase == DOWN ? tag.part * a->d : 0;", "0;"),
    ("exceptions begin at the first word of a list", "(lane_id() + 2) % 32", "lane_id()"),
    ("room for one exception more than there is", "room = (uint32_t)r.m->words - 2;", "room = (uint32_t)r.m->words - 1;"),
    ("exceptions without room are all the first row's", "r.m->more[place + i - room]", "r.m->more[i - room]"),
    ("lists written a word too near to each other", "a.lists + r * a.words);", "a.lists + r * (a.words - 1));"),
    ("bytes of the low rows announced twice", "(uint32_t)(bytes + r.count * high.bytes)", "(uint32_t)(2 * bytes)"),
    ("high rows on top of the low ones", "copy_rows(a, s, p, bytes, high", "copy_rows(a, s, p, 0, high"),
    ("every piece of down is the first", "s.at += m->packed ? piece * a->d", "s.at += m->packed ? 0 * a->d"),
    ("one list of exceptions for all lanes", "(uint32_t)(c + j) << 16", "(uint32_t)c << 16"),
    ("a row's count is of one lane", "    for (int m = 16; m; m /= 2) count += shfl_xor_u32(count, m);\n", ""),
]

REASONS = {
    "pairs of the first chunk for all":
        "widths are multiples of 64, so all chunks of a phase have as many",
    "products do not wait for their turn":
        "when a product begins changes no bit of a result",
    "scratch is not cleared":
        "in stage 6 a counter and the count that a block begins with: what the CPU target "
        "fills memory with is the same in both",
    "one block more than multiprocessors":
        "at small shapes two blocks fit on one; a grid that does not fit the cooperative "
        "launch refuses",
    "proxy fence gone after writing to a slot":
        "the CPU target wants the fence before a bulk copy reads what was stored, not "
        "before one overwrites it",
    "rows are read past their end":
        "16 bytes too many are read and then dropped; in the driver's memory something "
        "follows every row",
    "lo of a weight of attention left out":
        "a weight is then off by 2^-9 of itself at most: below the tolerance",
    "what the stand-ins add stays":
        "the smallest weight of the window times a few inputs: below the tolerance of what "
        "runs here; test_packed.py draws weights for which it is not",
    **dict.fromkeys(
        ("the lists of every piece of down are the first's", "room for one exception more than there is",
         "exceptions without room are all the first row's"),
        "exceptions that small in lists that short: below the tolerance; test_packed.py plants it "
        "among weights that have more of them"),
    "lo of the input of an exception left out":
        "a few products of a row are then off by 2^-9 of themselves: below the tolerance",
}



# stage: runs of its driver, faults of each file
FAULTS = {
    "stage6": (RUNS_6, {"kernels.cu": SIX, "layer.c": HOST + HOST_6}),
    "stage7": (RUNS, {"kernels.cu": MUTANTS, "layer.c": HOST + HOST_7}),
}
# Stage 8 multiplies what it has packed: the pointers that stage 7 gives its kernel are not read.
HOST_8 = [("gate and up swapped", "w->o, w->gate, w->up, w->down };", "w->o, w->up, w->gate, w->down };")]
SOURCE_8 = (ROOT / "stages" / "stage8" / "layer.c").read_text(encoding="utf-8")
FAULTS["stage8"] = (RUNS, {   # of the host side, what it has in common with the others
    "kernels.cu": EIGHT, "layer.c": HOST_8 + [
        fault for fault in HOST + HOST_7 if SOURCE_8.count(fault[1]) == 1 and fault[0] != HOST_8[0][0]]})


def all_faults():
    """(stage, file, name, text, what takes its place) of each."""
    return [(stage, file, *fault) for stage, (_, files) in FAULTS.items()
            for file, faults in files.items() for fault in faults]


def runs_of(stage, file, build):
    """What a build is run with. Of the two long caches, which are for attention, one is enough for the
    host side; and stage 8, whose attention is stage 7's, has them in plain runs, not in those of minutes."""
    left_out = UNITS if file == "layer.c" else LONG if (stage, build) == ("stage8", "tsan") else None
    return [run for run in FAULTS[stage][0][build] if run[0] != left_out]


def mutated(source, name, old, new):
    if source.count(old) != 1:
        raise LookupError(f"{name}: stands {source.count(old)} times in the source: {old!r}")
    return source.replace(old, new)


class Bench:
    """A folder in which mutants are built from the objects of a built tree, and run."""

    def __init__(self, folder, tree=None):
        self.folder, self.tree = folder, tree or folder
        self.sources = {(stage, file): (ROOT / "stages" / stage / file).read_text(encoding="utf-8")
                        for stage, file, *_ in all_faults()}
        if tree is None:
            shutil.copy(ROOT / "Makefile", folder)
            for part in ("cpu", "oracle", *FAULTS):
                shutil.copytree(ROOT / "stages" / part, folder / "stages" / part)
            env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
            subprocess.run(["make", "-s", "-j2", *targets(FAULTS)], cwd=folder, env=env, check=True,
                           stdout=subprocess.DEVNULL)

    def build(self, build, stage, file, source):
        """The path of a driver, or of a library for the tests, with this source in it."""
        own = pathlib.Path(tempfile.mkdtemp(prefix=f"{stage}-{build}-", dir=self.folder))
        made = self.tree / "build" / "cpu" / ("plain" if build == "tests" else build)
        compiler = ["-O1" if flag == "-O2" else flag   # sooner compiled, and as quick here
                    for flag in shlex.split((made / "flags").read_text()) if flag != "-g"]
        (own / file).write_text(source, encoding="utf-8")
        stages = self.tree / "stages"
        include = ["-I", str(stages / "cpu"), "-I", str(stages / stage)]
        sanitizer = [flag for flag in compiler if flag.startswith("-fsanitize=")]
        instrumented = build != "tsan" or file == "kernels.cu"
        flags = compiler if instrumented else [flag for flag in compiler if flag not in sanitizer]
        parts = [f"{stage}/kernels.o", f"{stage}/layer.o", "cpu/cpu.o"]
        parts.remove(f"{stage}/{file.split('.')[0]}.o")
        if build != "tests":
            parts += [f"{stage}/probes.o", f"{stage}/driver.o", "oracle/oracle.o"]
        result = own / ("liblayer.so" if build == "tests" else "driver")
        shared = ["-shared", "-Wl,-Bsymbolic"] if build == "tests" else []
        for command in (
                [*flags, "-w", *include, *(["-x", "c"] if file == "kernels.cu" else []), "-c", str(own / file),
                 "-o", str(own / "mutant.o")],
                [compiler[0], *shared, *sanitizer, "-o", str(result), str(own / "mutant.o"),
                 *(str(made / part) for part in parts), "-lm"]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise LookupError(f"does not compile:\n{done.stdout}")
        return result

    def catch(self, build, stage, file, source):
        """How this build catches the source: in a word, or None."""
        built = self.build(build, stage, file, source)
        try:
            if build == "tests":
                return self.ask_the_tests(stage, file, built)
            for shape, sms, seed in runs_of(stage, file, build):
                env = dict(os.environ, CPU_SMS=str(sms), CPU_SEED=str(seed))
                done = subprocess.run([str(built), *shape.split(), f"--seed={seed}"], env=env,
                                      timeout=SECONDS, stdin=subprocess.DEVNULL, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
                lines = done.stdout.strip().splitlines()
                if done.returncode or not lines or not lines[-1].startswith("PASS"):
                    return word_for(done.returncode, done.stdout)
        except subprocess.TimeoutExpired:
            return "endless"
        finally:
            shutil.rmtree(built.parent)
        return None

    def ask_the_tests(self, stage, file, library):
        """Whether the tests of numbers, and for the host side of lifetimes, fail with this library in the
        stage's place."""
        for which in (f"{stage} and not {LONG_TESTS}", f"{stage} and {LONG_TESTS}"):
            done = subprocess.run(
                [PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider",
                 *(str(ROOT / "tests" / tests) for tests in TESTS[file]), "-k", which],
                env=dict(os.environ, LAYER_LIBRARY=str(library), PYTHONDONTWRITEBYTECODE="1"),
                timeout=2 * SECONDS, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
            none = done.returncode == 5 and "not" not in which   # a file may have no long ones
            if done.returncode in (2, 4, 5) and not none:
                raise LookupError(f"pytest could not run the tests of {stage}: exit status {done.returncode}")
            if done.returncode and not none:
                return "test" if done.returncode == 1 else "crash"
        return None

    def catch_by_any(self, stage, file, source):
        """The same of the builds in turn, until one catches it: {build: word or None}."""
        seen = {}
        for build in BUILDS[file]:
            seen[build] = self.catch(build, stage, file, source)
            if seen[build]:
                break
        return seen


def targets(stages):
    return [f"build/cpu/{build}/{stage}/driver" for stage in stages for build in ("plain", "asan", "tsan")]


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


def line_of(stage, name, seen):
    """What became of a fault, and why nothing did."""
    caught = next((f"{build}: {word}" for build, word in seen.items() if word), None)
    return f"{stage}  {name:64}  " + (caught or f"NOT CAUGHT: {REASONS.get(name, 'no reason is known')}")


def verdict(results):
    """Of {(stage, name): seen}: lines that count, stage by stage, and whether that is enough."""
    missed = [key for key, seen in results.items() if not any(seen.values())]
    lines = []
    for stage in sorted({stage for stage, _ in results}):
        mine = [key for key in results if key[0] == stage]
        lines.append(f"{stage}: {len(mine) - sum(key in missed for key in mine)} of {len(mine)} faults are caught")
    lines.append(f"{len(results) - len(missed)} of {len(results)} faults are caught")
    unexplained = [key for key in missed if key[1] not in REASONS]
    return lines, not unexplained and len(results) - len(missed) >= REQUIRED * len(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="the table is also written there")
    parser.add_argument("--only", default="", help="only faults whose stage and name contain this")
    args = parser.parse_args()
    chosen = [fault for fault in all_faults() if args.only in f"{fault[0]} {fault[2]}"]
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="mutants.") as folder:
        bench, results, lines, unfit = Bench(pathlib.Path(folder)), {}, [], 0
        try:
            sources = [(stage, file, name, mutated(bench.sources[stage, file], name, old, new))
                       for stage, file, name, old, new in chosen]
        except LookupError as error:
            print(f"mutants: {error}", file=sys.stderr)
            return 2
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            whole = [(build, stage) for stage in FAULTS for build in BUILDS["layer.c"]]
            passed = [pool.submit(bench.catch, build, stage, "layer.c", bench.sources[stage, "layer.c"])
                      for build, stage in whole]
            tried = [pool.submit(bench.catch_by_any, stage, file, source) for stage, file, _, source in sources]
            for (build, stage), future in zip(whole, passed):
                if future.result():
                    pool.shutdown(cancel_futures=True)
                    print(f"mutants: {build}: {stage} without a fault does not pass", file=sys.stderr)
                    return 2
            for (stage, _, name, _), future in zip(sources, tried):
                try:
                    results[stage, name] = future.result()
                except LookupError as error:          # the others are tried all the same
                    print(f"mutants: {stage}: {name}: {error}", file=sys.stderr)
                    unfit += 1
                    continue
                lines.append(line_of(stage, name, results[stage, name]))
                print(lines[-1], flush=True)
    summary, good = verdict(results)
    print("\n".join(summary), f", in {time.time() - started:.0f} s", sep="")
    if args.out and not args.only:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join([*lines, *summary]) + "\n", encoding="utf-8")
    return 2 if unfit else 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
