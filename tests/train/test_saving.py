"""Checkpoints that are written while training goes on: slow disks, what is saved when, what never is."""

import json
import math
import os
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.background import Work
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.files import manifest
from sage_grpo.models import backbone
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.weights import open_folder, open_safetensors
from sage_grpo.parallel.fsdp import full_tensor
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train import checkpoint, checkpoint_folders, export, saving
from sage_grpo.train.build import build_trainer
from sage_grpo.train.guards import TrainingError
from tests.dist import CONTEXT, run_ranks
from tests.hostile import change, sealed_again
from tests.smallest_run import on_both, prepare_process, slow


def folder_of(trainer):
    return trainer.run.path / "checkpoints"


def names(folder):
    return [path.name for path in checkpoint_folders.list_checkpoints(folder)]


def without_validation(values, ranks):
    trainer = build_trainer(from_values(values), ranks)
    trainer.validation = None
    return trainer


def slowly(write, seconds, pieces=1):
    """A disk on which every piece takes a while; each file has at least so many."""

    def written(draft, files, on_piece):
        def advance():
            for _ in range(pieces):
                time.sleep(seconds)
                on_piece()

        return write(draft, files, advance)

    return written


def train_on_disk(ranks, values, seconds, pieces):
    """The disk of the last rank is slow; returns how long the run took, and its checkpoints."""
    trainer = without_validation(values | {"batch_size": 4 // ranks.dp_size}, ranks)
    ranks.set_timeout(trainer.config.collective_timeout)
    if ranks.world_rank == ranks.world_size - 1:
        saving.write_files = slowly(saving.write_files, seconds, pieces)
    begun = time.monotonic()
    trainer.train()
    return time.monotonic() - begun, names(folder_of(trainer))


@pytest.mark.parametrize("world", [slow(1), slow(2)])
def test_a_slow_disk_does_not_end_a_run(flags, world):
    """Slow: on two ranks that share a model, of which one waits for the other."""
    values = flags | {"use_lora": True, "enable_fsdp": world > 1, "max_steps": 1}
    values["collective_timeout"] = 2.0 * world
    arguments = (train_on_disk, values, 0.1, 2 * world)
    for seconds, checkpoints in run_ranks(world, *arguments, sharded=world > 1):
        assert seconds > values["collective_timeout"] and checkpoints == ["step-000001"]


def train_on_dead_disk(values):
    prepare_process()
    train_on_disk(Ranks(0, 1, torch.device("cpu")), values, 1000, 1)


def test_a_disk_that_stands_still_ends_it_like_any_hang(flags, tmp_path):
    values = flags | {"use_lora": True, "max_steps": 1, "collective_timeout": 2.0}
    process = CONTEXT.Process(target=train_on_dead_disk, args=(values,))
    process.start()
    process.join(100)
    assert process.exitcode == 1
    record = json.loads((tmp_path / "run" / "flight" / "rank-00000.json").read_text())
    assert record["phase"] == "save" and "collective_timeout" in record["message"]


@on_both
@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
def test_a_checkpoint_written_during_training_is_that_of_its_iteration(
    make, tmp_path, monkeypatch, use_lora
):
    """Its files are held back until two more iterations have changed the weights."""
    changes = {
        "use_lora": use_lora,
        "max_steps": 4,
        "save_interval": 1,
        "keep_checkpoints": 9,
        "ema_decay": 0.5,
    }
    waited = make(**changes, async_save=False, output_dir=str(tmp_path / "waited"))
    waited.validation = None
    waited.train()
    trainer, gate, write = (
        make(**changes | {"save_interval": 2}),
        threading.Event(),
        saving.write_files,
    )
    monkeypatch.setattr(saving, "write_files", lambda *rest: gate.wait(60) and write(*rest))
    trainer.validation, finish = None, trainer.finish_iteration

    def open_gate_in_fourth():
        if trainer.step == 4:
            assert names(folder_of(trainer)) == []
            gate.set()
        finish()

    trainer.finish_iteration = open_gate_in_fourth
    trainer.train()
    assert names(folder_of(trainer)) == ["step-000002", "step-000004"]
    for name in names(folder_of(trainer)):
        both = (manifest.read(folder_of(run) / name) for run in (trainer, waited))
        mine, other = (
            {k: v for k, v in files.items() if k.endswith(".safetensors")} for files in both
        )
        assert mine == other and mine


def test_without_room_for_a_copy_the_run_waits(make, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 1000)
    trainer = make(max_steps=2, save_interval=1)
    trainer.validation, finish, seen = None, trainer.finish_iteration, []
    trainer.finish_iteration = lambda: finish() or seen.append(names(folder_of(trainer)))
    trainer.train()
    assert seen == [["step-000001"], ["step-000001", "step-000002"]]


def test_a_run_that_must_stop_waits_for_what_is_being_written(make, monkeypatch):
    trainer = make(max_steps=3, save_interval=1)
    monkeypatch.setattr(saving, "write_files", slowly(saving.write_files, 0.005))
    trainer.validation, score = None, trainer.score

    def fails_in_second(*rest):
        if trainer.step == 1:
            raise TrainingError("the rewards failed")
        return score(*rest)

    trainer.score = fails_in_second
    with pytest.raises(TrainingError, match="the rewards failed"):
        trainer.train()
    assert names(folder_of(trainer)) == ["step-000001"]


@pytest.mark.parametrize("minutes, expected", [(1e-9, [1, 2, 3]), (60.0, [3])])
def test_time_calls_for_a_checkpoint_as_iterations_do(make, minutes, expected):
    trainer = make(max_steps=3, save_interval=0, save_minutes=minutes)
    trainer.validation = None
    trainer.train()
    assert [
        checkpoint_folders.step_of(path)
        for path in checkpoint_folders.list_checkpoints(folder_of(trainer))
    ] == expected


def test_validated_checkpoints_are_kept_longest_and_those_by_time_shortest(tmp_path):
    steps = (5, 10, 13, 20, 27, 29)
    folders = [tmp_path / f"step-{step:06d}" for step in steps]
    for folder in folders:
        folder.mkdir()
        (folder / manifest.NAME).touch()

    def left(keep, save_interval, validation_interval=0):
        config = Config(
            keep_checkpoints=keep,
            save_interval=save_interval,
            validation_interval=validation_interval,
        )
        gone = checkpoint_folders.surplus(folders, config)
        return [checkpoint_folders.step_of(folder) for folder in folders if folder not in gone]

    assert left(3, 10) == [10, 20, 29]
    assert left(2, 10) == [20, 29]
    assert left(1, 10) == [29]
    assert left(4, 10) == [10, 20, 27, 29]
    assert left(3, 0) == [20, 27, 29]
    assert left(9, 10) == list(steps)

    assert left(2, 5, 10) == [20, 29]
    assert left(3, 5, 13) == [13, 20, 29]
    assert left(4, 5, 13) == [10, 13, 20, 29]
    assert left(2, 5, 13) == [13, 29]


def test_time_does_not_call_between_two_optimizer_steps(make):
    trainer = make(max_steps=4, save_interval=0, save_minutes=1e-9, gradient_accumulation_steps=2)
    trainer.validation = None
    trainer.train()
    assert names(folder_of(trainer)) == ["step-000002", "step-000004"]


def velocity(model, trainer):
    x = torch.randn(1, *trainer.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.velocity(x, 0.5, trainer.guidance.negative, Guidance())


@on_both
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_all_weights_are_stored_once_and_read_from_the_shards(make, tmp_path, ema):
    trainer = make(
        max_steps=4, save_interval=1, export_interval=3, keep_checkpoints=9, ema_decay=ema
    )
    trainer.validation = None
    trainer.train()
    exported = [
        path.name
        for path in checkpoint_folders.list_checkpoints(folder_of(trainer))
        if (path / "transformer").is_dir()
    ]
    assert exported == ["step-000003", "step-000004"]
    last = folder_of(trainer) / "step-000004"
    fresh = open_backbone(trainer.config.pretrained_model_root)
    fresh.load_weights(last)
    from_export = velocity(fresh, trainer)
    shutil.rmtree(last / "transformer")
    sealed_again(last)
    fresh.load_weights(last)
    assert torch.equal(velocity(fresh, trainer), from_export)
    start = make(init_from_checkpoint=str(last), output_dir=str(tmp_path / "other"))
    assert torch.equal(velocity(start.backbone, trainer), from_export)
    with trainer.optimization.using(trainer.optimization.average):
        torch.testing.assert_close(
            from_export, velocity(trainer.backbone, trainer), rtol=1e-4, atol=1e-5
        )


def export_in_parts(ranks, values):
    backbone.plan_files = partial(backbone.plan_files, max_bytes=300)
    trainer = without_validation(values | {"batch_size": 2}, ranks)
    trainer.train()
    held = {
        name: full_tensor(p.detach()) for name, p in trainer.backbone.transformer.named_parameters()
    }
    if not ranks.is_first:
        return None
    folder = folder_of(trainer) / "step-000001" / "transformer"
    weights = open_folder(folder)  # compares the index with the files
    equal = all(torch.equal(weights.read(name), value) for name, value in held.items())
    return len(list(folder.glob("*.safetensors"))), sorted(weights.names) == sorted(held), equal


def test_ranks_share_the_export(flags):
    values = flags | {"enable_fsdp": True, "max_steps": 1}
    (count, complete, equal), _ = run_ranks(2, export_in_parts, values, sharded=True)
    assert count > 2 and complete and equal


def test_weights_that_left_the_numbers_stop_the_run_and_are_never_saved(make):
    first = make(max_steps=1, save_interval=1)
    first.validation = None
    first.train()
    trainer = make(max_steps=4, save_interval=1, resume_from_checkpoint="auto")
    trainer.validation = None
    next(
        state for name, state in trainer.optimization.tensors().items() if name.endswith("exp_avg")
    ).fill_(math.nan)
    words = (
        r"the weights are not finite after iteration 2: lower learning_rate \(0.001\) or weight_decay \(0.01\); "
        r"--resume_from_checkpoint last_good goes back to step-000001"
    )
    with pytest.raises(TrainingError, match=words):
        trainer.train()
    assert names(folder_of(trainer)) == ["step-000001"]


@pytest.mark.parametrize("part", ["weights", "optimizer", "anchor", "average"])
def test_a_state_that_is_not_finite_is_never_committed(make, part):
    trainer = make(max_steps=1, use_moving_KL=False, use_dual_kl=False, ema_decay=0.5)
    trainer.validation = None
    trainer.train()
    trainer.state.step += 1
    tensor = [value for value in trainer.state.tensors()[part].values() if value.ndim][-1]
    tensor.data.view(-1)[-1] = math.nan
    words = rf"step-000002 was not written: {part}/.* is not finite: lower learning_rate .* goes back to step-000001"
    with pytest.raises(TrainingError, match=words):
        trainer.saves.begin()
    assert sorted(path.name for path in folder_of(trainer).iterdir()) == ["step-000001"]


def test_last_good_leaves_out_what_was_written_while_the_run_diverged(make, capfd):
    trainer = make(use_lora=True, max_steps=3, save_interval=1)
    trainer.validation = None
    trainer.train()
    third, second = (folder_of(trainer) / f"step-{step:06d}" for step in (3, 2))
    change(third / "trainer" / "state.json", skipped_in_a_row=2)
    file = second / "trainer" / "rank-00000.safetensors"
    tensors, starts = load_file(file), open_safetensors(file).metadata
    next(value for name, value in tensors.items() if "exp_avg" in name).view(-1)[0] = math.inf
    save_file(tensors, file, metadata=starts)
    for path in (third, second):
        sealed_again(path)
    assert make(use_lora=True, resume_from_checkpoint="last_good").step == 1
    said = capfd.readouterr().err
    assert (
        "2 updates before it were skipped as not finite" in said
        and "exp_avg" in said
        and "is not finite" in said
    )
    assert names(folder_of(trainer)) == ["step-000001"]


def test_a_renamed_checkpoint_is_refused(make, capfd):
    trainer = make(use_lora=True, max_steps=2, save_interval=1)
    trainer.validation = None
    trainer.train()
    later = (folder_of(trainer) / "step-000002").rename(folder_of(trainer) / "step-000007")
    with pytest.raises(ConfigError, match="step-000007 holds iteration 2: it was renamed"):
        make(use_lora=True, resume_from_checkpoint=str(later))
    assert make(use_lora=True, resume_from_checkpoint="auto").step == 1
    assert "step-000007 is damaged and left out" in capfd.readouterr().err


def test_a_link_takes_no_place_and_what_it_points_to_stays(make, tmp_path):
    trainer = make(use_lora=True, max_steps=3, save_interval=1, keep_checkpoints=1)
    trainer.validation = None
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / manifest.NAME).write_text('{"files": {}}')
    folder_of(trainer).mkdir(exist_ok=True)
    linked = ("step-000000", "step-000009", "step-000008.tmp", "step-000002", "step-000003.tmp")
    for name in linked:
        (folder_of(trainer) / name).symlink_to(tmp_path / "precious")
    trainer.train()
    assert names(folder_of(trainer)) == ["step-000003"]
    assert make(use_lora=True, resume_from_checkpoint="auto", max_steps=3).step == 3
    assert [path.name for path in (tmp_path / "precious").iterdir()] == [manifest.NAME]


def test_other_base_weights_are_refused(make, flags, tmp_path):
    make(use_lora=True, max_steps=1).train()
    other = Path(shutil.copytree(flags["pretrained_model_root"], tmp_path / "other"))
    (file,) = (other / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"step-000001 was trained from other weights than those in .*other"
    ):
        make(use_lora=True, resume_from_checkpoint="auto", pretrained_model_root=str(other))


def test_other_prompts_and_ranks_are_named(make, flags, tmp_path, capfd):
    trainer = make(use_lora=True, max_steps=1)
    trainer.fingerprints["ranks"] = 8
    trainer.train()
    (tmp_path / "more.txt").write_text(
        Path(flags["train_prompts"]).read_text() + "a blue circle moving up\n"
    )
    capfd.readouterr()
    make(
        use_lora=True,
        resume_from_checkpoint="auto",
        train_prompts=str(tmp_path / "more.txt"),
        max_steps=1,
    )
    said = capfd.readouterr().err
    assert "ranks 8 -> 1" in said and "training prompts '3, " in said and " -> '4, " in said


def test_a_missing_optimizer_tensor_is_noticed(make):
    trainer = make(use_lora=True, max_steps=1)
    trainer.train()
    (path,) = checkpoint_folders.list_checkpoints(folder_of(trainer))
    file = path / "trainer" / "rank-00000.safetensors"
    tensors, starts = load_file(file), json.loads(open_safetensors(file).metadata["starts"])
    gone = next(name for name in tensors if "exp_avg_sq" in name)
    del tensors[gone], starts[gone]
    save_file(tensors, file, metadata={"starts": json.dumps(starts)})
    sealed_again(path)
    with pytest.raises(
        ConfigError, match=r"has \d+ tensors of the optimizer, but was saved with \d+"
    ):
        make(use_lora=True, resume_from_checkpoint="auto")


def test_work_tells_its_progress_its_result_and_its_error():
    gate, step = threading.Event(), threading.Event()

    def call(advance):
        step.wait(10)
        advance()
        gate.wait(10)
        return 7

    work = Work(call)
    assert work.moved() and not work.moved() and not work.done()
    step.set()
    while not work.moved():
        time.sleep(0.01)
    assert not work.done()
    gate.set()
    while not work.done():
        time.sleep(0.01)
    assert work.moved() and work.moved() and work.result() == 7
    failed = Work(lambda _: 1 / 0)
    while not failed.done():
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_metrics_that_cannot_be_read_cost_the_card_its_curve_and_never_the_checkpoint(make, capsys):
    trainer = make(use_lora=True, max_steps=2, save_interval=1)
    trainer.validation = None
    metrics = trainer.run.path / "metrics.jsonl"
    metrics.write_text("damaged\n" + metrics.read_text())
    trainer.train()
    assert names(folder_of(trainer)) == ["step-000001", "step-000002"]
    assert "the model card of iteration 2 has no curve" in capsys.readouterr().err
    assert (folder_of(trainer) / "step-000002" / "README.md").is_file()


@pytest.mark.parametrize(
    "function, error, expected",
    [
        ("model_card", ZeroDivisionError("no card today"), "is not written: no card today"),
        ("read_run", OSError("the disk is gone"), "has no curve: the disk is gone"),
    ],
)
def test_a_card_that_fails_costs_no_checkpoint(
    make, capsys, monkeypatch, function, error, expected
):
    def failing(*arguments, **facts):
        raise error

    trainer = make(use_lora=True, max_steps=1, save_interval=1)
    trainer.validation = None
    monkeypatch.setattr(export, function, failing)
    trainer.train()
    assert names(folder_of(trainer)) == ["step-000001"]
    assert f"the model card of iteration 1 {expected}" in capsys.readouterr().err


def iterations_on(card):
    """The iterations in the table of held-out rewards."""
    return [int(step) for step in re.findall(r"^\| (\d+) \|", card.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("async_save", [True, False])
def test_the_card_of_a_checkpoint_shows_the_validation_of_its_iteration(make, async_save):
    trainer = make(
        use_lora=True,
        max_steps=3,
        save_interval=1,
        validation_interval=2,
        validate_at_step0=True,
        async_save=async_save,
    )
    trainer.train()
    shown = {path.name: iterations_on(path / "README.md") for path in folder_of(trainer).iterdir()}
    assert shown == {"step-000001": [0], "step-000002": [0, 2], "step-000003": [0, 2, 3]}
    for path in folder_of(trainer).iterdir():
        manifest.check(path)
    assert make(use_lora=True, max_steps=3, resume_from_checkpoint="auto").step == 3


def test_a_card_that_cannot_be_replaced_leaves_the_checkpoint_as_it_was(make, monkeypatch, capfd):
    def no_links(*names):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    trainer = make(use_lora=True, max_steps=1, validate_at_step0=True)
    trainer.train()
    assert [path.name for path in folder_of(trainer).iterdir()] == ["step-000001"]
    manifest.check(folder_of(trainer) / "step-000001")
    assert iterations_on(folder_of(trainer) / "step-000001" / "README.md") == [0]
    assert "model card of step-000001 lacks its validation" in capfd.readouterr().err
