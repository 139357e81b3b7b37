"""A checkpoint is whole or absent: killed writers, ranks that fail, full disks, damaged files."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.files import manifest
from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import RankError
from sage_grpo.train import checkpoint_folders, saving
from sage_grpo.train.build import build_trainer
from sage_grpo.train.guards import TrainingError
from tests.disks import fill, small_disk
from tests.dist import run_ranks
from tests.hostile import change, sealed_again
from tests.smallest_run import slow
from tests.train.iterations import load, save

WRITES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "os.truncate",
    "os.link",
}


def folder_of(trainer):
    return trainer.run.path / "checkpoints"


def names(trainer):
    return sorted(path.name for path in folder_of(trainer).glob("*"))


def weights(trainer):
    return {
        name: local_shard(p).detach().clone() for name, p in trainer.optimization.parameters.items()
    }


def kill_before_write(number, folder):
    """SIGKILL this process instead of its `number`-th change in the folder."""
    left = [number]

    def audit(event, arguments):
        writes = event in WRITES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY
        )
        if writes and str(arguments[0]).startswith(str(folder)):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def save_later(trainer):
    """Write the checkpoint of the next iteration."""
    trainer.state.step = 2
    save(trainer, folder_of(trainer))


def save_again(trainer):
    """Replace the checkpoint."""
    save(trainer, folder_of(trainer))


def renew_card(trainer):
    """Replace the card of the checkpoint."""
    trainer.saves.renew_card()


def die_in_save(ranks, values, write):
    """Kill the writer before each of its writes; returns the checkpoint that the loader finds each time."""
    trainer = build_trainer(from_values(values), ranks)
    trainer.validation = None
    trainer.train()
    folder, seen = folder_of(trainer), []
    shutil.copytree(folder, folder.with_name("before"))
    for number in range(1, 200):
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("before"), folder)
        child = os.fork()
        if child == 0:
            kill_before_write(number, folder)
            write(trainer)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        path = checkpoint_folders.choose(trainer.run.path, "auto", ranks)
        checkpoint_folders.check_files(path, ranks)
        step = checkpoint_folders.step_of(path)
        checkpoint_folders.tidy(folder, step, path)
        left = {p.name.partition(".aside")[0] for p in folder.iterdir()}
        seen.append(f"step-{step:06d}")
        assert left <= {"step-000001", "step-000002"} and seen[-1] in left
        checkpoint_folders.check_files(folder / seen[-1], ranks)
    return seen


@pytest.mark.parametrize("use_lora", [True, slow(False)], ids=["lora", "full"])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(flags, use_lora):
    values = flags | {"use_lora": use_lora, "max_steps": 1, "keep_checkpoints": 1}
    (seen,) = run_ranks(1, die_in_save, values, save_later)
    turn = seen.index("step-000002")
    assert turn >= 6 and set(seen[:turn]) == {"step-000001"} and set(seen[turn:]) == {"step-000002"}


@pytest.mark.parametrize("write", [save_again, slow(renew_card)])
def test_a_writer_killed_while_it_replaces_a_checkpoint_leaves_one_of_them(flags, write):
    """Slow: the card alone."""
    values = flags | {"use_lora": True, "max_steps": 1, "keep_checkpoints": 1}
    (seen,) = run_ranks(1, die_in_save, values, write)
    assert len(seen) >= 8 and set(seen) == {"step-000001"}


def fail_in_save(ranks, values, guilty, function):
    """One rank's write fails; then it works again. Returns what all said, what lay there, and whether state changed."""
    trainer = build_trainer(from_values(values | {"batch_size": 4 // ranks.dp_size}), ranks)
    trainer.validation = None
    trainer.train()
    before, works = weights(trainer), getattr(saving, function)
    trainer.state.step += 1

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if ranks.world_rank == guilty:
        setattr(saving, function, fails)
    with pytest.raises(TrainingError) as error:
        save(trainer, folder_of(trainer))
    ranks.barrier()
    there = names(trainer)
    setattr(saving, function, works)
    ranks.barrier()
    again = save(trainer, folder_of(trainer)).name
    same = all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())
    return str(error.value), there, again, same


@pytest.mark.parametrize(
    "guilty, function", [slow(0, "write_files"), (1, "write_files"), (0, "commit")]
)
def test_one_rank_that_cannot_write_is_an_error_of_all(flags, guilty, function):
    values = flags | {"max_steps": 1, "num_generations": 4, "enable_fsdp": True}
    for said, there, again, same in run_ranks(
        2, fail_in_save, values, guilty, function, sharded=True
    ):
        assert said == (
            f"step-000002 could not be written: rank {guilty}: OSError: [Errno 28] No space left on device"
        )
        assert there == ["step-000001"] and again == "step-000002" and same


def test_a_full_disk_loses_nothing(make, tmp_path, capfd):
    wanted = make(max_steps=6, save_interval=2, output_dir=str(tmp_path / "wanted"))
    wanted.train()
    size = sum(p.stat().st_size for p in folder_of(wanted).rglob("*") if p.is_file()) // 3
    with small_disk(tmp_path / "disk", megabytes=8 + 4 * size // 2**20):  # room for four
        filler = tmp_path / "disk" / "filler"
        trainer = make(max_steps=6, save_interval=2, output_dir=str(tmp_path / "disk" / "run"))
        finish, seen = trainer.finish_iteration, []

        def fill_in_fourth_iteration():
            filler.unlink(missing_ok=True)
            if trainer.step == 4:
                fill(filler, leave=4096)
            finish()
            seen.append(
                [path.name for path in checkpoint_folders.list_checkpoints(folder_of(trainer))]
            )

        trainer.finish_iteration = fill_in_fourth_iteration
        trainer.train()
        lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
        checkpoint_folders.check_files(folder_of(trainer) / "step-000006", trainer.ranks)
    said = capfd.readouterr().err
    assert "step-000004 could not be written" in said and "o space left on device" in said
    assert seen[3] == ["step-000002"]  # after the third, a slow machine may still be writing it
    assert seen[5] == [
        "step-000002",
        "step-000005",
        "step-000006",
    ]  # tried again before the next interval
    assert [line[:30] for line in lines if '"kind": "train"' in line] == [
        f'{{"kind": "train", "step": {step}, "'[:30] for step in range(1, 7)
    ]
    expected = weights(wanted)
    assert all(torch.equal(value, expected[name]) for name, value in weights(trainer).items())


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_an_error(make, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make(max_steps=1)
    monkeypatch.setattr(saving, "write_files", fails)
    with pytest.raises(RuntimeError, match="step-000001 could not be written: OSError"):
        trainer.train()
    assert names(trainer) == []


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def three(make):
    trainer = make(use_lora=True, max_steps=3, save_interval=1)
    trainer.validation = None
    trainer.train()
    return trainer


def test_auto_steps_back_to_the_last_good_one_and_says_so(make, three, capfd):
    rank_file = folder_of(three) / "step-000003" / "trainer" / "rank-00000.safetensors"
    damage_byte(rank_file)
    (folder_of(three) / "step-000002" / "trainer" / "state.json").unlink()
    resumed = make(use_lora=True, max_steps=3, save_interval=1, resume_from_checkpoint="auto")
    said = capfd.readouterr().err
    assert resumed.step == 1
    assert f"note: step-000003 is damaged and left out: Damaged: {rank_file} was changed" in said
    assert (
        "note: step-000002 is damaged and left out: Damaged: " in said
        and "state.json is missing" in said
    )
    assert names(three) == ["step-000001", "step-000002.aside1", "step-000003.aside1"]
    resumed.validation = None
    resumed.train()
    assert all(torch.equal(value, weights(three)[name]) for name, value in weights(resumed).items())
    assert [p.name for p in checkpoint_folders.list_checkpoints(folder_of(three))] == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]


def test_a_named_checkpoint_that_is_damaged_is_refused_by_file_name(make, three):
    path = folder_of(three) / "step-000003"
    damage_byte(path / "trainer" / "state.json")
    with pytest.raises(
        ConfigError, match=r"step-000003 is not a complete checkpoint: .*state.json was changed"
    ):
        make(use_lora=True, resume_from_checkpoint=str(path))
    with pytest.raises(manifest.Damaged, match=r"pytorch_lora_weights.safetensors was changed"):
        damage_byte(path / "pytorch_lora_weights.safetensors")
        three.backbone.load_weights(path)


def test_when_all_are_damaged_nothing_starts_over(make, three):
    for path in checkpoint_folders.list_checkpoints(folder_of(three)):
        (path / manifest.NAME).write_text("{}")
    with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
        make(use_lora=True, resume_from_checkpoint="auto")
    assert len(names(three)) == 3


@given(data=st.data())
def test_a_strange_checkpoint_is_refused_in_one_sentence(three, tmp_path, data):
    """Any bytes in any file, with hashes to match: loading works, or says what is wrong in one line."""
    path = tmp_path / "strange"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder_of(three) / "step-000002", path)
    victims = sorted(p for p in path.rglob("*") if p.is_file() and p.name != manifest.NAME)
    victim = data.draw(st.sampled_from(victims))
    content = victim.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "bytes", "json", "change", "delete"]))
    if kind == "cut":
        victim.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    elif kind == "bytes":
        victim.write_bytes(data.draw(st.binary(max_size=64)))
    elif kind == "json":
        plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
        keys = st.sampled_from(
            ["step", "updates", "controller", "skipped", "skipped_in_a_row", "config", "x"]
        )
        value = data.draw(st.dictionaries(keys, plain | st.lists(plain, max_size=2)) | plain)
        victim.write_text(json.dumps(value))
    elif kind == "change":
        place = data.draw(st.integers(0, min(len(content) - 1, 2000)))
        victim.write_bytes(
            content[:place] + bytes([data.draw(st.integers(0, 255))]) + content[place + 1 :]
        )
    else:
        victim.unlink()
    sealed_again(path)
    try:
        three.ranks.on_all(lambda: checkpoint_folders.check_files(path, three.ranks))
        load(three, path)
    except (ConfigError, RankError) as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize(
    "name, value", [("step", "7"), ("updates", None), ("controller", []), ("config", 1)]
)
def test_a_state_of_another_kind_is_refused_by_name(three, name, value):
    path = folder_of(three) / "step-000003"
    change(path / "trainer" / "state.json", **{name: value})
    sealed_again(path)
    with pytest.raises(
        ConfigError,
        match=f"cannot be read as a checkpoint of this version: Damaged: .*state.json has {name} ",
    ):
        load(three, path)


def test_the_path_of_a_loaded_checkpoint_stays_inside(three, tmp_path):
    path = folder_of(three) / "step-000003"
    text = (
        (path / manifest.NAME)
        .read_text()
        .replace("trainer/state.json", "../step-000002/trainer/state.json")
    )
    (path / manifest.NAME).write_text(text)
    with pytest.raises(manifest.Damaged, match="is not a list of files in this folder"):
        checkpoint_folders.check_files(path, three.ranks)
    assert Path(path).is_dir()
