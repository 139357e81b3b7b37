"""The result does not depend on the layout: sharded and sequence-parallel gradients equal a single process's."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from sage_grpo.config.parse import from_values
from sage_grpo.config.windows import parse_window
from sage_grpo.parallel.fsdp import local_shard, rows
from sage_grpo.train import build
from sage_grpo.train.batches import draw_prompts
from sage_grpo.train.windows import build_windows
from tests.dist import run_ranks
from tests.smallest_run import slow
from tests.train.iterations import in_fp64, next_gradients

CLIPS = 4
LAYOUTS = {  # processes, and how they are laid out
    "one": (1, {}),
    "dp2": (2, {}),
    "sp2": (2, {"sp_size": 2}),
    "fsdp1": (1, {"enable_fsdp": True}),
    "fsdp2": (2, {"enable_fsdp": True}),
    "sp4": (4, {"sp_size": 4}),
    "fsdp2 x sp2": (4, {"enable_fsdp": True, "sp_size": 2}),
    "hsdp 2 x 2": (4, {"enable_fsdp": True, "dp_replicate": 2}),
}


@torch.no_grad()
def nudge(parameters):
    """Set the policy apart from its anchor, each rank its rows of the same numbers."""
    for number, parameter in enumerate(parameters):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        local_shard(parameter).add_(0.01 * drawn[slice(*rows(parameter))])


def gradients(ranks, values, error=None):
    """Gradients of one iteration, before the optimizer, of a policy that is not its anchor."""
    in_fp64()
    trainer = build.load_trainer(
        from_values(values | {"batch_size": CLIPS // ranks.dp_size}), ranks
    )
    nudge(trainer.optimization.parameters.values())
    trainer.anchor.age += 1
    trainer.ratio_checked = (
        trainer.config.samples_with_old_policy
    )  # rollouts are those of the old policy, which was not nudged
    if error == "mean":
        for unit in (
            m for m in trainer.backbone.transformer.modules() if isinstance(m, FSDPModule)
        ):
            unit.set_gradient_divide_factor(2.0)

    found, record, advantages = next_gradients(trainer)
    return found, record["kl/anchor"], advantages


@pytest.fixture(scope="module")
def expected():
    return {}


# two groups, whose windows begin at different steps, so that ranks run the model differently often
WINDOWS = {"num_generations": 2, "num_sampling_steps": 5, "sde_window": "random:2", "seed": 2}
WINDOWS |= {"same_init_noise": True, "tail_steps": 1, "gather_for_rollout": True}


def values_of(flags, use_lora, layout):
    return (
        flags
        | layout
        | {
            "use_lora": use_lora,
            "num_generations": 4,
            # ranks that share a clip have all of them: in twos, they take half of the time
            "micro_batch_size": 2 if "sp_size" in layout else 1,
            "num_frames": 5,
            "height": 16,
            "width": 16,
            "num_sampling_steps": 2,
            "guidance_scale": 2.0 if use_lora else 1.0,
            "enable_gradient_checkpointing": True,
            "keep_attention": "sp_size" in layout,
            "checkpointing_fraction": 0.5 if "dp_replicate" in layout else 1.0,
            "gather_for_rollout": "dp_replicate" in layout,
            "reference_mode_offload": "enable_fsdp" in layout,
            "update_ref_model_step": 5,
            "kl_schedule": "fixed",
            "clip_range": 0.5,
            "overwrite": True,
        }
    )


def run(flags, use_lora, name, error=None, **changes):
    world, layout = LAYOUTS[name]
    words = {"sp_size": layout.get("sp_size", 1), "sharded": layout.get("enable_fsdp", False)}
    words |= {"replicas": layout.get("dp_replicate", 1)}
    return run_ranks(world, gradients, values_of(flags, use_lora, layout) | changes, error, **words)


def of_one_process(expected, flags, use_lora, **changes):
    key = (flags["pretrained_model_root"], use_lora, *changes.items())
    if key not in expected:
        (expected[key],) = run(flags, use_lora, "one", **changes)
    return expected[key]


def deviation(found, wanted):
    """Largest difference of any gradient, relative to the largest number of that gradient."""
    return max(
        ((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)).item()
        for name, value in wanted.items()
    )


@pytest.mark.parametrize(
    "model, use_lora, name",
    [
        ("tiny", True, "dp2"),
        ("tiny", True, "sp2"),
        ("tiny", True, "fsdp2"),
        ("trivial", False, "dp2"),
        ("trivial", False, "fsdp2"),
        slow("tiny", True, "fsdp1"),
        slow("tiny", True, "sp4"),
        slow("tiny", True, "fsdp2 x sp2"),
        slow("tiny", True, "hsdp 2 x 2"),
        slow("tiny", False, "sp2"),
        slow("tiny", False, "fsdp2 x sp2"),
    ],
)
def test_gradients_of_an_iteration_are_those_of_one_process(flags, expected, use_lora, name):
    """Slow: four ranks, and all weights of HunyuanVideo-1.5's classes."""
    wanted, kl, advantages = of_one_process(expected, flags, use_lora)
    assert (
        kl > 0
        and advantages.abs().max() > 0.5
        and max(g.abs().max() for g in wanted.values()) > 1e-6
    )
    for found, found_kl, found_advantages in run(flags, use_lora, name):
        torch.testing.assert_close(found_advantages, advantages, rtol=1e-8, atol=1e-8)
        assert found_kl == pytest.approx(kl, rel=1e-8)
        assert found.keys() == wanted.keys() and deviation(found, wanted) < 1e-8


@pytest.mark.parametrize(
    "model, name",
    [
        ("trivial", "dp2"),
        ("trivial", "fsdp2"),
        slow("tiny", "sp2"),
        slow("tiny", "fsdp2 x sp2"),
        slow("trivial", "hsdp 2 x 2"),
    ],
)
def test_windows_of_prompts_are_those_of_one_process(flags, expected, name):
    """Under FSDP ranks wait for each other in every forward, unless the weights stay gathered in the rollout.

    Slow: sequence parallelism, and four ranks.
    """
    windows = build_windows(
        parse_window(WINDOWS["sde_window"]), torch.ones(5, dtype=torch.bool), WINDOWS["seed"]
    )
    first, second = draw_prompts(0, 2, 3, WINDOWS["seed"])
    assert windows.start(0, first, 0) != windows.start(0, second, 0)
    wanted, kl, advantages = of_one_process(expected, flags, True, **WINDOWS)
    assert kl > 0 and advantages.abs().max() > 0.5
    for found, found_kl, found_advantages in run(flags, True, name, **WINDOWS):
        torch.testing.assert_close(found_advantages, advantages, rtol=1e-8, atol=1e-8)
        assert found_kl == pytest.approx(kl, rel=1e-8) and deviation(found, wanted) < 1e-8


RIVALS = {
    "awm": {"algorithm": "awm"},
    "nft": {"algorithm": "nft", "nft_decay_growth": 0.2, "nft_beta": 0.5},
}


@pytest.mark.parametrize("model, name", [("trivial", "dp2"), slow("tiny", "fsdp2 x sp2")])
@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_are_those_of_one_process(flags, expected, rival, name):
    """Slow: four ranks that share weights and sequences."""
    wanted, kl, advantages = of_one_process(expected, flags, True, **RIVALS[rival])
    assert (
        kl > 0
        and advantages.abs().max() > 0.5
        and deviation(wanted, of_one_process(expected, flags, True)[0]) > 0.1
    )
    for found, found_kl, _ in run(flags, True, name, **RIVALS[rival]):
        assert found_kl == pytest.approx(kl, rel=1e-8) and deviation(found, wanted) < 1e-8


def test_a_wrong_reduction_is_seen(flags, expected):
    wanted, *_ = of_one_process(expected, flags, True)
    for found, *_ in run(flags, True, "fsdp2", error="mean"):
        assert deviation(found, wanted) > 0.1
