"""Slopes match known lines, and a short run writes its samples, numbers and figure."""

import json
import mmap
import os
import time

import numpy as np
import pytest

from tests.chaos import soak


def test_the_slope_of_a_line_is_found_whatever_repeats_in_a_block():
    steps = np.arange(300)
    steep, half = soak.slope(5 + 0.25 * steps + 3 * (steps % 20 == 0))
    assert steep == pytest.approx(0.25) and half == pytest.approx(0, abs=1e-9)


def test_what_grows_at_first_is_no_slope():
    steep, _ = soak.slope(np.minimum(np.arange(300.0), 110))
    assert steep == pytest.approx(0, abs=1e-9)


def test_the_interval_holds_the_true_slope_about_19_times_of_20():
    draw, hits = np.random.default_rng(0), 0
    for _ in range(200):
        steep, half = soak.slope(0.01 * np.arange(300) + draw.normal(size=300))
        hits += abs(steep - 0.01) < half
    assert 180 <= hits <= 198


def test_too_few_iterations_have_no_slope():
    assert np.isnan(soak.slope(np.arange(100.0))).all()


def test_a_sample_sees_a_file_and_memory():
    before = soak.sample()
    kept = np.ones(
        2**24
    )  # 128 MB asked for, and perhaps still held from earlier: 128 more from the system itself
    region = mmap.mmap(-1, 2**27)
    np.frombuffer(region, np.uint8)[:] = 1
    with open(os.devnull) as _:
        for _ in range(100):  # some kernels update a process's page counts only occasionally
            after = soak.sample()
            if after["rss"] > before["rss"] + 120:
                break
            time.sleep(0.1)
    assert after["files"] == before["files"] + 1 and after["threads"] >= 1
    assert after["allocated"] - before["allocated"] == pytest.approx(128, abs=1)
    assert 120 < after["rss"] - before["rss"] < 264 and kept[0] == region[0] == 1


@pytest.mark.slow
def test_a_short_soak(tmp_path, capfd):
    """Slow: a real run; slopes and samples are tested with numbers."""
    flags = ["--iterations", "2", "--output", str(tmp_path / "out")]
    assert soak.main(flags) == 0
    samples = soak.read_samples(tmp_path / "out" / "rank-0.csv")
    assert samples["iteration"].tolist() == [1, 2] and (samples["rss"] > samples["allocated"]).all()
    found = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert found["0"]["files"]["last"] == samples["files"][1] and found["0"]["rss"]["slope"] is None
    assert (tmp_path / "out" / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert soak.main(flags) == 2 and "exists" in capfd.readouterr().err
