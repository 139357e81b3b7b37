"""Flags that contradict each other are refused, and those that do less than they seem to are pointed out."""

import pytest

from sage_grpo.config import rules
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.config.rules import check, warnings

GRAPHS = {"batch_size": 4, "cuda_graphs": True, "guidance_scale": 1.0}


def refused(values, ranks, words):
    with pytest.raises(ConfigError, match=words):
        check(from_values(values), ranks)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"micro_batch_size": 3}, "micro_batch_size is 3; .* divide the 4 clips"),
        ({"batch_size": 8, "micro_batch_size": 8}, "micro_batch_size is 8; .* divide the 4 clips"),
        (
            {"batch_size": 8, "prompts_per_forward": 2, "enable_fsdp": True},
            "prompts_per_forward is 2; .* set prompts_per_forward 1",
        ),
        (
            {"algorithm": "awm", "same_init_noise": True},
            "algorithm is awm, .* set same_init_noise False",
        ),
        (
            {"sde_window": "random:2", "enable_fsdp": True},
            "sde_window is random:2; .* random_iteration",
        ),
        (
            {"updates_per_rollout": 2, "gradient_accumulation_steps": 2},
            "updates_per_rollout is 2 and gradient_accumulation_steps 2; one of them must be 1",
        ),
        ({"gradient_accumulation_steps": 3}, "max_steps is 10000; it must be a multiple"),
        ({"gradient_accumulation_steps": 2, "save_interval": 3}, "save_interval is 3"),
        ({"gradient_accumulation_steps": 2, "validation_interval": 3}, "validation_interval is 3"),
        ({"kl_coef": 1.0}, "kl_coef is 1.0"),
        ({"use_dual_kl": False, "dual_kl_moving_weight": 0}, "both KL terms weigh 0"),
        ({"pretrained_lora_path": "x"}, "pretrained_lora_path needs use_lora"),
        (
            {"pretrained_lora_path": "x", "init_from_checkpoint": "y", "use_lora": True},
            "pretrained_lora_path and init_from_checkpoint",
        ),
        ({"guidance_interval": "0.2:0.9"}, "guidance_interval is 0.2:0.9; .* algorithm awm or nft"),
        ({"guidance_interval": "0.9:0.2", "algorithm": "nft"}, "write LOW:HIGH"),
        ({"guidance_interval": "half", "algorithm": "nft"}, "write LOW:HIGH"),
        ({"report_to": "excel"}, "report_to names excel"),
        ({"report_to": "no.such"}, "report_to names no.such; choose from"),
        ({"report_to": "wandb"}, "wandb, which is not installed: pip install wandb"),
        ({"dtype": "bf16"}, "bf16 with master_weight_type fp32 needs enable_fsdp"),
        (
            {"dtype": "bf16", "use_lora": True},
            "bf16 with master_weight_type fp32 needs enable_fsdp",
        ),
        ({"lora_experts": "low"}, "the model has one transformer for all noise levels"),
        ({"guidance_scale_2": 3.0}, "the model has one transformer for all noise levels"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(values, words):
    refused({"batch_size": 4} | values, 1, words)


@pytest.mark.parametrize(
    "values, ranks, words",
    [
        ({"batch_size": 2, "num_generations": 4}, 1, "nearest batch_size is 4 or 8"),
        ({"batch_size": 3, "num_generations": 4}, 2, "nearest batch_size is 2 or 4"),
        ({"batch_size": 2, "sp_size": 2}, 2, "batch_size is 2 on 1 data-parallel rank"),
        ({"batch_size": 4, "train_clips": 5}, 1, "train_clips is 5; .* at most that"),
        ({"batch_size": 2, "train_clips": 3}, 2, "train_clips is 3; .* a multiple of 2"),
        (
            {"batch_size": 8, "num_generations": 8, "train_clips": 6, "micro_batch_size": 4},
            1,
            "micro_batch_size is 4; it must divide the 6 clips",
        ),
    ],
)
def test_batches_with_parts_of_groups_are_refused(values, ranks, words):
    refused(values, ranks, words)


@pytest.mark.parametrize(
    "batch, group, ranks", [(4, 4, 1), (2, 4, 2), (8, 4, 1), (2, 4, 32), (4, 2, 3), (1, 4, 4)]
)
def test_batches_of_whole_groups_pass(batch, group, ranks):
    check(from_values({"batch_size": batch, "num_generations": group}), ranks)


@pytest.mark.parametrize(
    "values, ranks, words",
    [
        ({"guidance_scale": None}, 1, "guidance_scale 1"),
        ({"guidance_scale": 2.0}, 1, "guidance_scale 1"),
        ({"sp_size": 2}, 2, "sp_size 1"),
        ({"compile": True}, 1, "compile False"),
        ({"enable_fsdp": True}, 1, "enable_fsdp False"),
        ({"outside_window": "fp8", "sde_window": "random:2"}, 1, "outside_window exact"),
    ],
)
def test_what_cuda_graphs_need(values, ranks, words):
    check(from_values(GRAPHS))
    refused(GRAPHS | values, ranks, f"cuda_graphs needs .*{words}")


def test_videos_without_ffmpeg_are_refused_before_a_run_makes_any(monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install imageio-ffmpeg, or set validation_videos 0"):
        check(from_values({"batch_size": 4, "report_to": "none"}))
    check(from_values({"batch_size": 4, "report_to": "none", "validation_videos": 0}))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"reward_model": "remote"}, "the reward remote needs .* remote_reward_url"),
        ({"holdout_reward": "remote"}, "the reward remote needs .* remote_reward_url"),
        (
            {"remote_reward_url": "http://there:8900"},
            "no reward_model or holdout_reward is remote or judge",
        ),
        ({"stop_on_hacking": True}, "stop_on_hacking is True, .* give holdout_reward"),
        ({"reward_model": ["shapes", "beauty"]}, "reward_model names 'beauty'; choose one of"),
        ({"holdout_reward": "beauty"}, "holdout_reward names 'beauty'; choose one of"),
    ],
)
def test_rewards_that_lack_something_are_refused(values, words):
    refused({"batch_size": 4, "enable_fsdp": True} | values, 1, words)


def test_complete_rewards_pass():
    values = {
        "batch_size": 4,
        "enable_fsdp": True,
        "reward_model": "remote",
        "remote_reward_url": "http://there:8900",
        "holdout_reward": "pickscore",
        "stop_on_hacking": True,
    }
    check(from_values(values))


def warned(values, world_size=1):
    return list(warnings(from_values(values), world_size))


def test_savings_outside_a_window_that_has_no_outside_are_pointed_out():
    assert warned({}) == []
    assert warned({"tail_steps": 3}) == [
        "tail_steps is 3, but sde_window all leaves no steps to make cheaper"
    ]
    assert warned({"tail_steps": 3, "sde_window": "random:2"}) == []
    # all steps of awm are the tail
    assert warned({"tail_steps": 3, "algorithm": "awm"}) == []
    (text,) = warned({"outside_window": "fp8", "sde_window": "all_but_last"})
    assert text.startswith("outside_window is fp8, but sde_window all_but_last leaves no steps")


def test_another_number_of_ranks_is_pointed_out():
    recipe = {"gpus": 8, "sp_size": 2, "batch_size": 4}
    assert warned(recipe, 8) == []
    assert warned(recipe, 2) == [
        "it is meant for 8 rank(s) and there are 2: an iteration has 4 clips instead of 16"
    ]
    assert not list(warnings(Config(), 5))
