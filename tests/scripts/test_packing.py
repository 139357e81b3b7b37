"""Results and unfinished runs travel in a tar file that can do no harm where it is opened."""

import io
import tarfile

import pytest

from sage_grpo.config import ConfigError
from scripts import packing, results
from scripts.studies import Plan
from tests.scripts.invented_results import invented

RUNS = list(Plan(["last_step"], 2).runs.values())
NAMES = [run.name for run in RUNS]


def make_run(work, name, step, size=1000):
    """A run folder with two checkpoints, the newest of `step`, and things that need not travel."""
    for number in (1, step):
        folder = work / name / "checkpoints" / f"step-{number:06d}" / "trainer"
        folder.mkdir(parents=True)
        (folder / "rank-00000.safetensors").write_bytes(b"x" * size)
        (folder.parent / "manifest.json").write_text("{}")
    (work / name / "validation").mkdir()
    (work / name / "validation" / "clip.mp4").write_bytes(b"y" * size)
    for file in ("metrics.jsonl", "run.json", "status.json"):
        (work / name / file).write_text(f"{file} of {step}")


@pytest.fixture
def here(tmp_path):
    """Work and results of a machine: one run done, two begun, one not."""
    work, folder = tmp_path / "work", tmp_path / "results"
    folder.mkdir()
    results.write(folder / f"{NAMES[0]}.json", invented(RUNS[0]))
    make_run(work, NAMES[1], 5)
    make_run(work, NAMES[2], 7)
    return work, folder


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_there_and_back(here, tmp_path):
    work, folder = here
    assert packing.pack(tmp_path / "a.tar", folder, work, NAMES[1:], 1.0) == []
    there = tmp_path / "there"
    packing.unpack(tmp_path / "a.tar", there / "results", there / "work", NAMES)
    assert contents(there / "results") == contents(folder)
    kept = {name: data for name, data in contents(work).items() if "000001" not in name and "clip" not in name}
    assert contents(there / "work") == kept and len(kept) == 10
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert all(not e.name.startswith("/") and e.isfile() and not (e.uid or e.gid or e.uname) for e in tar)


def test_what_does_not_fit_is_left_out_and_named(here, tmp_path):
    work, folder = here
    make_run(work, NAMES[3], 9, size=60_000)
    assert packing.pack(tmp_path / "a.tar", folder, work, [NAMES[3], NAMES[2], NAMES[1]], 50_000 / 2**20) == [NAMES[3]]
    assert (tmp_path / "a.tar").stat().st_size <= 50_000
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {name.split("/")[1] for name in tar.getnames()} == {f"{NAMES[0]}.json", NAMES[1], NAMES[2]}


def test_what_is_there_and_as_far_stays(here, tmp_path):
    work, folder = here
    packing.pack(tmp_path / "a.tar", folder, work, NAMES[1:], 1.0)
    there = tmp_path / "there"
    make_run(there, NAMES[1], 6)
    make_run(there, NAMES[2], 6)
    results.write(folder / f"{NAMES[0]}.json", invented(RUNS[0]) | {"commit": "ours"})
    packing.unpack(tmp_path / "a.tar", folder, there, NAMES)
    assert results.read(folder / f"{NAMES[0]}.json")["commit"] == "ours"
    assert (there / NAMES[1] / "metrics.jsonl").read_text() == "metrics.jsonl of 6"
    assert (there / NAMES[2] / "metrics.jsonl").read_text() == "metrics.jsonl of 7"
    assert not (there / NAMES[2] / "validation").exists()  # it goes on from the other's state, with the other's files


@pytest.mark.parametrize(
    "name, words", [("../../evil", "cannot be read"), ("runs/evil/run.json", "which is no run of the studies")]
)
def test_hostile_files_are_refused(tmp_path, name, words):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"evil"))
    (tmp_path / "in" / "side").mkdir(parents=True)
    with pytest.raises(ConfigError, match=words):
        packing.unpack(tmp_path / "a.tar", tmp_path / "in" / "side" / "r", tmp_path / "in" / "side" / "w", NAMES)
    assert not [path for path in (tmp_path / "in").rglob("*") if path.is_file()]


def test_links_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        entry = tarfile.TarInfo("runs/link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(entry)
    with pytest.raises(ConfigError, match="it holds 'runs/link', which is no file below its folder"):
        packing.unpack(tmp_path / "a.tar", tmp_path / "r", tmp_path / "w", NAMES)


def test_a_file_that_is_missing_or_no_tar_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        packing.unpack(tmp_path / "a.tar", tmp_path / "r", tmp_path / "w", NAMES)
    (tmp_path / "a.tar").write_text("no tar")
    with pytest.raises(ConfigError, match="cannot be read as a file that --pack wrote"):
        packing.unpack(tmp_path / "a.tar", tmp_path / "r", tmp_path / "w", NAMES)
