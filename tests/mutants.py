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
    ('a slot counts a reader too few', 'mbarrier_init(s->empty + i, CONSUMERS);',
     'mbarrier_init(s->empty + i, CONSUMERS - 1);'),
    ('sums are taken before all have delivered', 'mbarrier_init(s->delivered + i, DELIVERERS);',
     'mbarrier_init(s->delivered + i, DELIVERERS - 1);'),
    ('the run of tiles begins when one producer is there', 'mbarrier_init(&s->tiles_begin, 2);',
     'mbarrier_init(&s->tiles_begin, 1);'),
    ('nobody waits for the barriers to be prepared', 'named_barrier_sync(READY, READY_THREADS);\n    wait_for_prerequisites();',
     'wait_for_prerequisites();'),
    ('a producer does not wait for room', '    wait_for_room(s, p);\n    while (p->open',
     '    while (p->open'),
    ('parity of room', 'mbarrier_wait(s->empty + p->next.slot, p->next.odd ^ 1);',
     'mbarrier_wait(s->empty + p->next.slot, p->next.odd);'),
    ('half the bytes announced', 'mbarrier_expect(full, bytes);',
     'mbarrier_expect(full, bytes / 2);'),
    ('laps are all even', 'if (++t->slot == slots) t->slot = 0, t->odd ^= 1;',
     'if (++t->slot == slots) t->slot = 0;'),
    ('laps passed over are not counted', 't->odd ^= (uint32_t)((t->slot + by) / slots) & 1;',
     't->odd ^= 0 * (uint32_t)((t->slot + by) / slots) & 1;'),
    ('consumers do not wait for a half', '            mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);\n',
     ''),
    ('consumers wait for the low half twice', 'mbarrier_wait(s->full[h] + c->in.slot',
     'mbarrier_wait(s->full[0] + c->in.slot'),
    ('__syncwarp gone before a slot is given back', '        __syncwarp();\n        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);',
     '        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);'),
    ('a slot is not given back', '        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);\n',
     ''),
    ('sums delivered into a place in use', '    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);\n    if (place >= 0) ((float',
     '    if (place >= 0) ((float'),
    ('__syncwarp gone before sums are delivered', '((float *)s->sum[out->slot])[place] = sum;\n    __syncwarp();',
     '((float *)s->sum[out->slot])[place] = sum;'),
    ('sums taken before they are delivered', '    mbarrier_wait(s->delivered + in->slot, in->odd);\n',
     ''),
    ('sums are never given back', '    if (lane_id() == 0) mbarrier_arrive(s->taken + in->slot);\n',
     ''),
    ('consumers go on before the tiles are over', '    mbarrier_wait(&s->tiles_over, 0);\n',
     ''),
    ('consumers do not pass over the tiles', 'skip_turns(&w->in, a->g.slots, tiles_of_block(a, n));',
     'skip_turns(&w->in, a->g.slots, 0 * tiles_of_block(a, n));'),
    ('attention begins at the first slot', 'skip_turns(&in, a->g.slots, leg_of(a, QKV).to * a->g.p[QKV].pieces);',
     'skip_turns(&in, a->g.slots, 0);'),
    ("a tile's values are read before they are there", '    mbarrier_wait(s->full[1] + t.slot, t.odd);\n',
     ''),
    ("a tile's keys are read before they are there", '    mbarrier_wait(s->full[0] + t.slot, t.odd);\n',
     ''),
    ('a tile is given back by half its readers', 'if (lane_id() < CONSUMERS / ATTENTION) mbarrier_arrive',
     'if (lane_id() < 1) mbarrier_arrive'),
    ('units meet too early', '    keep_sums(s, &u, warp, hd);\n    named_barrier_sync(UNITS, 32 * ATTENTION);',
     '    keep_sums(s, &u, warp, hd);'),
    ("the next unit's sums on top of this one's", "    named_barrier_sync(UNITS, 32 * ATTENTION);   /* before the next unit's sums */\n",
     ''),
    ('epoch of the step before', 'uint32_t stale(uint32_t word,\n                      uint32_t epoch) { return (word ^ epoch) & EPOCH_BITS; }',
     'uint32_t stale(uint32_t word,\n                      uint32_t epoch) { return (word ^ (epoch - 1)) & EPOCH_BITS; }'),
    ('any epoch will do', '{ return (word ^ epoch) & EPOCH_BITS; }',
     '{ return 0 * (word ^ epoch) & EPOCH_BITS; }'),
    ('only the first word of four is looked at', 'return stale(w.v[0], epoch) | stale(w.v[1], epoch) | stale(w.v[2], epoch)\n         | stale(w.v[3], epoch);',
     'return stale(w.v[0], epoch);'),
    ('epochs are counted twice', 'if (lane_id() == 0) store_relaxed(a->launches + blockIdx.x, epoch);',
     'if (lane_id() == 0) store_relaxed(a->launches + blockIdx.x, epoch + blockIdx.x);'),
    ('epochs are never counted', 'if (lane_id() == 0) store_relaxed(a->launches + blockIdx.x, epoch);',
     ''),
    ('a NaN becomes an infinity', 'value == value ? f32_bits(value) : 0x7fc00000u',
     'value == value ? f32_bits(value) : 0x7f800001u'),
    ('twelve bits of a value are lost', 'EPOCH_BITS = 15,',
     'EPOCH_BITS = 4095,'),
    ('lanes beyond the row have stale columns', 'i < live ? value_of(w[i][j].v[k]) : 0;',
     'value_of(w[i][j].v[k]);'),
    ('all lanes have all runs', 'struct columns c = { first, live < runs ? live : runs,',
     'struct columns c = { first, live < 0 ? live : runs,'),
    ('weights of the norm left out', '            x[8 * i + j] *= w[j];\n',
     ''),
    ('squares of weighted columns', '            squares = fmaf(x[8 * i + j], x[8 * i + j], squares);\n            x[8 * i + j] *= w[j];',
     '            x[8 * i + j] *= w[j];\n            squares = fmaf(x[8 * i + j], x[8 * i + j], squares);'),
    ('squares of one warp', 'for (int w = 0; w < a->g.p[phase].across; w++) squares',
     'for (int w = 0; w < 1; w++) squares'),
    ('squares counted again for each batch', 'if (lane_id() == 0 && !again)',
     'if (lane_id() == 0)'),
    ('eps left out', 'rsqrtf(squares / (float)a->d + a->eps)',
     'rsqrtf(squares / (float)a->d)'),
    ('the second norm is the first', 'phase == GATE_UP ? a->post_norm',
     'phase == GATE_UP ? a->in_norm'),
    ('odd columns left out', '    return even + odd;',
     '    return even;'),
    ('the runs of a pair overlap', 'load_16(half + 2 * (l->row[q] + l->first + i * RUN));',
     'load_16(half + 2 * (l->row[q] + l->first));'),
    ('the second pair is the first', 'l.row[q] = (c.row + q) * width;',
     'l.row[q] = c.row * width;'),
    ('groups of warps take the same rows', 'p->wide ? 0 : 2 * group };',
     'p->wide ? 0 : 0 * group };'),
    ('low and high rows exchanged', 'float sum = fold(sums[0], sums[pairs], 16);',
     'float sum = fold(sums[pairs], sums[0], 16);'),
    ('a quarter of the lanes left out', 'for (int m = 4; m; m /= 2) sum += shfl_xor_f32(sum, m);',
     'for (int m = 2; m; m /= 2) sum += shfl_xor_f32(sum, m);'),
    ('the last warp across left out', '        if (m < bits) {\n',
     '        if (m < bits - 1) {\n'),
    ('pieces are not added', 'if (lane_id() == 0 && piece)',
     'if (lane_id() == 0 && 0)'),
    ('the last piece stands alone', '    y.low += s->batch[at].low, y.high += s->batch[at].high;\n',
     ''),
    ('batches of one chunk more', 'to - start > BATCH ? start + BATCH : to;',
     'to - start > BATCH ? start + BATCH + 1 : to;'),
    ('the last piece as wide as the others', 'return left < p->piece ? left : p->piece;',
     'return left < 0 ? left : p->piece;'),
    ('chunks dealt as if none were left over', 'return p->each + (rank_of_block(a, phase) < p->extra);',
     'return p->each + (0 * rank_of_block(a, phase) < p->extra);'),
    ('the block after begins', 'rank -= (int)gridDim.x - a->g.p[phase].extra;',
     'rank -= (int)gridDim.x - a->g.p[phase].extra - 1;'),
    ("gate's rows for up", 'half ? a->up',
     'half ? a->gate'),
    ("keys' rows for values", 'const uint16_t *w = at.kind == 0 ? a->q : at.kind == 1 ? a->k : a->v;',
     'const uint16_t *w = at.kind == 0 ? a->q : at.kind == 1 ? a->k : a->k;'),
    ('keys and values exchanged in the cache', '(at.kind == 1 ? a->k_cache : a->v_cache)',
     '(at.kind == 2 ? a->k_cache : a->v_cache)'),
    ('values rotated too', 'if (at.kind < 2) y = rotated',
     'if (at.kind < 3) y = rotated'),
    ('keys not rotated', 'if (at.kind < 2) y = rotated',
     'if (at.kind < 1) y = rotated'),
    ('RoPE turns the other way', '{ y.low * c - y.high * s, y.high * c + y.low * s };',
     '{ y.low * c + y.high * s, y.high * c - y.low * s };'),
    ('RoPE of the position before', 'double turns = (double)pos * a->turn[i]',
     'double turns = (double)(pos - 1) * a->turn[i]'),
    ('the newest key not rounded', '        y.low = bf16_to_f32(low), y.high = bf16_to_f32(high);\n',
     ''),
    ('silu without its gate', 'float act = gate / (1 + exp2_approx(-LOG2_E * gate)) * up;',
     'float act = 1 / (1 + exp2_approx(-LOG2_E * gate)) * up;'),
    ('gate and up exchanged', 'float gate = y.low * factor, up = y.high * factor;',
     'float up = y.low * factor, gate = y.high * factor;'),
    ('residual of the chunk before', 'y.low += residual(a, now.low, row, epoch);',
     'y.low += residual(a, next.low, row, epoch);'),
    ("down's residual is x", 'if (phase == DOWN)\n        r.low',
     'if (phase == 7)\n        r.low'),
    ("attention's residual left out", '        y.high += residual(a, now.high, row + pairs, epoch);\n',
     ''),
    ('high rows of the result a row too far', 'store_relaxed(a->x1 + row + pairs, tagged(y.high, epoch));',
     'store_relaxed(a->x1 + row + pairs - 1, tagged(y.high, epoch));'),
    ('keys of KV head 0 for all', 'int64_t at = (kv * a->pos.rows',
     'int64_t at = (0 * kv * a->pos.rows'),
    ('the tile after', 'kv * a->pos.rows + (int64_t)tile * TILE_KEYS) * a->hd;',
     'kv * a->pos.rows + (int64_t)(tile + 1) * TILE_KEYS) * a->hd;'),
    ('the last split has a tile less', 'return (int)((int64_t)n.tiles * split >> a->g.bits);',
     'return (int)((int64_t)(n.tiles - 1) * split >> a->g.bits);'),
    ('a key behind the last has a score', 'e[i] = key < keys ? score[i / 2][i % 2] * scale : -INFINITY;',
     'e[i] = key <= keys ? score[i / 2][i % 2] * scale : -INFINITY;'),
    ('values behind the last key are kept', 'v[i][j] = key < keys ? load_16',
     'v[i][j] = key < 99 ? load_16'),
    ('sums not scaled to the new maximum', 'for (int j = 0; j < 4; j++) u->sum[i][j] *= f;',
     'for (int j = 0; j < 4; j++) u->sum[i][j] *= 1;'),
    ('weight not scaled to the new maximum', 'u->max = max, u->weight *= f;',
     'u->max = max;'),
    ('scores not scaled', 'score_scale * LOG2_E, p, hd',
     'LOG2_E, p, hd'),
    ('minus infinity minus itself', 'return max == -INFINITY ? 0 : max;',
     'return max;'),
    ('hi of a query alone', 'score[n][0] = c[0] + c[2], score[n][1] = c[1] + c[3];',
     'score[n][0] = c[0], score[n][1] = c[1];'),
    ("odd keys' blocks not put back", 'k[n][m].v[i] = odd ? y.v[i] : x.v[i];',
     'k[n][m].v[i] = x.v[i];'),
    ('the maximum that lost no bits', 'exp2_approx(s->unit_max[w][head] - base_of(value_of(word)))',
     'exp2_approx(s->unit_max[w][head] - base_of(max))'),
    ('three warps of four', 'for (int w = 0; w < ATTENTION; w++) max = fmaxf',
     'for (int w = 0; w < ATTENTION - 1; w++) max = fmaxf'),
    ('each unit is the first of its group', 'int unit = group * a->g.splits + split,',
     'int unit = group * a->g.splits + 0 * split,'),
    ('merged over half of the units', 'for (int m = side; m < 32; m *= 2) max = fmaxf',
     'for (int m = 2 * side; m < 32; m *= 2) max = fmaxf'),
    ("units' weights not merged", '        p->weight += shfl_xor_f32(p->weight, m);\n',
     ''),
    ('the newest key left out', 'float weight = fmaf(old, p.weight, now);',
     'float weight = old * p.weight;'),
    ('the newest value of head 0', 'a->new_v + kv * a->hd + at % a->hd',
     'a->new_v + at % a->hd'),
    ("the newest key's score not scaled", 'n->score = dot * a->score_scale * LOG2_E;',
     'n->score = dot * LOG2_E;'),
    ("heads of the second octet are the first's", '+ group % a->g.octets * HEADS;',
     '+ 0 * (group % a->g.octets) * HEADS;'),
    ("the wrong step's row is written", '+ (at.head * a->pos.rows + pos) * a->hd + at.i;',
     '+ (at.head * a->pos.rows + pos + 1) * a->hd + at.i;'),
    ('a bad position is stepped all the same', '    if (pos < 0) {',
     '    if (pos < -1) {'),
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
    ("queries have half of their memory", "a->roped_q = take(&at, q * f)", "a->roped_q = take(&at, q * f / 2)"),
    ("residual stream has half of its memory", "a->x1 = take(&at, (size_t)l->c.d * f)",
     "a->x1 = take(&at, (size_t)l->c.d * f / 2)"),
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
    ("queries have half of their memory", "a->roped_q = take(&at, q)", "a->roped_q = take(&at, q / 2)"),
    ("residual stream has half of its memory", "a->x1 = take(&at, (size_t)a->d * u)", "a->x1 = take(&at, (size_t)a->d * u / 2)"),
    ("launched as any kernel, not all blocks at once", "together = { .cooperative = 1 }", "together = { .cooperative = 0 }"),
    ("a failed launch is not reported", "|| cudaGraphLaunch(l->exec, stream) ?", "|| (cudaGraphLaunch(l->exec, stream), 0) ?"),
    ("a step has the parameters of another", "return cudaGraphExecKernelNodeSetParams(l->exec, l->node, &p)", "return 0"),
    ("what is launched is not given back", "l->exec && cudaGraphExecDestroy(l->exec)", "0"),
]

# What stage 8's kernels have of their own; the rest of them are stage 7's chunks.
EIGHT = [
    ('a constant bit of the exponent missing', '| 0x38383838u',
     '| 0x30303030u'),
    ('the tops of the second four not turned', 'upper_bytes(tops << 4 | tops >> 28)',
     'upper_bytes(tops >> 4)'),
    ('the window an exponent too wide', '>= (uint32_t)WINDOW;',
     '> (uint32_t)WINDOW;'),
    ('exceptions keep their place among the weights', 'return outside(w, base) ? STAND_IN :',
     'return 0 ? STAND_IN :'),
    ('what the stand-ins add stays', 'fmaf(-stand_in, f.inputs, sum)',
     'fmaf(0 * stand_in, f.inputs, sum)'),
    ("a row's sum not scaled back", 'sum), f.scale, f.products)',
     'sum), 1, f.products)'),
    ('the first exception of a row skipped', 'for (uint32_t i = 0; i < count; i++) {',
     'for (uint32_t i = 1; i < count; i++) {'),
    ('tops of another step', '(r.at + r.n + k / 2 + 8 * lane_id())',
     '(r.at + r.n + k / 2 + 8)'),
    ('the rest of a row packed like a whole step', 'if (step + STEP > n) return c / 8;',
     ''),
    ('lists written a word too near to each other', 'a.lists + r * a.words);',
     'a.lists + r * (a.words - 1));'),
    ('one list of exceptions for all lanes', '(uint32_t)(c + j) << 16',
     '(uint32_t)c << 16'),
    ("a row's count is of one lane", '    for (int m = 16; m; m /= 2) count += shfl_xor_u32(count, m);\n',
     ''),
    ("a lane's row is the one before", 'int64_t row = piece * m->rows + row_of(a, phase, c, half) + pair;',
     'int64_t row = piece * m->rows + row_of(a, phase, c, half);'),
    ('room for one exception more than there is', 'room = (uint32_t)m->words - 2;',
     'room = (uint32_t)m->words - 1;'),
    ('exceptions delivered into a place in use', '    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);\n    if (row >= 0)',
     '    if (row >= 0)'),
    ("the window of a half is the other's", 'more_shared()->window[h][t.slot]',
     'more_shared()->window[1 - h][t.slot]'),
    ('lower halves of the vector left out', '            mma_bf16(c[1], a, x->lo + 4 * (first + i) + k);\n',
     ''),
    ("high rows take the low rows' corrections", 'struct fix high = more_shared()->fix[in->slot][1][pair];',
     'struct fix high = more_shared()->fix[in->slot][0][pair];'),
    ('every piece of a packed matrix is the first', 'int64_t skip = m->packed ? piece * m->rows',
     'int64_t skip = m->packed ? 0 * piece * m->rows'),
    ("the norm's weight left out for exceptions", 'return phase == GATE_UP ? x * bf16_to_f32(a->post_norm[column]) : x;',
     'return x;'),
]

REASONS = {
    'scratch is not cleared':
        'in stage 6 a counter and the count that a block begins with: what the CPU target fills memory with is the same in both',
    'one block more than multiprocessors':
        'at small shapes two blocks fit on one; a grid that does not fit the cooperative launch refuses',
    'rows are read past their end':
        "16 bytes too many are read and then dropped; in the driver's memory something follows every row",
    'what the stand-ins add stays':
        'the smallest weight of the window times a few inputs: below the tolerance of what runs here; test_packed.py draws weights for which it is not',
    'room for one exception more than there is':
        'exceptions that small in lists that short: below the tolerance; test_packed.py plants it among weights that have more of them',
    'the maximum that lost no bits':
        'it matters for scores of 1e5, which test_numbers.py has',
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
