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

ONE_KV = "--d=128 --ffn=192 --n-q=2 --n-kv=1 --hd=64 --prefill=70"
PIECES = "--d=128 --ffn=384 --n-q=4 --n-kv=2 --hd=64 --prefill=70"     # stage 6: of down
OCTETS = "--d=192 --ffn=128 --n-q=9 --n-kv=1 --hd=128 --rows=160 --at=128,150,3"   # 9 heads a KV head
UNITS = "--d=64 --ffn=64 --n-q=16 --n-kv=16 --hd=64 --rows=1100 --at=1000,64,1001"   # 8 splits of 2 tiles
LONG = "--d=64 --ffn=64 --n-q=65 --n-kv=65 --hd=64 --rows=640 --at=600,5"   # 2 splits of 5 tiles each
ACROSS = "--d=1088 --ffn=2112 --n-q=2 --n-kv=1 --hd=64 --rows=80 --at=70,3"   # a row shared by 4 warps, by 8
DEEP = "--d=64 --ffn=16448 --n-q=1 --n-kv=1 --hd=64 --rows=8 --at=3,4"     # 3 pieces of down
BROAD = "--d=8256 --ffn=192 --n-q=2 --n-kv=1 --hd=64 --rows=8 --at=3,4"    # 2 pieces, unequal, of d, in batches
SPLITS = "--d=64 --ffn=128 --n-q=6 --n-kv=2 --hd=64 --prefill=255"     # stage 6: 2 splits and 3
WIDE = "--d=64 --ffn=4800 --n-q=1 --n-kv=1 --hd=64 --prefill=5"        # stage 6: a vector fills the memory
RUNS = {           # of each build: shape, CPU_SMS, seed
    "plain": [(ONE_KV, 2, 1), (OCTETS, 3, 1), (ACROSS, 2, 1), (UNITS, 3, 1), (LONG, 3, 1), (BROAD, 2, 1),
              (DEEP, 2, 1)],
    "asan": [(ONE_KV, 3, 1), (OCTETS, 2, 2)],
    "tsan": [(ONE_KV, 2, 1), (LONG, 2, 1)],
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
TESTS = {"kernels.cu": ["test_numbers.py", "test_lifetimes.py::test_no_step_takes_words_of_an_older_one_for_its_own"],
         "layer.c": ["test_lifetimes.py", "test_numbers.py"]}
LONG_TESTS = "(thousand or passes_the_wrap or twelve_layers or dependent_launches)"   # asked last

# name, the text, what takes its place; REASONS says why some are not caught. Stage 7's kernels:
MUTANTS = [
    # mbarriers: counts
    ("a slot's readers: one too few", "mbarrier_init(s->empty + i, CONSUMERS);",
     "mbarrier_init(s->empty + i, CONSUMERS - 1);"),
    ("a slot's readers: one too many", "mbarrier_init(s->empty + i, CONSUMERS);",
     "mbarrier_init(s->empty + i, CONSUMERS + 1);"),
    ("high half: two arrivals expected", "mbarrier_init(s->full[1] + i, 1);", "mbarrier_init(s->full[1] + i, 2);"),
    ("sums of a chunk: a warp too few expected", "mbarrier_init(s->delivered + i, DELIVERERS);",
     "mbarrier_init(s->delivered + i, DELIVERERS - 1);"),
    ("sums of a chunk: a warp too many expected", "mbarrier_init(s->delivered + i, DELIVERERS);",
     "mbarrier_init(s->delivered + i, DELIVERERS + 1);"),
    ("sums of a chunk: taken twice", "mbarrier_init(s->taken + i, 1);", "mbarrier_init(s->taken + i, 2);"),
    ("tiles begin with one producer", "mbarrier_init(&s->tiles_begin, 2);", "mbarrier_init(&s->tiles_begin, 1);"),
    ("tiles begin with a third producer", "mbarrier_init(&s->tiles_begin, 2);", "mbarrier_init(&s->tiles_begin, 3);"),
    ("tiles are over with one producer", "mbarrier_init(&s->tiles_over, 2);", "mbarrier_init(&s->tiles_over, 1);"),
    ("tiles are over with a third producer", "mbarrier_init(&s->tiles_over, 2);", "mbarrier_init(&s->tiles_over, 3);"),
    ("mbarriers without their fence", "    mbarrier_init_fence();\n}", "}"),
    # named barriers, registers, prerequisites
    ("barrier of the block expects a warp too few", "READY_THREADS = 32 * BLOCK_WARPS", "READY_THREADS = 32 * BLOCK_WARPS - 32"),
    ("barrier of the block expects a warp too many", "READY_THREADS = 32 * BLOCK_WARPS", "READY_THREADS = 32 * BLOCK_WARPS + 32"),
    ("both producers prepare the mbarriers", "if (half == 0 && lane_id() == 0) prepare_barriers", "if (lane_id() == 0) prepare_barriers"),
    ("nobody prepares the mbarriers", "if (half == 0 && lane_id() == 0) prepare_barriers", "if (0) prepare_barriers"),
    ("producer does not arrive at the barrier of the block",
     "if (half == 0) named_barrier_arrive(READY, READY_THREADS);", "if (half == 0) ;"),
    ("second producer does not wait for the mbarriers",
     "else named_barrier_sync(READY, READY_THREADS);", "else named_barrier_arrive(READY, READY_THREADS);"),
    ("the warp without work stays away from the barrier of the block", "    else wait_until_ready();\n", ""),
    ("registers: consumers keep too many", "GROW_REGISTERS(128);", "GROW_REGISTERS(136);"),
    ("registers: attention wants more than there are", "GROW_REGISTERS(192);", "GROW_REGISTERS(208);"),
    ("registers: one warp of a warpgroup keeps its own",
     "        SHRINK_REGISTERS(64);\n",
     "        if (warp != EPILOGUE) SHRINK_REGISTERS(64);\n"),
    ("attention shrinks below what it has to grow to",
     "GROW_REGISTERS(192);",
     "SHRINK_REGISTERS(192);"),
    # slots of the ring
    ("consumers do not wait for a half", "            mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);\n", ""),
    ("consumers wait for the low half alone", "mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);",
     "mbarrier_wait(s->full[0] + c->in.slot, c->in.odd);"),
    ("consumers' parity never flips", "mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);",
     "mbarrier_wait(s->full[h] + c->in.slot, 0);"),
    ("a slot is given back before it is read",
     "        for (int h = 0; h < 2; h++) {\n"
     "            mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);\n"
     "            load_weights(l, w + h * pairs * runs, slot_half(a, c->in.slot, h), pairs,\n"
     "                         runs);\n"
     "        }\n"
     "        __syncwarp();\n"
     "        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n",
     "        for (int h = 0; h < 2; h++) mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);\n"
     "        __syncwarp();\n"
     "        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n"
     "        for (int h = 0; h < 2; h++)\n"
     "            load_weights(l, w + h * pairs * runs, slot_half(a, c->in.slot, h), pairs, runs);\n"),
    ("__syncwarp gone before a slot is given back",
     "        __syncwarp();\n        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n",
     "        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n"),
    ("a slot is not given back", "        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n", ""),
    ("consumers stay at one slot", "        next_turn(&c->in, a->g.slots);\n", ""),
    ("laps are not counted", "t->slot = 0, t->odd ^= 1;", "t->slot = 0;"),
    ("a slot more than there are", "if (++t->slot == slots)", "if (++t->slot > slots)"),
    ("laps of what is skipped are not counted", "    t->odd ^= (uint32_t)((t->slot + by) / slots) & 1;\n", ""),
    ("what is skipped is not skipped", "    t->slot = (t->slot + by) % slots;\n", ""),
    ("a producer does not wait for room", "    wait_for_room(s, p);\n    while (p->open", "    while (p->open"),
    ("a producer's first wait does not pass", "p->next.slot, p->next.odd ^ 1);", "p->next.slot, p->next.odd);"),
    ("half of the bytes expected", "mbarrier_expect(full, bytes);", "mbarrier_expect(full, bytes / 2);"),
    ("a copy without its bytes expected", "    mbarrier_expect(full, bytes);\n", ""),
    ("high halves on top of low ones", "bulk_load(slot_half(a, p->next.slot, p->half), from",
     "bulk_load(slot_half(a, p->next.slot, 0), from"),
    ("both halves told to the low one's mbarrier", "uint64_t *full = s->full[p->half] + p->next.slot;",
     "uint64_t *full = s->full[0] + p->next.slot;"),
    ("a producer stays at one slot", "    next_turn(&p->next, a->g.slots);\n", ""),
    ("halves overlap", "(2 * slot + half) * a->g.half", "(slot + half) * a->g.half"),
    ("any number of copies under way", "    while (p->open >= p->most) wait_for_oldest(s, p, a->g.slots);\n", ""),
    ("a producer waits for its first copy over and over", "    next_turn(&p->oldest, slots);\n", ""),
    ("a copy that has arrived is still counted as under way", "    p->open--;\n", ""),
    # sums of chunks
    ("sums written over before they are taken", "    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);\n    if (place", "    if (place"),
    ("a warp's first sums wait for ever", "mbarrier_wait(s->taken + out->slot, out->odd ^ 1);\n    if (place",
     "mbarrier_wait(s->taken + out->slot, out->odd);\n    if (place"),
    ("__syncwarp gone between sums and their arrival", "[place] = sum;\n    __syncwarp();\n", "[place] = sum;\n"),
    ("sums of a chunk are not announced", "[place] = sum;\n    __syncwarp();\n    if (lane_id() == 0) mbarrier_arrive(s->delivered + out->slot);\n",
     "[place] = sum;\n    __syncwarp();\n"),
    ("sums of all chunks in one place", "mbarrier_arrive(s->delivered + out->slot);\n    next_turn(out, SUMS);\n",
     "mbarrier_arrive(s->delivered + out->slot);\n"),
    ("sums are taken before they are there", "    mbarrier_wait(s->delivered + in->slot, in->odd);\n", ""),
    ("sums' parity never flips", "mbarrier_wait(s->delivered + in->slot, in->odd);", "mbarrier_wait(s->delivered + in->slot, 0);"),
    ("__syncwarp gone before sums are given back", "[lane_id() % DELIVERED];\n    __syncwarp();\n", "[lane_id() % DELIVERED];\n"),
    ("sums are not given back", "    if (lane_id() == 0) mbarrier_arrive(s->taken + in->slot);\n", ""),
    ("the epilogue has a place less for sums", "    next_turn(in, SUMS);\n", "    next_turn(in, SUMS - 1);\n"),
    ("a row's sum at its neighbour's place", "+ (warp & (p->across - 1))) + high;", "+ (warp & (p->across - 1))) + !high;"),
    ("sums of a warp's second pair over the first's", "((c.row + second) << p->bits)", "(c.row << p->bits)"),
    ("sums of warps across over each other", "<< p->bits) + (warp & (p->across - 1))) + high", "<< p->bits)) + high"),
    ("the first of two rows stays in both halves of the lanes", "float keep = second ? other : mine,", "float keep = mine,"),
    ("pairs of a warp exchanged", "fold(sum, fold(sums[1], sums[3], 16), 8)", "fold(fold(sums[1], sums[3], 16), sum, 8)"),
    ("half of the lanes left out of a wide row's sum", "    else sum += shfl_xor_f32(sum, 8);\n", ""),
    ("four lanes left out of a row's sum", "for (int m = 4; m; m /= 2) sum +=", "for (int m = 2; m; m /= 2) sum +="),
    ("the last warps across left out of a sum", "        if (m < bits) {\n", "        if (m + 1 < bits) {\n"),
    # tiles
    ("tiles not waited for to begin", "    mbarrier_wait(&s->tiles_begin, 0);\n", ""),
    ("tiles not waited for to be over", "    mbarrier_wait(&s->tiles_over, 0);\n", ""),
    ("tiles begin before there is room", "    wait_for_room(s, p);\n    mbarrier_arrive(&s->tiles_begin);\n",
     "    mbarrier_arrive(&s->tiles_begin);\n"),
    ("tiles are over before the slot after them is free",
     "    wait_for_room(s, p);\n    mbarrier_arrive(&s->tiles_over);\n", "    mbarrier_arrive(&s->tiles_over);\n"),
    ("keys of a tile not waited for", "    mbarrier_wait(s->full[0] + t.slot, t.odd);\n", ""),
    ("values of a tile not waited for", "    mbarrier_wait(s->full[1] + t.slot, t.odd);\n", ""),
    ("attention's parity never flips", "mbarrier_wait(s->full[0] + t.slot, t.odd);", "mbarrier_wait(s->full[0] + t.slot, 0);"),
    ("__syncwarp gone before a tile's slot is given back",
     "    __syncwarp();\n    if (lane_id() < CONSUMERS / ATTENTION)", "    if (lane_id() < CONSUMERS / ATTENTION)"),
    ("a tile's slot given back by one lane of each warp", "if (lane_id() < CONSUMERS / ATTENTION)", "if (lane_id() < 1)"),
    ("a tile's slot given back before its values are read",
     "    if (keys > 0)\n"
     "        load_values(v, slot_half(a, t.slot, 1) + 16 * warp * 2 * hd, keys, hd);\n"
     "    __syncwarp();\n"
     "    if (lane_id() < CONSUMERS / ATTENTION) mbarrier_arrive(s->empty + t.slot);\n",
     "    __syncwarp();\n"
     "    if (lane_id() < CONSUMERS / ATTENTION) mbarrier_arrive(s->empty + t.slot);\n"
     "    if (keys > 0)\n"
     "        load_values(v, slot_half(a, t.slot, 1) + 16 * warp * 2 * hd, keys, hd);\n"),
    ("a warp without keys does not give the slot back",
     "    mbarrier_wait(s->full[0] + t.slot, t.odd);\n    if (keys > 0)",
     "    if (keys <= 0) return;\n    mbarrier_wait(s->full[0] + t.slot, t.odd);\n    if (keys > 0)"),
    ("a unit stored before all warps have their sums", "keep_sums(s, &u, warp, hd);\n    named_barrier_sync(UNITS, 32 * ATTENTION);\n",
     "keep_sums(s, &u, warp, hd);\n"),
    ("sums of the next unit over those of this", "    named_barrier_sync(UNITS, 32 * ATTENTION);   /* before the next unit's sums */\n", ""),
    ("attention's barrier expects a warp too few", "named_barrier_sync(UNITS, 32 * ATTENTION);   /*",
     "named_barrier_sync(UNITS, 32 * ATTENTION - 32);   /*"),
    ("consumers do not pass the tiles", "    skip_turns(&w->in, a->g.slots, tiles_of_block(a, n));\n", ""),
    ("attention does not pass the chunks before the tiles",
     "    skip_turns(&in, a->g.slots, leg_of(a, QKV).to * a->g.p[QKV].pieces);\n", ""),
    ("attention passes one piece of the chunks before the tiles", "leg_of(a, QKV).to * a->g.p[QKV].pieces", "leg_of(a, QKV).to"),
    ("tiles are not copied", "        if (number == ATTEND) produce_tiles(a, s, &p, pos);\n", ""),
    ("the last tile has as many keys as the others: for the producers", "left < TILE_KEYS ? (uint32_t)left : TILE_KEYS", "TILE_KEYS"),
    ("the row being written is copied too soon", "uint32_t keys = left < TILE_KEYS ? (uint32_t)left : TILE_KEYS",
     "uint32_t keys = left < TILE_KEYS ? (uint32_t)left + 1 : TILE_KEYS"),
    ("the row being written is attended to as an old one",
     "left < TILE_KEYS ? (int)left : TILE_KEYS, warp,\n"
     "                    hd)",
     "left < TILE_KEYS ? (int)left + 1 : TILE_KEYS, warp,\n"
     "                    hd)"),
    ("the last old key is left out",
     "left < TILE_KEYS ? (int)left : TILE_KEYS, warp,\n"
     "                    hd)",
     "left < TILE_KEYS ? (int)left - 1 : TILE_KEYS, warp,\n"
     "                    hd)"),
    ("the last tile has as many keys as the others: for attention",
     "left < TILE_KEYS ? (int)left : TILE_KEYS, warp,\n"
     "                    hd)",
     "TILE_KEYS, warp,\n"
     "                    hd)"),
    ("each tile begins at the unit's first row", "for (; tile < end; tile++, from += TILE_KEYS * a->hd) {", "for (; tile < end; tile++) {"),
    ("each unit begins at the group's first row", "kv * a->pos.rows + (int64_t)tile * TILE_KEYS)", "kv * a->pos.rows)"),
    ("keys of KV head 0 for all", "(kv * a->pos.rows + (int64_t)tile", "(0 * a->pos.rows + (int64_t)tile"),
    ("keys by the group, not by the KV head", "int kv = unit % a->g.groups / a->g.octets, split", "int kv = unit % a->g.groups, split"),
    ("keys for values and values for keys", "p->half ? a->v_cache : a->k_cache", "p->half ? a->k_cache : a->v_cache"),
    ("keys for values", "p->half ? a->v_cache : a->k_cache", "a->k_cache"),
    # values that carry their step
    ("consumers are a step behind", "load_relaxed(a->launches + blockIdx.x) + 1;\n    struct consumer", "load_relaxed(a->launches + blockIdx.x);\n    struct consumer"),
    ("the epilogue is a step behind", "prepare_rotation(a, s, pos);\n    uint32_t epoch = load_relaxed(a->launches + blockIdx.x) + 1;",
     "prepare_rotation(a, s, pos);\n    uint32_t epoch = load_relaxed(a->launches + blockIdx.x);"),
    ("attention is a step behind", "load_relaxed(a->launches + blockIdx.x) + 1;\n    struct span", "load_relaxed(a->launches + blockIdx.x);\n    struct span"),
    ("launch count stands still", "store_relaxed(a->launches + blockIdx.x, epoch);", ";"),
    ("launches counted for block 0 alone", "store_relaxed(a->launches + blockIdx.x, epoch);", "store_relaxed(a->launches, epoch);"),
    ("launches counted twice", "store_relaxed(a->launches + blockIdx.x, epoch);", "store_relaxed(a->launches + blockIdx.x, epoch + 1 * !blockIdx.x);"),
    ("a word's own low bits stay in its tag", "(bits & ~(uint32_t)EPOCH_BITS) | (epoch & EPOCH_BITS)", "bits | (epoch & EPOCH_BITS)"),
    ("a tag of no bits", "EPOCH_BITS = 15", "EPOCH_BITS = 0"),
    ("a tag that reaches into the value", "(bits & ~(uint32_t)EPOCH_BITS) | (epoch & EPOCH_BITS)",
     "(bits & ~(uint32_t)EPOCH_BITS) | (epoch & 15 * EPOCH_BITS)"),
    ("a NaN handed on as zero", "f32_bits(value) : 0x7fc00000u;", "f32_bits(value) : 0;"),
    ("a NaN handed on as an infinity", "f32_bits(value) : 0x7fc00000u;", "f32_bits(value) : 0x7f800000u;"),
    ("the tag stays in the value", "return bits_f32(word & ~(uint32_t)EPOCH_BITS);", "return bits_f32(word);"),
    ("no word is old", "return (word ^ epoch) & EPOCH_BITS;", "return 0 * (word ^ epoch);"),
    ("every word is old", "return (word ^ epoch) & EPOCH_BITS;", "return (word ^ ~epoch) & EPOCH_BITS;"),
    ("the second two of four words are not asked", "stale(w.v[1], epoch) | stale(w.v[2], epoch)\n         | stale(w.v[3], epoch);", "stale(w.v[1], epoch);"),
    ("the first of four words is not asked", "return stale(w.v[0], epoch) | stale(w.v[1], epoch)", "return stale(w.v[1], epoch)"),
    ("a vector is taken as it is", "if (i < live) wrong |= any_stale(w[i][j], epoch);", ";"),
    ("of a vector the first eight words are asked", "if (i < live) wrong |= any_stale(w[i][j], epoch);",
     "if (i < live && i + j == 0) wrong |= any_stale(w[i][j], epoch);"),
    ("queries are taken as they are", "wrong |= any_stale(w[m][0], epoch) | any_stale(w[m][1], epoch);", ";"),
    ("of eight words of a query four are asked", "any_stale(w[m][0], epoch) | any_stale(w[m][1], epoch)", "any_stale(w[m][0], epoch)"),
    ("a unit's sums are taken as they are", "                       | any_stale(p->sum[0], epoch) | any_stale(p->sum[1], epoch);\n        p->max",
     ";\n        p->max"),
    ("a unit's second four sums are taken as they are", "any_stale(p->sum[0], epoch) | any_stale(p->sum[1], epoch);\n        p->max",
     "any_stale(p->sum[0], epoch);\n        p->max"),
    ("a unit's maximum is taken as it is", "uint32_t wrong = stale(max, epoch) | stale(weight, epoch)", "uint32_t wrong = stale(weight, epoch)"),
    ("a unit's weight is taken as it is", "uint32_t wrong = stale(max, epoch) | stale(weight, epoch)", "uint32_t wrong = stale(max, epoch)"),
    ("the newest key is taken as it is", "uint32_t wrong = any_stale(key, epoch) | any_stale(n->value[0], epoch)", "uint32_t wrong = any_stale(n->value[0], epoch)"),
    ("the newest values are taken as they are", "any_stale(key, epoch) | any_stale(n->value[0], epoch)\n                       | any_stale(n->value[1], epoch);", "any_stale(key, epoch);"),
    ("the newest values' second four are taken as they are", "\n                       | any_stale(n->value[1], epoch);", ";"),
    ("the residual stream is taken as it is", "start = spin_start(); stale(word, epoch);) {\n", "start = 0; 0 * start;) {\n"),
    ("the residual stream is asked once more and then taken", "    for (uint64_t start = spin_start(); stale(word, epoch);) {\n",
     "    uint64_t start = 0;\n    if (stale(word, epoch)) {\n"),
    ("an old residual is asked for at another row", "y.high += residual(a, now.high, row + pairs, epoch);", "y.high += residual(a, now.high, row, epoch);"),
    ("the norm's residuals carry no tag", "r.high = (uint32_t)a->x[row + pairs] << 16 | (epoch & EPOCH_BITS);", "r.high = (uint32_t)a->x[row + pairs] << 16;"),
    ("nobody waits for a hint", "if (lane_id() == 0) wait_hint(hint_of(a, kind, i), epoch * words);", ";"),
    ("words are hinted at twice", "if (lane_id() == 0) count_relaxed(hint, words);", "if (lane_id() == 0) count_relaxed(hint, 2 * words);"),
    ("hints on top of what follows them", "(a->first_hint[kind] + i) * LINE", "(a->first_hint[kind] + i + 1) * 8 * LINE"),
    # who does what
    ("ranks below zero", "return rank < 0 ? rank + (int)gridDim.x : rank;", "return rank;"),
    ("one chunk too many for a block", "(rank_of_block(a, phase) < p->extra);", "(rank_of_block(a, phase) <= p->extra);"),
    ("chunks that do not divide are left out", "return p->each + (rank_of_block(a, phase) < p->extra);", "return p->each;"),
    ("each block's first chunk for all its chunks",
     "c += d.step, r.at += r.stride) {",
     "c += 0 * d.step) {"),
    ("a leg begins with the first chunk",
     "int c = d.first + i * d.step;\n"
     "    struct rows",
     "int c = d.first;\n"
     "    struct rows"),
    ("rows of Q, K and V as if all heads were one matrix", "        if (phase == QKV) r = rows_of(a, QKV, piece, c, p->half);\n", ""),
    ("rows of Q, K and V by the first pair of the chunk before", "projection_rows(a, c * m->pairs, half)", "projection_rows(a, c * m->pairs - (c > 0), half)"),
    ("low rows for the high ones of Q, K and V", "at.i + half * (a->hd / 2)) * a->d", "at.i) * a->d"),
    ("rows of K for those of V", "at.kind == 1 ? a->k : a->v;\n    return", "a->k;\n    return"),
    ("heads of 128 as of 64", "int bits = a->hd == 128 ? 6 : 5,", "int bits = 5,"),
    ("a KV head behind all query heads", "at.kind = 1, at.head -= a->n_q;", "at.kind = 1;"),
    ("values are keys", "at.kind = 2, at.head -= a->n_kv;", "at.head -= a->n_kv;"),
    ("gate and up exchanged", "half ? a->up\n        : a->gate", "half ? a->gate\n        : a->up"),
    ("high rows at the low ones' place", "(phase == GATE_UP ? 0 : half)) * step", "0) * step"),
    ("chunks of O and down overlap", "w += (several * c +", "w += (c +"),
    ("stride of O and down is half of it",
     "2 * several * deal_of(a, phase).step * step",
     "2 * deal_of(a, phase).step * step"),
    ("every piece is the first", "w + (int64_t)piece * m->piece)", "w)"),
    ("the last piece as wide as the others", "return left < p->piece ? left : p->piece;", "return p->piece;"),
    ("pieces of a vector all begin with the first", "int64_t from = (int64_t)piece * p->piece, at = from + c.first;",
     "int64_t from = 0 * (int64_t)piece * p->piece, at = from + c.first;"),
    ("a batch has a pair too many", "to - start > BATCH ? start + BATCH : to", "to - start > BATCH + 1 ? start + BATCH + 1 : to"),
    ("batches of the epilogue end elsewhere", "int at = (i - l.from) % BATCH,", "int at = (i - l.from) % (BATCH - 1),"),
    ("all pairs in one batch", "return p->pieces > 1 && to - start > BATCH ? start + BATCH : to;", "return to;"),
    ("the first piece is added to the batch before",
     "if (lane_id() == 0 && piece)\n"
     "                    y.low +=",
     "if (lane_id() == 0)\n"
     "                    y.low +="),
    ("a middle piece in the place of those before",
     "if (lane_id() == 0 && piece)\n"
     "                    y.low +=",
     "if (0)\n"
     "                    y.low +="),
    ("pieces before the last left out of the high rows", "    y.low += s->batch[at].low, y.high += s->batch[at].high;\n    return y;",
     "    y.low += s->batch[at].low;\n    return y;"),
    ("__syncwarp gone after a batch's pieces", "        __syncwarp();\n    }\n    struct pair y = take_sums(s, in, 3);\n    y.low",
     "    }\n    struct pair y = take_sums(s, in, 3);\n    y.low"),
    ("a pair of the neighbour's batch", "y.low += s->batch[at].low, y.high += s->batch[at].high;\n    return", "y.low += s->batch[at ? at - 1 : 0].low, y.high += s->batch[at].high;\n    return"),
    ("both pairs of a warp are the first", "l.row[q] = (c.row + q) * width;", "l.row[q] = c.row * width;"),
    ("columns of the first warp for all", "(warp & (p->across - 1)) * runs * RUN + lane_id() * EIGHT", "lane_id() * EIGHT"),
    ("warps beyond those across have columns of their own", "(warp & (p->across - 1)) * runs * RUN", "warp * runs * RUN"),
    ("pairs of the first warps for all", "p->wide ? 0 : 2 * group };", "0 * group };"),
    ("a run too many where a row ends with one", "(width - first - 1) / RUN + 1 : 0;", "(width - first) / RUN + 1 : 0;"),
    ("a lane's last run is left out", "(width - first - 1) / RUN + 1 : 0;", "(width - first - 1) / RUN : 0;"),
    ("runs of the warp beside", "live < runs ? live : runs,", "live,"),
    ("two runs of a wide row", "int runs = p->wide ? 4 : 2,", "int runs = 2,"),
    ("columns that are not there are taken from x", "b[i] = i < live ? load_16(from + i * RUN) : none;", "b[i] = load_16(from + i * RUN);"),
    ("every run is the first", "l->row[q] + l->first + i * RUN", "l->row[q] + l->first"),
    ("a warp's slices end with its piece", "first + span < to ? first + span : to", "to"),
    # residuals and rows
    ("residuals of the chunk before", "        now = next;\n        if (w.mine && i + 1 < l.to)\n            next = fetch_residuals(a, l.phase, row + 2 * w.step, pairs, epoch);\n",
     "        now = next;\n        if (w.mine && i + 1 < l.to)\n            next = fetch_residuals(a, l.phase, row, pairs, epoch);\n"),
    ("residuals of the chunk after", "        now = next;\n        if (w.mine && i + 1 < l.to)\n            next = fetch_residuals(a, l.phase, row + 2 * w.step, pairs, epoch);\n",
     "        if (w.mine && i + 1 < l.to)\n            next = fetch_residuals(a, l.phase, row + 2 * w.step, pairs, epoch);\n        now = next;\n"),
    ("x for the residual stream around the MLP",
     "if (phase == DOWN)\n"
     "        r.low",
     "if (0)\n"
     "        r.low"),
    ("low residuals for the high ones", "r.high = load_relaxed(a->x1 + row + pairs);", "r.high = load_relaxed(a->x1 + row);"),
    ("low residuals of x for the high ones", "(uint32_t)a->x[row + pairs] << 16", "(uint32_t)a->x[row] << 16"),
    ("no residuals", "            y.low += residual(a, now.low, row, epoch);\n            y.high += residual(a, now.high, row + pairs, epoch);\n", "            ;\n"),
    ("rows of a chunk as if it had half of them", "int row = 2 * w.first + w.pair;", "int row = w.first + w.pair;"),
    ("rows of the next chunk as if it had half of them", "w.first += w.step, row += 2 * w.step)", "w.first += w.step, row += w.step)"),
    ("low and high rows of x1 exchanged", "store_relaxed(a->x1 + row + pairs, tagged(y.high, epoch));", "store_relaxed(a->x1 + row + pairs, tagged(y.low, epoch));"),
    ("low and high rows of the result exchanged", "a->x_out[row] = f32_to_bf16(y.low), a->x_out[row + pairs] = f32_to_bf16(y.high);",
     "a->x_out[row] = f32_to_bf16(y.high), a->x_out[row + pairs] = f32_to_bf16(y.low);"),
    ("high rows of the result not stored", "a->x_out[row] = f32_to_bf16(y.low), a->x_out[row + pairs] = f32_to_bf16(y.high);", "a->x_out[row] = f32_to_bf16(y.low);"),
    ("lanes beyond the pairs of a chunk store too", "pair << p->bits == lane_id() && pair < p->pairs,", "pair << p->bits == lane_id(),"),
    ("the second leg begins with the first chunk",
     "(d.first + l.from * d.step) * p->pairs,",
     "d.first * p->pairs,"),
    ("pairs of the next chunk as if it were the neighbour's", "d.step * p->pairs };", "p->pairs };"),
    # norms, rotation, gates
    ("eps left out", "rsqrtf(squares / (float)a->d + a->eps)", "rsqrtf(squares / (float)a->d)"),
    ("mean over d - 1", "squares / (float)a->d +", "squares / (float)(a->d - 1) +"),
    ("squares of one warp", "w < a->g.p[phase].across; w++) squares", "w < 1; w++) squares"),
    ("squares of half of the lanes", "for (int m = 16; m; m /= 2) squares +=", "for (int m = 8; m; m /= 2) squares +="),
    ("norm's weight left out", "            x[8 * i + j] *= w[j];\n", ""),
    ("squares of what is weighed already", "            squares = fmaf(x[8 * i + j], x[8 * i + j], squares);\n            x[8 * i + j] *= w[j];\n",
     "            x[8 * i + j] *= w[j];\n            squares = fmaf(x[8 * i + j], x[8 * i + j], squares);\n"),
    ("weights of one norm for both",
     "phase == GATE_UP ? a->post_norm\n"
     "        : 0;\n"
     "    bits128",
     "phase == GATE_UP ? a->in_norm\n"
     "        : 0;\n"
     "    bits128"),
    ("squares counted with every batch", "if (lane_id() == 0 && !again) s->squares", "if (lane_id() == 0) s->squares"),
    ("squares of the last piece", "s->squares[phase][warp] += squares;", "s->squares[phase][warp] = squares;"),
    ("squares not from zero", "    if (lane_id() == 0) s->squares[QKV][warp] = s->squares[GATE_UP][warp] = 0;\n", ""),
    ("no factor around gate and up", "if (phase != QKV && phase != GATE_UP) return 1;", "if (phase != QKV) return 1;"),
    ("factor of QKV in the first leg alone", "if (i == l.from) factor = norm_factor(a, s, QKV);", "if (i == 0) factor = norm_factor(a, s, QKV);"),
    ("factor before the squares are there",
     "    float factor = 0;\n"
     "    UNROLL(1)\n"
     "    for (int i = l.from; i < l.to; i++, w.first += w.step) {\n"
     "        struct pair y = pieces > 1 ? take_pieces(a, s, in, l, i)\n"
     "            : take_sums(s, in, bits);\n"
     "        if (i == l.from) factor = norm_factor(a, s, GATE_UP);\n",
     "    float factor = norm_factor(a, s, GATE_UP);\n"
     "    UNROLL(1)\n"
     "    for (int i = l.from; i < l.to; i++, w.first += w.step) {\n"
     "        struct pair y = pieces > 1 ? take_pieces(a, s, in, l, i)\n"
     "            : take_sums(s, in, bits);\n"),
    ("factor of QKV twice", "        y.low *= factor, y.high *= factor;\n", "        y.low *= factor * factor, y.high *= factor * factor;\n"),
    ("factor of QKV for the low rows alone", "        y.low *= factor, y.high *= factor;\n", "        y.low *= factor;\n"),
    ("no factor for up", "up = y.high * factor;", "up = y.high;"),
    ("rotation in the wrong direction", "y.low * c - y.high * s, y.high * c + y.low * s", "y.low * c + y.high * s, y.high * c - y.low * s"),
    ("rotation that is none", "y.low * c - y.high * s, y.high * c + y.low * s", "y.low * c - y.high * s, y.high * c - y.low * s"),
    ("cosines for sines", "s->sine[i] = sinpif(x)", "s->sine[i] = cospif(x)"),
    ("turns not between -1 and 1 but of half", "(float)(2 * (turns - rint(turns)))", "(float)(turns - rint(turns))"),
    ("angles of the next position", "double turns = (double)pos * turn", "double turns = (double)(pos + 1) * turn"),
    ("turns in single precision", "double turns = (double)pos * turn", "float turns = (float)pos * (float)turn"),
    ("angles of the first 32 pairs alone", "for (int i = lane_id(); i < a->hd / 2; i += 32) {", "for (int i = lane_id(); i < 32; i += 32) {"),
    ("__syncwarp gone after the rotation is prepared", "sinpif(x);\n    }\n    __syncwarp();\n", "sinpif(x);\n    }\n"),
    ("keys are not rotated", "if (at.kind < 2) y = rotated", "if (at.kind < 1) y = rotated"),
    ("values are rotated too", "if (at.kind < 2) y = rotated", "y = rotated"),
    ("the row is written a row too late", "(at.head * a->pos.rows + pos) * a->hd + at.i", "(at.head * a->pos.rows + pos + 1) * a->hd + at.i"),
    ("halves of a cache row exchanged", "row[0] = low, row[half] = high;", "row[0] = high, row[half] = low;"),
    ("half of a cache row is an element off", "row[half] = high;", "row[half + 1] = high;"),
    ("caches exchanged", "(at.kind == 1 ? a->k_cache : a->v_cache)", "(at.kind == 1 ? a->v_cache : a->k_cache)"),
    ("the newest key for the newest value", "at.kind == 1 ? a->new_k : a->new_v;", "at.kind == 1 ? a->new_v : a->new_k;"),
    ("the newest key is not rounded", "        y.low = bf16_to_f32(low), y.high = bf16_to_f32(high);\n", ""),
    ("high half of a head is not handed on", "    store_relaxed(words + column + half, tagged(y.high, epoch));\n", ""),
    ("gate is not gated", "gate / (1 + exp2_approx(-LOG2_E * gate)) * up", "gate * up"),
    ("gate in the wrong base", "exp2_approx(-LOG2_E * gate)", "exp2_approx(-gate)"),
    ("one place for the activations of a chunk", "a->act + w.first + w.pair,", "a->act + w.first,"),
    ("even columns by the odd ones of the vector", "x[8 * i + 2 * k], even)", "x[8 * i + 2 * k + 1], even)"),
    ("odd columns left out", "    return even + odd;\n", "    return even;\n"),
    ("hi of a weight for its lo", "*lo = pack_bf16(u - u == 0 ? u : 0, v - v == 0 ? v : 0);", "*lo = *hi;"),
    ("lo of an infinity is a NaN", "u - u == 0 ? u : 0, v - v == 0 ? v : 0", "u, v"),
    # attention: units
    ("the last partial tile left out", "(int)((pos + TILE_KEYS - 1) / TILE_KEYS)", "(int)(pos / TILE_KEYS)"),
    ("a tile more at a tile's edge", "(int)((pos + TILE_KEYS - 1) / TILE_KEYS)", "(int)(pos / TILE_KEYS + 1)"),
    ("a unit of the block is left out", "(units - b - 1) / blocks + 1 : 0 }", "(units - b - 1) / blocks : 0 }"),
    ("a unit too many", "(units - b - 1) / blocks + 1 : 0 }", "(units - b) / blocks + 1 : 0 }"),
    ("tiles that do not divide are left out", "(int64_t)n.tiles * split >> a->g.bits)", "(int64_t)(n.tiles >> a->g.bits) * split)"),
    ("tiles before the queries that they wait for", "mine + 3 > chunks ? chunks : mine + 3;", "0 * mine;"),
    ("a leg of keys within the batches of pieces", "return queries->pieces > 1 || mine + 3", "return mine + 3"),
    ("tiles of the block's first unit for all", "        int split = unit_of(u) / a->g.groups;\n        tiles", "        int split = unit_of(0) / a->g.groups;\n        tiles"),
    ("both legs end with the last chunk", "    if (number == QKV) l.to = chunks_before_tiles(a);\n", ""),
    ("both legs begin with the first chunk", "    if (number == ATTEND) l.from = chunks_before_tiles(a);\n", ""),
    ("heads of the wrong group", "return group / a->g.octets * (a->n_q / a->n_kv) +", "return group / a->g.octets +"),
    ("heads of a KV head's first octet for all", "+ group % a->g.octets * HEADS;\n}", ";\n}"),
    ("eight heads in each group", "    return left < HEADS ? left : HEADS;\n", "    return HEADS;\n"),
    ("lanes without a head take the next group's",
     "(g < heads ? g : 0);\n"
     "    const uint32_t *from = a->roped_q",
     "g;\n"
     "    const uint32_t *from = a->roped_q"),
    ("the first head's query for all", "int row = first_head(a, group) + (g < heads ? g : 0);", "int row = first_head(a, group);"),
    ("half of a query's numbers twice", "load_relaxed_4(from + 32 * m + 4 * i)", "load_relaxed_4(from + 32 * m)"),
    ("keys in the order of one bank", "y = load_16(row + 64 * !odd);", "y = load_16(row + 64 * odd);"),
    ("odd lanes' keys exchanged", "k[n][m].v[i] = odd ? y.v[i] : x.v[i];", "k[n][m].v[i] = x.v[i];"),
    ("the second half of each 32 dimensions left out of a score", "            mma_bf16(c, q[2 * m + 1], k[n][m].v + 2);\n", ""),
    ("lo of the queries left out", "score[n][0] = c[0] + c[2], score[n][1] = c[1] + c[3];", "score[n][0] = c[0], score[n][1] = c[1];"),
    ("scores of a key's neighbour", "score[n][1] = c[1] + c[3];", "score[n][1] = c[0] + c[2];"),
    ("keys of the first warp for all", "load_keys(k, slot_half(a, t.slot, 0) + 16 * warp * 2 * hd, hd)", "load_keys(k, slot_half(a, t.slot, 0), hd)"),
    ("values of the first warp for all", "load_values(v, slot_half(a, t.slot, 1) + 16 * warp * 2 * hd, keys, hd)", "load_values(v, slot_half(a, t.slot, 1), keys, hd)"),
    ("every warp has the first sixteen keys", "    keys -= 16 * warp;   /*", "    keys -= 0 * warp;   /*"),
    ("values beyond the last key are multiplied by zero",
     "key < keys ? load_16(tile + key * 2 * hd + 128 * j + 16 * g)\n"
     "                : none;",
     "load_16(tile + key * 2 * hd + 128 * j + 16 * g);"),
    ("values in another order than their weights", "int key = i / 2 * 8 + 2 * t + i % 2;\n        for", "int key = i / 2 * 8 + 2 * t + 1 - i % 2;\n        for"),
    ("the second 64 dimensions of the values are the first", "key * 2 * hd + 128 * j + 16 * g", "key * 2 * hd + 16 * g"),
    ("odd dimensions as even ones", "i % 2 ? 0x7632 : 0x5410, b[2];", "0x5410, b[2];"),
    ("values of the first keys for the last", "pick_bytes(v[2][j].v[i / 2], v[3][j].v[i / 2], places)", "pick_bytes(v[0][j].v[i / 2], v[1][j].v[i / 2], places)"),
    ("the base of no keys at all", "return max == -INFINITY ? 0 : max;", "return max;"),
    ("keys beyond the last are scored", "key < keys ? score[i / 2][i % 2] * scale : -INFINITY;", "score[i / 2][i % 2] * scale;"),
    ("scores not scaled", "score[i / 2][i % 2] * scale : -INFINITY", "score[i / 2][i % 2] : -INFINITY"),
    ("scores in the wrong base", "soften(u, score, keys, a->score_scale * LOG2_E, p, hd);", "soften(u, score, keys, a->score_scale, p, hd);"),
    ("the maximum of half of a warp's keys", "    max = fmaxf(max, shfl_xor_f32(max, 1));\n    max", "    max"),
    ("a tile's maximum forgets the ones before", "float max = u->max, e[4];", "float max = -INFINITY, e[4];"),
    ("sums before are not rescaled", "for (int j = 0; j < 4; j++) u->sum[i][j] *= f;", ";"),
    ("weight before is not rescaled", "u->max = max, u->weight *= f;", "u->max = max;"),
    ("a lane rescales by its own maximum", "float f = exp2_approx(u->max - base_of(max));\n        u->max", "float f = exp2_approx(e[0] - base_of(max));\n        u->max"),
    ("weights without the maximum", "e[i] = exp2_approx(e[i] - base_of(max));", "e[i] = exp2_approx(e[i]);"),
    ("a key's weight left out of the sum of weights", "u->weight += e[0] + e[1] + e[2] + e[3];", "u->weight += e[0] + e[1] + e[2];"),
    ("lo of a weight of attention left out", "    split_pair(e[0], e[1], p, p + 1);\n", "    split_pair(e[0], e[1], p, p + 1), p[1] = 0;\n"),
    ("weights of the first keys for the last", "split_pair(e[2], e[3], p + 2, p + 3);", "split_pair(e[0], e[1], p + 2, p + 3);"),
    ("weights of half of the lanes", "    u->weight += shfl_xor_f32(u->weight, 2);\n", ""),
    ("weights of a lane beside left out", "    u->weight += shfl_xor_f32(u->weight, 1);\n    u->weight", "    u->weight"),
    ("sums at another dimension's place", "[64 * j + 16 * t + 8 * h + i]", "[64 * j + 16 * t + i + 0 * h]"),
    ("lo of the weights left out of the sums", "= u->sum[8 * j + i][h] + u->sum[8 * j + i][h + 2];", "= u->sum[8 * j + i][h];"),
    ("warps of a unit: the first one's maximum", "for (int w = 0; w < ATTENTION; w++) max = fmaxf", "for (int w = 0; w < 1; w++) max = fmaxf"),
    ("sums against the maximum that is not handed on", "s->unit_max[w][head] - base_of(value_of(word))", "s->unit_max[w][head] - base_of(max)"),
    ("warps of a unit: weights not rescaled", "weight = fmaf(f, s->unit_weight[w][head], weight);", "weight += s->unit_weight[w][head];"),
    ("warps of a unit: sums not rescaled", "sum[j] = fmaf(f, s->unit_sum[w][head][i + j], sum[j]);", "sum[j] += s->unit_sum[w][head][i + j];"),
    ("warps of a unit: the last left out", "for (int w = 0; w < ATTENTION; w++) {\n        float f", "for (int w = 0; w < ATTENTION - 1; w++) {\n        float f"),
    ("units by their number", "int unit = group * a->g.splits + split, end", "int unit = number, end"),
    ("the last tile of a unit left out", "t < end; t++) {\n        int64_t left", "t < end - 1; t++) {\n        int64_t left"),
    ("attention stays at one slot", "        next_turn(in, a->g.slots);\n", ""),
    ("a warp stores one head of its two", "for (int h = 0; h < HEADS / ATTENTION; h++)\n        store_unit", "for (int h = 0; h < 1; h++)\n        store_unit"),
    # attention: the merge
    ("merge of units: the first head's maximum", "load_relaxed(a->unit_max + unit * HEADS + head)", "load_relaxed(a->unit_max + unit * HEADS)"),
    ("merge of units: the first head's weight", "load_relaxed(a->unit_weight + unit * HEADS + head)", "load_relaxed(a->unit_weight + unit * HEADS)"),
    ("merge of units: second four numbers beside the first", "load_relaxed_4(from + 4 * side) : p->sum[0];", "load_relaxed_4(from + 4) : p->sum[0];"),
    ("merge of units: second four numbers are the first", "p->sum[1] = a->hd == 128 ? load_relaxed_4(from + 4 * side) : p->sum[0];", "p->sum[1] = p->sum[0];"),
    ("merge of units: sums of KV head 0 for all", "a->unit_sum + (int64_t)unit * HEADS * a->hd + at;", "a->unit_sum + (int64_t)(unit % a->g.splits) * HEADS * a->hd + at;"),
    ("merge of units: each unit's own maximum", "    for (int m = side; m < 32; m *= 2) max = fmaxf(max, shfl_xor_f32(max, m));\n", ""),
    ("merge of units: weights not rescaled", "p->max = max, p->weight *= f;", "p->max = max;"),
    ("merge of units: sums not rescaled", "sum[j / 4][j % 4] = f * value_of(", "sum[j / 4][j % 4] = value_of("),
    ("merge of units: half of them", "    UNROLL(1)\n    for (int m = side; m < 32; m *= 2) {\n", "    UNROLL(1)\n    for (int m = 2 * side; m < 32; m *= 2) {\n"),
    ("merge of units: every lane takes the first unit", "group * splits + lane_id() / side, head", "group * splits, head"),
    ("merge of units: the slice of the first warp", "(number / a->g.groups * ATTENTION + warp) * width", "(number / a->g.groups * ATTENTION) * width"),
    ("merge of units: the slice of the first unit", "int first = (number / a->g.groups * ATTENTION + warp) * width", "int first = warp * width"),
    ("merge of units: columns of the first lane", "int at = first + lane_id() % side * 4;", "int at = first;"),
    ("merge of units: heads that are not there", "    if (head >= heads_of(a, group)) return;\n", ""),
    ("merge of units: a unit of the block left out", "u < n.units; u++) merge_slice(a", "u < n.units - 1; u++) merge_slice(a"),
    ("merge of units: lanes beyond the slice store too",
     "if (lane_id() < side)\n"
     "            store_relaxed_4",
     "if (lane_id() <= side)\n"
     "            store_relaxed_4"),
    ("merge of units: the second four numbers over the first", "a->attended + column + at + 4 * side * j, out", "a->attended + column + at, out"),
    ("merge of units: the second four numbers not stored", "for (int j = 0; j < 2 && j < a->hd / 64; j++) {", "for (int j = 0; j < 1; j++) {"),
    ("newest key of the group, not of the KV head", "int kv = group / a->g.octets, i = 4 * lane_id() % a->hd;", "int kv = group, i = 4 * lane_id() % a->hd;"),
    ("newest key by the first head's query", "(first_head(a, group) + head) * a->hd\n", "first_head(a, group) * a->hd\n"),
    ("newest value's first columns for all", "a->new_v + kv * a->hd + at % a->hd;", "a->new_v + kv * a->hd + 4 * lane_id() % 16;"),
    ("newest key: half of the dimensions", "for (int m = a->hd / 8; m; m /= 2) dot", "for (int m = a->hd / 16; m; m /= 2) dot"),
    ("newest key's score not in base 2", "n->score = dot * a->score_scale * LOG2_E;", "n->score = dot * a->score_scale;"),
    ("newest key's score not scaled", "n->score = dot * a->score_scale * LOG2_E;", "n->score = dot * LOG2_E;"),
    ("newest value's second four beside the first", "load_relaxed_4(v + 4 * side) : n->value[0];", "load_relaxed_4(v + 4) : n->value[0];"),
    ("newest key left out of the maximum", "float base = base_of(fmaxf(p.max, n.score));", "float base = base_of(p.max);"),
    ("newest key is all of the maximum", "float base = base_of(fmaxf(p.max, n.score));", "float base = base_of(n.score);"),
    ("newest key left out of the weights", "float weight = fmaf(old, p.weight, now);", "float weight = old * p.weight;"),
    ("newest key added twice", "float weight = fmaf(old, p.weight, now);", "now *= 2;\n    float weight = fmaf(old, p.weight, now);"),
    ("newest value left out", "(old * sum[j][i] + now * value_of(n.value[j].v[i])) / weight", "old * sum[j][i] / weight"),
    ("old values not rescaled", "(old * sum[j][i] + now", "(sum[j][i] + now"),
    ("attended columns of KV head 0 for all", "int64_t column = (int64_t)first_head(a, group) * a->hd;", "int64_t column = 0;"),
    # the kernel
    ("position max_seq_len is taken", "pos < p.rows ? pos : -1", "pos <= p.rows ? pos : -1"),
    ("a bad position is not remembered", "*a.status = 4;", ";"),
    ("a refused step counts as one", "        return;\n    }\n    if (warp < CONSUMERS) {",
     "        if (threadIdx.x == 0)\n"
     "            store_relaxed(a.launches + blockIdx.x, load_relaxed(a.launches + blockIdx.x) + 1);\n"
     "        return;\n    }\n    if (warp < CONSUMERS) {"),
    ("a bad position leaves the result as it is", "            a.x_out[i] = 0x7fc0;\n", "            ;\n"),
    ("rows of the cache not waited for", "    wait_for_prerequisites();   /* the rows of earlier steps */\n", ""),
    ("warps do not wait for the step before", "    named_barrier_sync(READY, READY_THREADS);\n    wait_for_prerequisites();\n", "    named_barrier_sync(READY, READY_THREADS);\n"),
    ("nothing is touched before it is needed", "    if (weight && phase != QKV) touch_runs(weight + at, c.live);\n", ""),
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
    ("residual stream has half of its memory", "a->x1 = take(&at, (size_t)l->c.d * f)",
     "a->x1 = take(&at, (size_t)l->c.d * f / 2)"),
    ("queries have half of their memory", "a->roped_q = take(&at, q * f)", "a->roped_q = take(&at, q * f / 2)"),
    ("launched as any kernel, not all blocks at once", "together.val.cooperative = 1", "together.val.cooperative = 0"),
    ("a failed launch is not reported", "? LAYER_CUDA_FAILED : LAYER_OK;\n}\n\n/* refuse what no stage",
     "* 0;\n}\n\n/* refuse what no stage"),
    ("shared memory without the room for block sums", "l->shared = (numbers + 32) * sizeof(float)",
     "l->shared = numbers * sizeof(float)"),
    ("half of the shared memory", "(numbers + 32) *", "(numbers / 2 + 32) *"),
    ("shared memory of a tile without its values", " + (size_t)(SPLIT_KEYS *", " + 0 * (size_t)(SPLIT_KEYS *"),
    ("a split too few has memory", "(l->c.max_seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS)", "l->c.max_seq_len / SPLIT_KEYS)"),
]
# How stages 7 and 8 cut the layer and launch.
HOST_7 = [
    ("residual stream has half of its memory", "a->x1 = take(&at, (size_t)a->d * u)", "a->x1 = take(&at, (size_t)a->d * u / 2)"),
    ("activations have half of their memory", "a->act = take(&at, (size_t)a->ffn * u)", "a->act = take(&at, (size_t)a->ffn * u / 2)"),
    ("queries have half of their memory", "a->roped_q = take(&at, q),", "a->roped_q = take(&at, q / 2),"),
    ("units have the sums of one number", "take(&at, units * (size_t)a->hd)", "take(&at, units)"),
    ("hints have half of their memory", "number_hints(a) * 128)", "number_hints(a) * 64)"),
    ("rows of more than half of the widest not wide", "p->wide = p->piece > WIDEST / 2;", "p->wide = p->piece > WIDEST;"),
    ("a row shared by too few warps", "p->piece << 1 <= 512 << p->bits", "p->piece << 1 <= 1024 << p->bits"),
    ("two wide pairs a chunk", "p->pairs = p->wide ? 1 : 16 / p->across;", "p->pairs = p->wide ? 2 : 16 / p->across;"),
    ("chunks that do not divide are not dealt", "p->extra = p->chunks % blocks;", "p->extra = 0;"),
    ("pieces half as many as there are", "p->pieces = (int32_t)((columns + WIDEST - 1) / WIDEST);", "p->pieces = (int32_t)((columns + 2 * WIDEST - 1) / (2 * WIDEST));"),
    ("an octet of heads begun is left out", "(int32_t)((rep + HEADS - 1) / HEADS)", "(int32_t)(rep > HEADS ? rep / HEADS : 1)"),
    ("chunks of queries by all of Q, K and V", "cut_product(g->p + ATTEND, c->d, q / 2, blocks);", "cut_product(g->p + ATTEND, c->d, 0, blocks);"),
    ("half of the splits", "g->splits = 1 << g->bits;", "g->splits = 1 << g->bits >> 1;"),
    ("as many halves under way as there are slots", "if (most > slots - 1) most = slots - 1;",
     "if (most > slots) most = slots;"),
    ("no copy may be under way", "return (int32_t)(most < 1 ? 1 : most);", "return 0;"),
    ("launched as any kernel, not all blocks at once", "together = { .cooperative = 1 }", "together = { .cooperative = 0 }"),
    ("a failed launch is not reported", "|| cudaGraphLaunch(l->exec, stream) ?", "|| (cudaGraphLaunch(l->exec, stream), 0) ?"),
    ("a step has the parameters of another", "return cudaGraphExecKernelNodeSetParams(l->exec, l->node, &p)", "return 0"),
    ("what is launched is not given back", "l->exec && cudaGraphExecDestroy(l->exec)", "0"),
]

# What stage 8's kernels have of their own; the rest of them are stage 7's chunks.
EIGHT = [
    ("a constant bit of the exponent missing", "| 0x38383838u", "| 0x30303030u"),
    ("the tops of the second four not turned", "upper_bytes(tops << 4 | tops >> 28)", "upper_bytes(tops >> 4)"),
    ("the second four's tops as they were stored", "first | second >> 4 | second << 28;", "first | second >> 4;"),
    ("the window an exponent too wide", ">= (uint32_t)WINDOW;", "> (uint32_t)WINDOW;"),
    ("exceptions keep their place among the weights", "return outside(w, base) ? STAND_IN :", "return 0 ? STAND_IN :"),
    ("what the stand-ins add stays", "fmaf(-stand_in, f.inputs, sum)", "fmaf(0 * stand_in, f.inputs, sum)"),
    ("a row's sum not scaled back", "sum), f.scale, f.products)", "sum), 1, f.products)"),
    ("products of the exceptions left out", "sum), f.scale, f.products)", "sum), f.scale, 0)"),
    ("inputs of the exceptions not summed", "    f->inputs += x;\n", ""),
    ("tops of another step",
     "(row + l->width + k / 2);",
     "(row + l->width + l->first / 2 + EIGHT / 2 * lane_id());"),
    ("bottoms of another step",
     ".bottoms = load_16(row + k);",
     ".bottoms = load_16(row + l->first + EIGHT * lane_id());"),
    ("halves of a step exchanged",
     "runs[2 * i + 1] = unpack(b.v[2], b.v[3], w[i].tops.v[1]);",
     "runs[2 * i + 1] = unpack(b.v[2], b.v[3], w[i].tops.v[0]);"),
    ("the rest of a row packed like a whole step", "if (step + STEP > n) return c / 8;", ""),
    ("a lane takes the weights of its left neighbour",
     "int k = l->first + EIGHT * lane_id() + i * STEP;",
     "int k = l->first + EIGHT * (lane_id() & ~1) + i * STEP;"),
    ("a step's eights of a lane apart", "step / 8 + within % RUN / 8 * 2 + within / RUN", "step / 8 + within % RUN / 8 + within / RUN * 32"),
    ("packed rows as long as with a list behind them", "int64_t row = m->packed ? width / 2 * 3 : m->stride;", "int64_t row = m->packed ? width / 2 * 3 + 4 * m->words : m->stride;"),
    ("raw rows as long as packed ones", "int64_t row = m->packed ? width / 2 * 3 : m->stride;", "int64_t row = width / 2 * 3;"),
    ("every piece of packed rows is the first", "piece * m->rows * (p->piece / 2 * 3)", "0 * m->rows * (p->piece / 2 * 3)"),
    ("pieces of packed rows as wide as the last one", "piece * m->rows * (p->piece / 2 * 3)", "piece * m->rows * (width / 2 * 3)"),
    ("bytes of raw rows for packed ones", "(m->packed ? width / 2 * 3 : 2 * width));", "(2 * width));"),
    ("each chunk's rows at half of the stride",
     "row * several * p->pairs * deal_of(a, phase).step,",
     "row * p->pairs * deal_of(a, phase).step + 0 * several,"),
    ("gate's matrix for both halves", "phase == DOWN ? W_DOWN : W_GATE + half;", "phase == DOWN ? W_DOWN : W_GATE;"),
    ("Q's matrix for K and V", "return W_Q + place_of(a, c * a->g.p[QKV].pairs).kind;", "return W_Q;"),
    ("low rows for the high ones", "return (2 * (int64_t)c + half) * pairs;", "return 2 * (int64_t)c * pairs;"),
    ("high rows of a head are its low ones", "at.i + half * (a->hd / 2);", "at.i;"),
    ("the window of what was in the half before", "        wait_for_room(s, p);\n        more_shared()->window[p->half][p->next.slot] = r.window;\n        fetch(a, s, p, r.at, r.bytes);\n",
     "        fetch(a, s, p, r.at, r.bytes);\n        more_shared()->window[p->half][p->next.slot] = r.window;\n"),
    ("the window written while the half is read", "        wait_for_room(s, p);\n        more_shared()", "        more_shared()"),
    ("one window for both halves",
     "more_shared()->window[h][c->in.slot]);",
     "more_shared()->window[0][c->in.slot]);"),
    ("the first half of a step multiplied twice",
     "runs[2 * i + 1] = unpack(b.v[2], b.v[3], w[i].tops.v[1]);",
     "runs[2 * i + 1] = runs[2 * i];"),
    ("low rows for the high ones in a product",
     "dot_steps(packed + r * runs / 2, l->x, runs / 2)",
     "dot_steps(packed + r % pairs * runs / 2, l->x, runs / 2)"),
    ("the first step of a row for all its steps",
     "dot_steps(packed + r * runs / 2, l->x, runs / 2)",
     "dot_steps(packed, l->x, runs / 2)"),
    ("later exceptions of a long list are the first again",
     "if (i + j >= count) one[j] = one[0];",
     "one[j] = one[0];"),
    ("any rows: low rows for the high ones",
     "                            : dot(w + r * runs, l->x, runs);",
     "                            : dot(w + r % pairs * runs, l->x, runs);"),
    ("fewer exceptions than are asked for at once count more than once",
     "if (j < n) add_exception(f, one[j], x[j]);",
     "add_exception(f, one[j], x[j]);"),
    ("exceptions that are not there read from the list",
     "            if (i + j >= count) one[j] = one[0];\n",
     "            if (0) one[j] = one[0];\n"),
    ("steps beyond the row", "            if (2 * i >= l->live) continue;\n", ""),
    ("any rows: the second pair over the first",
     "w[h * pairs * runs + j] = load_run",
     "w[h * pairs * runs + j % runs] = load_run"),
    ("both pairs of any rows are the first", "l->row[j / runs], j % runs,", "l->row[0], j % runs,"),
    ("raw rows read as if all were packed",
     "if (a->whole_steps && l->width % STEP == 0)",
     "if (l->width % STEP == 0)"),
    ("any width read in whole steps",
     "if (a->whole_steps && l->width % STEP == 0)",
     "if (a->whole_steps)"),
    ("a slot is read before its high half is full",
     "            mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);\n",
     "            mbarrier_wait(s->full[0] + c->in.slot, c->in.odd);\n"),
    ("the warp of the exceptions is not waited for", "DELIVERERS = 9,", "DELIVERERS = 8,"),
    ("sums of the exceptions written over before they are taken", "    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);\n    if (row >= 0)", "    if (row >= 0)"),
    ("__syncwarp gone between sums of exceptions and their arrival", "[row & ((1 << bits) - 1)] = f;\n    __syncwarp();\n", "[row & ((1 << bits) - 1)] = f;\n"),
    ("the warp of the exceptions does not deliver", "    else fix_sums(&a, s);\n", "    else wait_until_ready();\n"),
    ("exceptions of the first matrix rows for all pairs", "row_of(a, phase, c, half) + pair;\n    const uint32_t *list", "row_of(a, phase, c, half);\n    const uint32_t *list"),
    ("a list of the row before", "const uint32_t *list = m->lists + row * m->words;", "const uint32_t *list = m->lists + (row ? row - 1 : row) * m->words;"),
    ("the lists of every piece of down are the first's", "int64_t row = piece * m->rows + row_of", "int64_t row = 0 * m->rows + row_of"),
    ("exceptions begin at the first word of a list",
     "{ head.v[2], head.v[3], next.v[0] }",
     "{ head.v[0], head.v[1], head.v[2] }"),
    ("room for one exception more than there is", "count = head.v[0], room = (uint32_t)m->words - 2;", "count = head.v[0], room = (uint32_t)m->words - 1;"),
    ("exceptions without room are all the first row's",
     "m->more[head.v[1] + j - room]",
     "m->more[j - room]"),
    ("the first exception of a row skipped",
     "for (uint32_t i = 0; i < count; i += AT_ONCE) {",
     "for (uint32_t i = AT_ONCE; i < count; i += AT_ONCE) {"),
    ("columns of the first piece for the exceptions of all",
     "int first = piece * a->g.p[phase].piece;\n"
     "    float x[AT_ONCE]",
     "int first = 0 * piece;\n"
     "    float x[AT_ONCE]"),
    ("inputs of exceptions taken as they are",
     "            if (!wrong) break;\n"
     "            retry_values(from, start);\n"
     "        }\n"
     "    }\n"
     "    for (uint32_t j",
     "            break;\n"
     "        }\n"
     "    }\n"
     "    for (uint32_t j"),
    ("inputs of the exceptions without the norm's weights",
     "if (phase == QKV || phase == GATE_UP)\n"
     "            x[j] *=",
     "if (phase == QKV)\n"
     "            x[j] *="),
    ("inputs of Q, K and V's exceptions without the norm's weights",
     "if (phase == QKV || phase == GATE_UP)\n"
     "            x[j] *= bf",
     "if (phase == GATE_UP)\n"
     "            x[j] *= bf"),
    ("inputs of down's exceptions are the residual stream",
     "phase == DOWN ? a->act : a->x1)\n"
     "                             + first",
     "a->x1)\n"
     "                             + first"),
    ("the first chunk's exceptions for all that are taken at once",
     "int c = d.first + (i + mine) * d.step;",
     "int c = d.first + i * d.step;"),
    ("a chunk's exceptions to its neighbour's sums", "j == mine ? row : -1, bits", "j == mine + 1 ? row : -1, bits"),
    ("exceptions of more chunks than a batch has left", "for (int j = 0; j < several && i + j < end; j++)", "for (int j = 0; j < several; j++)"),
    ("low and high sums of exceptions exchanged", "struct fix low = more_shared()->fix[in->slot][0][pair];", "struct fix low = more_shared()->fix[in->slot][1][pair];"),
    ("sums of exceptions by the lane, not by the pair", "pair = lane >> bits;\n    mbarrier_wait", "pair = lane;\n    mbarrier_wait"),
    ("lists written a word too near to each other", "a.lists + r * a.words);", "a.lists + r * (a.words - 1));"),
    ("one list of exceptions for all lanes", "(uint32_t)(c + j) << 16", "(uint32_t)c << 16"),
    ("a row's count is of one lane", "    for (int m = 16; m; m /= 2) count += shfl_xor_u32(count, m);\n", ""),
]

REASONS = {
    **dict.fromkeys(("nobody waits for a hint", "words are hinted at twice", "a warp's slices end with its piece"),
        "a hint saves loads and proves nothing: every word is asked for its own step"),
    **dict.fromkeys(("tiles begin before there is room", "tiles are over before the slot after them is free"),
        "fewer halves are under way than there are slots (open_halves; test_shapes.py), so what was in the slot "
        "before has arrived: the parity that is waited for is not that of the lap before last, room or not"),
    "nothing is touched before it is needed":
        "it brings weights of the norm nearer, and changes no bit",
    **dict.fromkeys(("the residual stream is taken as it is", "the residual stream is asked once more and then taken",
                     "an old residual is asked for at another row"),
        "a block that has chunks of gate and up has seen all of x1 by then: at small shapes all blocks have"),
    "scratch is not cleared":
        "in stage 6 a counter and the count that a block begins with: what the CPU target "
        "fills memory with is the same in both",
    "one block more than multiprocessors":
        "at small shapes two blocks fit on one; a grid that does not fit the cooperative "
        "launch refuses",
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
