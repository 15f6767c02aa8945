"""The timers on the device, on the CPU target: what the driver makes of them."""
import sys

import pytest

import tools

sys.path.insert(0, str(tools.ROOT / "plots"))
import tables  # noqa: E402

SHAPE = ["--d=192", "--ffn=320", "--n-q=6", "--n-kv=2", "--hd=64", "--prefill=150"]
PHASES = {"stage6": ["QKV", "attention", "merge", "O", "gate and up", "down"],
          "stage7": ["QKV", "attention", "O", "gate and up", "down"],
          "stage8": ["QKV", "attention", "O", "gate and up", "down"]}
SMS = 3


@pytest.mark.parametrize("stage", sorted(PHASES))
def test_each_block_has_a_row_for_each_phase(stage, tmp_path):
    driver, file = tools.build(f"build/cpu/timers/{stage}/driver"), tmp_path / "timeline.csv"
    status, output = tools.run([str(driver), *SHAPE, f"--timeline={file}"], CPU_SMS=str(SMS),
                               COMMIT="abc", DRIVER_VERSION="1.2")
    assert status == 0, output
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    header, rows = tables.read_timeline(file)
    assert set(tables.PROVENANCE) <= set(header)
    assert (header["commit"], header["driver"]) == ("abc", "1.2")
    assert sorted((r["sm"], r["phase"]) for r in rows) == \
        sorted((sm, phase) for sm in range(SMS) for phase in PHASES[stage])
    assert min(r["start_us"] for r in rows) == 0
    assert all(r["start_us"] < r["end_us"] for r in rows)
    for sm in range(SMS):
        starts = [r["start_us"] for phase in PHASES[stage] for r in rows
                  if (r["sm"], r["phase"]) == (sm, phase)]
        assert starts == sorted(starts), "a block begins its phases in their order"
    for phase in PHASES[stage]:
        assert any(line.strip().startswith(phase) for line in output.splitlines()), output


@pytest.mark.parametrize("stage", sorted(PHASES))
def test_with_timers_a_stage_still_passes(stage):
    driver = tools.build(f"build/cpu/timers/{stage}/driver")
    status, output = tools.run([str(driver)], CPU_SEED="5")
    assert status == 0 and output.strip().endswith("PASS"), output


@pytest.mark.parametrize("stage", sorted(PHASES))
def test_without_timers_there_is_no_timeline(stage, tmp_path):
    driver = tools.build(f"build/cpu/plain/{stage}/driver")
    status, output = tools.run([str(driver), f"--timeline={tmp_path / 'timeline.csv'}"])
    assert status == 2 and "timeline" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(tools.gpu_is_here(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_written():
    before = sorted((tools.ROOT / "data").glob("timeline-*"))
    status, output = tools.make("timeline")
    assert status == 2 and "no NVIDIA GPU" in output
    assert sorted((tools.ROOT / "data").glob("timeline-*")) == before
