"""What a checkpoint holds, which are kept, and what it can be used for."""

import json
from pathlib import Path

import pytest
import torch

from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.files import manifest
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.train import checkpoint_folders
from sage_grpo.train.build import build_trainer, load_trainer
from tests.dist import run_ranks
from tests.hostile import hashes_of
from tests.smallest_run import on_both
from tests.train.iterations import save


def train(ranks, values):
    build_trainer(from_values(values | {"batch_size": 4 // ranks.dp_size}), ranks).train()


def assemble_on(ranks, values):
    load_trainer(from_values(values), ranks)


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file() and path.name != manifest.NAME]


def test_counts_of_skipped_updates_come_back(make):
    trainer = make(max_steps=1)
    trainer.state.step = 1
    trainer.optimization.skipped = 7
    trainer.optimization.skipped_in_a_row = 2
    save(trainer, trainer.run.path / "checkpoints")
    resumed = make(max_steps=1, resume_from_checkpoint="auto")
    assert (resumed.step, resumed.optimization.skipped, resumed.optimization.skipped_in_a_row) == (
        1,
        7,
        2,
    )


def test_resuming_keeps_the_run_even_when_told_to_overwrite(make):
    trainer = make(max_steps=1)
    save(trainer, trainer.run.path / "checkpoints")
    make(max_steps=1, resume_from_checkpoint="auto", overwrite=True)
    assert [
        path.name for path in checkpoint_folders.list_checkpoints(trainer.run.path / "checkpoints")
    ] == ["step-000000"]
    assert (trainer.run.path / "metrics.jsonl").read_text().count('"kind": "run"') == 2


@on_both
@pytest.mark.parametrize("use_lora", [True, False])
def test_a_checkpoint_samples_as_the_policy_it_holds(make, use_lora):
    trainer = make(use_lora=use_lora, max_steps=2)
    trainer.train()
    (folder,) = checkpoint_folders.list_checkpoints(trainer.run.path / "checkpoints")
    fresh = open_backbone(trainer.config.pretrained_model_root)
    x, cond = torch.randn(1, *trainer.shape), trainer.guidance.negative
    with torch.no_grad():
        untrained = fresh.velocity(x, 0.5, cond, Guidance())
        fresh.load_weights(folder)
        velocity = fresh.velocity(x, 0.5, cond, Guidance())
        assert not torch.allclose(velocity, untrained)
        torch.testing.assert_close(
            velocity, trainer.backbone.velocity(x, 0.5, cond, Guidance()), rtol=1e-4, atol=1e-5
        )


def test_only_the_newest_are_kept_and_drafts_do_not_count(make):
    trainer = make(max_steps=4, save_interval=1, keep_checkpoints=2)
    (trainer.run.path / "checkpoints" / "step-000009.tmp").mkdir(parents=True)
    trainer.train()
    names = [
        path.name for path in checkpoint_folders.list_checkpoints(trainer.run.path / "checkpoints")
    ]
    assert names == ["step-000003", "step-000004"]
    assert checkpoint_folders.choose(trainer.run.path, "auto", trainer.ranks).name == "step-000004"
    make(max_steps=4, resume_from_checkpoint="auto")
    assert not (trainer.run.path / "checkpoints" / "step-000009.tmp").exists()


def test_a_folder_that_is_no_checkpoint_takes_no_place(make):
    trainer = make(max_steps=4, save_interval=1, keep_checkpoints=2)
    (trainer.run.path / "checkpoints" / "step-000009").mkdir(parents=True)
    trainer.train()
    names = [
        path.name for path in checkpoint_folders.list_checkpoints(trainer.run.path / "checkpoints")
    ]
    assert names == ["step-000003", "step-000004", "step-000009"]


def test_a_checkpoint_of_another_configuration_is_refused(make):
    make(use_lora=True, max_steps=1).train()
    for changes, words in (
        ({"ema_decay": 0.9}, "the average in .* do not fit .* resume with ema_decay as"),
        ({"algorithm": "nft"}, "the old_policy in .* do not fit .* resume with algorithm, "),
        ({"kl_weight": 0.0}, "the anchor in .* do not fit .* resume with kl_weight and "),
    ):
        with pytest.raises(ConfigError, match=words):
            make(resume_from_checkpoint="auto", use_lora=True, **changes)


@pytest.mark.parametrize("before", [True, False])
def test_adapters_and_all_weights_do_not_resume_each_other(make, before):
    make(use_lora=before, max_steps=1).train()
    with pytest.raises(ConfigError) as refusal:
        make(use_lora=not before, resume_from_checkpoint="auto")
    assert f"resume with --use_lora {before}" in str(refusal.value)
    assert "export_checkpoint.py" in str(refusal.value)


def test_an_end_before_the_checkpoint_is_refused_and_one_at_it_is_said(make, capfd):
    make(max_steps=2).train()
    with pytest.raises(ConfigError, match=r"max_steps is 1, but .* has completed 2 iterations"):
        make(max_steps=1, resume_from_checkpoint="auto")
    capfd.readouterr()
    assert make(max_steps=2, resume_from_checkpoint="auto").step == 2
    assert "all 2 iterations are done" in capfd.readouterr().err
    make(max_steps=3, resume_from_checkpoint="auto")
    assert "are done" not in capfd.readouterr().err


def test_a_path_that_is_no_checkpoint_is_not_called_damaged(make, tmp_path):
    trainer = make(max_steps=1)
    trainer.train()
    run = trainer.run.path
    for path, words in (
        (tmp_path / "typo", "does not exist"),
        (run, r"name one of them, such as .*step-000001"),
        (run / "checkpoints", r"name one of them, such as .*step-000001"),
        (run / "validation", "is not a checkpoint"),
        (run / "config.yaml", "is not a checkpoint"),
    ):
        with pytest.raises(
            ConfigError, match=f"resume_from_checkpoint {path} .*{words}"
        ) as refusal:
            make(resume_from_checkpoint=str(path))
        assert "amaged" not in str(refusal.value)


def test_an_adapter_of_another_rank_is_not_stretched(make):
    make(use_lora=True, lora_r=1, max_steps=1).train()
    with pytest.raises(ConfigError, match=r"do not fit .*lora_A.* has shape \(1, "):
        make(use_lora=True, lora_r=4, resume_from_checkpoint="auto")


def test_a_missing_file_of_a_rank_is_noticed(flags):
    values = flags | {"use_lora": True, "max_steps": 1, "num_generations": 4, "enable_fsdp": True}
    run_ranks(2, train, values, sharded=True)
    (folder,) = checkpoint_folders.list_checkpoints(Path(flags["output_dir"]) / "checkpoints")
    (folder / "trainer" / "rank-00001.safetensors").unlink()
    with pytest.raises(AssertionError, match=r"rank-00001.safetensors is missing"):
        run_ranks(1, assemble_on, values | {"resume_from_checkpoint": str(folder)}, sharded=True)
    hashes = hashes_of(folder, files(folder))
    manifest.commit(
        folder.rename(folder.with_suffix(".tmp")), folder, hashes
    )  # as if it had been written so
    with pytest.raises(AssertionError, match="a rank's file is missing"):
        run_ranks(1, assemble_on, values | {"resume_from_checkpoint": str(folder)}, sharded=True)


def test_nothing_to_resume_is_a_fresh_start_only_for_auto(make, tmp_path, capfd):
    assert make(resume_from_checkpoint="auto").step == 0
    assert "holds no checkpoint: starting from the beginning" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"is not a checkpoint, which has a manifest.json"):
        make(resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize("use_lora", [True, False])
def test_a_run_can_start_from_the_weights_of_another(make, tmp_path, use_lora):
    first = make(use_lora=use_lora, max_steps=1)
    first.train()
    (folder,) = checkpoint_folders.list_checkpoints(first.run.path / "checkpoints")
    again = make(
        use_lora=use_lora, init_from_checkpoint=str(folder), output_dir=str(tmp_path / "other")
    )
    assert again.step == again.optimization.updates == 0 and not again.optimization.tensors()
    for name, parameter in first.optimization.parameters.items():
        assert torch.equal(parameter, again.optimization.parameters[name])
        assert torch.equal(parameter, again.anchor.values[name])
    with pytest.raises(
        ConfigError, match=f"init_from_checkpoint .* has no .* use_lora {not use_lora}"
    ):
        make(
            use_lora=not use_lora,
            init_from_checkpoint=str(folder),
            output_dir=str(tmp_path / "third"),
        )


def test_what_changed_since_the_checkpoint_is_said(make, capfd):
    make(max_steps=1).train()
    capfd.readouterr()
    make(max_steps=2, learning_rate=5e-4, resume_from_checkpoint="auto")
    said = capfd.readouterr().err
    assert "note: changed since the checkpoint: learning_rate 0.001 -> 0.0005\n" in said
    assert "note: changed since the checkpoint: max_steps 1 -> 2\n" in said


def test_a_line_that_was_cut_off_does_not_spoil_the_metrics(make):
    trainer = make(max_steps=1, save_interval=1)
    trainer.train()
    file = trainer.run.path / "metrics.jsonl"
    with file.open("a") as handle:
        handle.write('{"kind": "train", "ste')
    make(max_steps=2, resume_from_checkpoint="auto").train()
    assert [json.loads(line)["kind"] for line in file.read_text().splitlines()].count("train") == 2
