"""A stopped and resumed run gives the same numbers as an uninterrupted one, to the last bit."""

import hashlib
import re
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sage_grpo.config.parse import from_values
from sage_grpo.parallel.fsdp import full_tensor, local_shard, shard_like
from sage_grpo.train.build import build_trainer
from tests.dist import run_ranks
from tests.smallest_run import on_both, slow
from tests.train.iterations import next_gradients
from tests.train.test_trainer import STRATEGIES

EXTRAS = {  # what else a checkpoint must bring back, one with each strategy
    "none": {"warmup_steps": 6},
    "fixed": {"ema_decay": 0.9},
    "stepwise": {"updates_per_rollout": 2},
    "moving": {"update_ref_model_step": 3},
    "dual_moving": {"update_ref_model_step": 2, "gradient_accumulation_steps": 2},
    "dual_fixed": {"optimizer": "muon", "kl_warmup_steps": 2, "sde_window": "slide:1:2"},
}


def run(make, **changes):
    trainer = make(num_sampling_steps=2, kl_target=1e-9, **changes)
    trainer.validation = None
    trainer.train()
    return trainer


def state(trainer):
    """Everything that a checkpoint has to bring back."""
    tensors = {
        f"{part}.{n}": v
        for part, values in trainer.state.tensors().items()
        for n, v in values.items()
    }
    numbers = trainer.state.numbers()
    return {name: value.detach().clone() for name, value in tensors.items()}, numbers


@pytest.mark.parametrize("use_lora", [True, slow(False)], ids=["lora", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_and_four_iterations_are_eight(make, strategy, use_lora):
    changes = (
        {"use_lora": use_lora, "max_steps": 8, "save_interval": 4}
        | STRATEGIES[strategy]
        | EXTRAS[strategy]
    )
    straight = run(make, **changes)
    shutil.rmtree(straight.run.path / "checkpoints" / "step-000008")
    again = run(make, resume_from_checkpoint="auto", **changes)
    (tensors, numbers), (expected, expected_numbers) = state(again), state(straight)
    assert numbers == expected_numbers and numbers["step"] == 8 and numbers["updates"] > 0
    assert same(tensors, expected)
    assert (straight.run.path / "metrics.jsonl").read_text().count('"kind": "run", "step": 4') == 1


def test_accumulated_rollouts_are_made_again(make):
    """A stop between two optimizer steps loses the rollouts since the last one, and no more."""
    changes = {"gradient_accumulation_steps": 2, "max_steps": 4}
    straight = run(make, **changes, output_dir=str(make().run.path.with_name("straight")))
    stopped = make(num_sampling_steps=2, kl_target=1e-9, overwrite=True, **changes)
    finish = stopped.finish_iteration

    def stop_in_third():
        finish()
        if stopped.step == 3:
            stopped.saves.begin()
            raise KeyboardInterrupt

    stopped.finish_iteration, stopped.validation = stop_in_third, None
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = run(make, resume_from_checkpoint="auto", **changes)
    assert (again.run.path / "metrics.jsonl").read_text().count('"kind": "run", "step": 2') == 1
    assert same(state(again)[0], state(straight)[0])


# What changes in an iteration, as paths of attributes below the trainer.
SAVED = (
    r"state\.step",
    r"state\.optimization\.(parameters|average)\..*",
    r"state\.optimization\.updates",
    r"state\.optimization\.optimizers.*state.*",
    r"state\.anchor\.values\..*",
    r"state\.anchor\.age",
    r"state\.controller\.(step|kl_lambda|recent).*",
)
DERIVED = (
    r"backbone\.transformer\..*",  # the trained parameters, and the anchor's adapter
    r"(guidance|validation)\..*backbone.*", r"state\.anchor\.parameters\..*",  # the same objects again
    r"ratio_checked", r"reward_checked", r"limits_measured",  # once per start
    r"saves\.(step|good_step|failed|begun|current).*",  # what lies in the folder
    r"state\.optimization\.optimizers\..*lr",  # follows from `updates`
    r"guards\.(step|phase|last_beat|events).*",  # of this process
    r"half_gradient\..*",  # of the last optimizer step, for its metrics
    r"run\..*", r"reward\..*", r"backbone\.embeddings\..*",  # files, and caches
)  # fmt: skip


def digest(value):
    if isinstance(value, Tensor):
        return hashlib.sha256(
            local_shard(value.detach()).reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return repr(value)


def attributes(value, path="", seen=None):
    """Every plain value below an object of ours, by path."""
    seen = set() if seen is None else seen
    if isinstance(value, (Tensor, int, float, str, bool, type(None))):
        return {path: digest(value)}
    if id(value) in seen:
        return {}
    seen.add(id(value))
    if isinstance(value, nn.Module):
        parts = dict(value.named_parameters())
    elif isinstance(value, torch.optim.Optimizer):
        names = {
            p: n
            for group in value.param_groups
            for p, n in zip(group["params"], group["param_names"], strict=True)
        }
        parts = {"state": {names[p]: s for p, s in value.state.items()}}
        parts["lr"] = [group["lr"] for group in value.param_groups]
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, (list, tuple, deque)):
        parts = dict(enumerate(value))
    elif type(value).__module__.startswith("sage_grpo"):
        parts = vars(value)
    else:
        return {}
    found = {}
    for key, part in parts.items():
        found |= attributes(part, f"{path}.{key}".lstrip("."), seen)
    return found


@on_both
@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
def test_whatever_changes_in_an_iteration_is_saved_or_derived(make, use_lora):
    changes = {"use_lora": use_lora, "ema_decay": 0.9, "optimizer": "muon", "kl_warmup_steps": 2}
    trainer = make(max_steps=2, **changes)
    before = attributes(trainer)
    trainer.train()
    after = attributes(trainer)
    changed = [path for path in after if after[path] != before.get(path)]
    unknown = [
        path
        for path in changed
        if not any(re.fullmatch(pattern, path) for pattern in SAVED + DERIVED)
    ]
    assert not unknown
    saved = [path for path in changed if any(re.fullmatch(pattern, path) for pattern in SAVED)]
    parts = {path.split(".")[1] for path in saved}
    assert parts == {"step", "optimization", "anchor", "controller"}
    resumed = attributes(make(max_steps=2, resume_from_checkpoint="auto", **changes))
    assert [path for path in saved if resumed[path] != after[path]] == []


def whole_state(trainer):
    """All that a checkpoint keeps, put together from the ranks."""
    found = {}
    for part, tensors in trainer.state.tensors().items():
        for name, value in tensors.items():
            parameter = trainer.optimization.parameters[
                name.rpartition(".")[0] if part == "optimizer" else name
            ]
            sharded = value if value.ndim == 0 else shard_like(parameter, local_shard(value))
            found[f"{part}.{name}"] = full_tensor(sharded).detach().clone()
    return found


def on_ranks(values, ranks):
    return build_trainer(from_values(values | {"batch_size": 4 // ranks.dp_size}), ranks)


def train_and_save(ranks, values):
    trainer = on_ranks(values, ranks)
    trainer.validation = None
    trainer.train()
    return whole_state(trainer), next_gradients(trainer)[0]


def resume(ranks, values):
    trainer = on_ranks(values | {"resume_from_checkpoint": "auto"}, ranks)
    return whole_state(trainer), next_gradients(trainer)[0]


LAYOUTS = {
    "one": (1, {}, {}),
    "dp2": (2, {}, {}),
    "fsdp2": (2, {"enable_fsdp": True}, {"sharded": True}),
    "sp2": (2, {"sp_size": 2}, {"sp_size": 2}),
    "hsdp": (4, {"enable_fsdp": True, "dp_replicate": 2}, {"sharded": True, "replicas": 2}),
}


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], v) for name, v in expected.items()
    )


@pytest.mark.parametrize(
    "model, saved, loaded, use_lora",
    [
        ("trivial", "fsdp2", "one", True),
        ("trivial", "one", "fsdp2", False),
        slow("tiny", "hsdp", "sp2", False),
        slow("tiny", "dp2", "sp2", True),
    ],
)
def test_another_number_of_ranks_goes_on_from_the_same_state(flags, saved, loaded, use_lora):
    """Slow: four ranks, and sequence parallelism, which the trivial model does not have."""
    values = flags | {"use_lora": use_lora, "max_steps": 1, "ema_decay": 0.5}
    values |= {
        # across replicas Muon takes seconds to plan its products
        "optimizer": "muon" if loaded == "fsdp2" else "adamw",
        "num_generations": 4,
        "num_sampling_steps": 2,
    }
    world, layout, words = LAYOUTS[saved]
    (expected, gradients), *others = run_ranks(world, train_and_save, values | layout, **words)
    assert {name.partition(".")[0] for name in expected} == {
        "weights",
        "optimizer",
        "anchor",
        "average",
    }
    world, layout, words = LAYOUTS[loaded]
    for state, next_ones in (*others, *run_ranks(world, resume, values | layout, **words)):
        assert same(state, expected)
        for name, gradient in gradients.items():
            scale = gradient.abs().max().clamp(min=1e-6)
            assert (
                next_ones[name] - gradient
            ).abs().max() / scale < 2e-3  # of fp32 sums in another order


def straight(ranks, values):
    trainer = on_ranks(values, ranks)
    trainer.validation = None
    trainer.train()
    return whole_state(trainer)


def resumed(ranks, values):
    trainer = on_ranks(values | {"resume_from_checkpoint": "auto"}, ranks)
    assert trainer.step == 2
    trainer.validation = None
    trainer.train()
    return whole_state(trainer)


@pytest.mark.parametrize(
    "model, use_lora, layout",
    [
        ("trivial", True, "dp2"),
        ("trivial", False, "fsdp2"),
        slow("tiny", True, "fsdp2"),
        slow("tiny", False, "sp2"),
    ],
)
def test_ranks_go_on_as_if_never_stopped(flags, tmp_path, use_lora, layout):
    """Slow: the classes of HunyuanVideo-1.5, and sequence parallelism."""
    world, changes, words = LAYOUTS[layout]
    values = (
        flags
        | changes
        | {"use_lora": use_lora, "max_steps": 4, "save_interval": 2, "num_generations": 4}
    )
    values |= {"update_ref_model_step": 3, "num_sampling_steps": 2}
    expected = run_ranks(world, straight, values, **words)
    shutil.rmtree(Path(flags["output_dir"]) / "checkpoints" / "step-000004")
    for found, wanted in zip(run_ranks(world, resumed, values, **words), expected, strict=True):
        assert same(found, wanted)
