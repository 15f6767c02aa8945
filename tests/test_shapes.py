"""Stage 7 over the layers of the Llama family: how each is cut, what is refused and how that is
said, small forms of each on the CPU target, positions throughout a long cache."""
import functools
import os
import re

import pytest

import tools

# d, ffn, n_q, n_kv, hd, and a form that keeps n_q / n_kv, hd, n_q * hd / d and ffn / d
MODELS = {
    "llama-3-8b": ((4096, 14336, 32, 8, 128), (512, 1792, 4, 1, 128)),
    "llama-3-70b": ((8192, 28672, 64, 8, 128), (1024, 3584, 8, 1, 128)),
    "llama-3.2-1b": ((2048, 8192, 32, 8, 64), (512, 2048, 8, 2, 64)),
    "llama-3.2-3b": ((3072, 8192, 24, 8, 128), (384, 1024, 3, 1, 128)),
    "qwen2.5-7b": ((3584, 18944, 28, 4, 128), (896, 4736, 7, 1, 128)),
    "qwen2.5-72b": ((8192, 29568, 64, 8, 128), (1024, 3648, 8, 1, 128)),
    "mistral-7b": ((4096, 14336, 32, 8, 128), (512, 1792, 4, 1, 128)),
}
# Rows as long as those of large layers, few of them: one pair of rows a chunk, and two pieces of
# down with 16 query heads a KV head; sixteen pieces of down, and three KV heads.
ODD = {"wide": (8192, 192, 2, 1, 64), "tall": (64, 12864, 64, 4, 128), "pieces": (64, 4096, 9, 3, 64)}
SCRATCH = 8 << 20       # bytes, at any length of the cache
STATE = 1536            # bytes of shared memory before the vector
CHUNK = 16 << 10, 48 << 10


def options(shape):
    return [f"--{name}={n}" for name, n in zip(("d", "ffn", "n-q", "n-kv", "hd"), shape)]


def drive(build, shape, *more, seed=1, sms=3):
    driver = tools.build(f"build/{build if build == 'gpu' else 'cpu/' + build}/stage7/driver")
    status, output = tools.run([str(driver), *options(shape), f"--seed={seed}", *more],
                               CPU_SEED=str(seed), CPU_SMS=str(sms))
    assert status == 0 and output.strip().endswith("PASS"), f"exit status {status}:\n{output}"
    return output


# ------------------------------------------------------------------------------ how it is cut

@functools.lru_cache(None)
def program():
    """tests/geometry.c with stage 7 in it, for the CPU target."""
    tools.build("build/cpu/plain/stage7/driver")
    with tools.alone():
        made = tools.ROOT / "build" / "geometry"
        objects = [f"build/cpu/plain/{name}.o" for name in ("stage7/kernels", "cpu/cpu")]
        status, text = tools.run([os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror",
                                  "-g", "-Istages/cpu", "-o", f"{made}.new", "tests/geometry.c",
                                  *objects, "-lm"])
        assert status == 0, text
        os.replace(f"{made}.new", made)
    return made


def built(shape, rows, *how):
    status, text = tools.run([str(program()), *map(str, shape), str(rows), *how])
    assert status == 0, text
    return text.split()


def refusal(shape, rows, *how):
    """(status, bytes of device memory that were asked for, the text)"""
    words = built(shape, rows, *how)
    assert words[0] == "refused", words
    return int(words[1]), int(words[2]), " ".join(words[3:])


@pytest.mark.parametrize("rows", [128, 4224, 131072])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_cut_well(model, rows):
    d, ffn, n_q, n_kv, hd = shape = MODELS[model][0]
    word, *numbers = built(shape, rows)
    assert word == "built"
    scratch, warps, slot, vector, pieces, groups, units, *chunks, shared = map(int, numbers)
    assert scratch <= SCRATCH
    assert all(CHUNK[0] <= chunk <= min(slot, CHUNK[1]) for chunk in chunks)
    assert warps * slot >= 160 << 10 and shared == STATE + vector + warps * slot <= 232448
    assert groups * units == 128 and groups == n_kv   # one unit a multiprocessor, a key read once
    assert 4 * max(d, n_q * hd, -(-ffn // pieces)) <= vector


def test_scratch_memory_does_not_grow_with_the_cache():
    for shape, _ in MODELS.values():
        assert built(shape, 128) == built(shape, 131072)


@pytest.mark.parametrize("shape", [(64, 16 * 19200, 1, 1, 64), (19200, 64, 1, 1, 64),
                                   (64, 64, 150, 150, 128), (16384, 53248, 128, 8, 128)])
def test_the_largest_that_fits_is_built(shape):
    assert built(shape, 131072)[0] == "built"


# --------------------------------------------------------------------------- what is refused

GOOD = (128, 192, 4, 2, 64)
BAD = {   # what changes, and what the refusal says of it
    "d": (dict(d=100), "d must be a multiple of 64 up to 16777216, and is 100"),
    "d 0": (dict(d=0), "d must be .* and is 0"),
    "ffn": (dict(ffn=-64), "ffn must be .* and is -64"),
    "hd": (dict(hd=96), "hd must be 64 or 128, and is 96"),
    "n_q": (dict(n_q=4098), "n_q must be 1 to 4096, and is 4098"),
    "n_kv": (dict(n_kv=3), "n_kv must divide n_q, and is 3"),
    "n_kv 0": (dict(n_kv=0), "n_kv must divide n_q, and is 0"),
    "17 heads": (dict(n_q=17, n_kv=1), "at most 16 query heads may share a KV head, and 17 do"),
    "rows": (dict(rows=0), "max_seq_len must be 1 to 16777216, and is 0"),
    "wide": (dict(d=19264), "must be at most 19200 on this device, and is 19456"),
    "many heads": (dict(n_q=304, n_kv=19), "must be at most 19200 on this device, and is 19456"),
    "tall": (dict(ffn=16 * 19200 + 64), "must be at most 19200 on this device, and is 19456"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_refusal_names_the_rule_and_the_number(what):
    changes, says = BAD[what]
    shape = dict(zip(("d", "ffn", "n_q", "n_kv", "hd"), GOOD), rows=128)
    shape.update(changes)
    status, allocated, text = refusal(tuple(shape.values())[:5], shape["rows"])
    assert status == 3 and allocated == 0 and re.search(says, text), text


def test_a_refusal_names_the_pointer():
    assert refusal(GOOD, 128, "no-up") == (1, 0, "up is null")
    status, allocated, text = refusal(GOOD, 128, "odd-k")
    assert (status, allocated) == (2, 0) and text == "k_cache must be 16-byte aligned, and is at 0x1002"


def test_a_grid_without_room_is_refused_with_the_numbers():
    shape = MODELS["llama-3-70b"][0]
    status, allocated, text = refusal(shape, 4224, "no-block")
    assert status == 5 and allocated == 0
    assert text == "a block of 480 threads and 230912 bytes of shared memory does not fit on a multiprocessor"
    status, _, text = refusal(shape, 4224, "no-grid")
    assert status == 5 and "3 blocks of 480 threads and 230912 bytes" in text and "cooperative" in text


# ------------------------------------------------------------------------- on the CPU target

SMALL = {name: small for name, (_, small) in MODELS.items() if name != "mistral-7b"}   # as llama-3-8b
CHEAP = ("llama-3-8b", "llama-3.2-1b", "llama-3.2-3b")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", CHEAP)
def test_a_model_in_small(model, seed):
    drive("asan", SMALL[model], "--rows=200", "--at=133,64,0", seed=seed)


@pytest.mark.parametrize("name", [*(name for name in SMALL if name not in CHEAP), *ODD])
def test_a_larger_one_in_small(name):
    drive("plain", {**SMALL, **ODD}[name], "--rows=200", "--at=133,63", seed=3)


# One KV head: 128 units of 16 tiles at the end of this cache, of one tile at 8191.
LONG = (64, 64, 1, 1, 64)


def test_the_end_of_a_long_cache_and_the_edges_of_units_and_tiles():
    drive("plain", LONG, "--rows=131072", "--at=131071,131070,131008,131007,57344,57343,8192,8191,64,63,0")


def test_long_units_of_wide_heads():
    drive("plain", (64, 64, 3, 1, 128), "--rows=60000", "--at=59999,57343,5")   # of 8 tiles, of 7


def test_a_short_position_after_a_long_one_and_again():
    drive("asan", LONG, "--rows=131072", "--at=131071,5,131071", sms=2)


def test_a_short_cache():
    drive("asan", LONG, "--rows=128", "--at=127,0", sms=2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, at", [(128, "127,0"), (131072, "131071,5,131071,57344,8191")])
def test_on_the_gpu(rows, at):
    drive("gpu", MODELS["llama-3.2-1b"][0], f"--rows={rows}", f"--at={at}")


def test_the_same_bits_however_many_blocks_share_long_units():
    output = drive("plain", (64, 64, 65, 65, 64), "--prefill=520")   # a unit of nine tiles for each head
    assert output.count("the same bits on") == 3
