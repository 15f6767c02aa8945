"""What kernels take of a multiprocessor: reading what ptxas says, and the committed table."""
import re
import sys

import pytest

import tools

sys.path.insert(0, str(tools.ROOT / "plots"))
import resources   # noqa: E402
import tables      # noqa: E402

SAID = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
ptxas info    : Function properties for _Z4partPv
    16 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
"""
SECTIONS = """
  [ 9] .text.one         PROGBITS        0000000000000000 001800 01b300 00  AX  0   0 128
  [10] .text.two         PROGBITS        0000000000000000 001c80 000100 00  AX  0   0 128
  [11] .nv.shared.two    NOBITS          0000000000000000 001d80 000400 00  WA  0   0 16
"""


def test_what_ptxas_says_is_read():
    assert resources.told_by_ptxas(SAID) == ({"one": [40, 8, 16], "two": [255, 0, 0]}, [16, 3])
    assert resources.code_bytes(SECTIONS) == {"one": 0x1b300, "two": 0x100}


def committed():
    header, rows = tables.read(tools.ROOT / "data" / "resources.csv", resources.COLUMNS,
                               words=("kernel",), needed=resources.COLUMNS)
    return header, {row["kernel"]: [int(row[c]) for c in resources.COLUMNS[1:]] for row in rows}


def test_the_committed_table():
    """Every stage is there; the persistent kernels fit the register file and keep nothing in local memory."""
    _, kernels = committed()
    assert {"stage" + name.split("-")[0] for name in kernels} == set(tools.STAGES)
    for name in ("7-whole_layer", "8-whole_layer"):
        registers, stack, spilled, _ = kernels[name]
        assert registers * 512 <= 65536 and stack == spilled == 0


@pytest.mark.parametrize("stage", ["stage7", "stage8"])
def test_the_table_is_of_this_code(stage):
    header, kernels = committed()
    if tools.nvcc() is None or header["cuda"] not in tools.run([tools.nvcc(), "--version"])[1]:
        pytest.skip("not the nvcc of the table")
    flags = re.match(r"nvcc (.*?);", header["protocol"]).group(1).split()
    made = {name: numbers for name, *numbers in resources.rows_of(stage, tools.nvcc(), flags)}
    assert made == {name: kernels[name] for name in kernels if name.startswith(stage[-1] + "-")}
