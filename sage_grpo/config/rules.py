"""What several flags must agree on. A rule returns the problem in one sentence, or None."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.models.versions import refused_for_one_transformer
from sage_grpo.plugins import in_file
from sage_grpo.rewards.registry import ALIASES, REWARDS

TRACKERS = ("tensorboard", "wandb", "none")


def check(config: Config, world_size: int = 1, experts: int = 1) -> None:
    """Reject flags that contradict each other, for a model with so many transformers."""
    ranks = world_size // config.sp_size
    try:
        _build_derived(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    rules = RULES + (RULES_OF_EXPERTS if experts > 1 else RULES_OF_ONE)
    problems = (rule(config, ranks) for rule in rules)
    if problem := next(filter(None, problems), None):
        raise ConfigError(problem)


def _build_derived(config: Config) -> tuple[Any, ...]:
    """The settings that a configuration builds from its flags; a wrong value raises ValueError."""
    return config.window_form, config.guided_levels, config.trust_region, config.kl_controller()


def warnings(c: Config, world_size: int) -> Iterator[str]:
    """Settings that run but do less than they seem to."""
    if c.gpus not in (None, world_size):
        clips = c.batch_size * world_size // c.sp_size
        intended_clips = c.batch_size * c.gpus // c.sp_size
        yield (
            f"it is meant for {c.gpus} rank(s) and there are {world_size}: "
            f"an iteration has {clips} clips instead of {intended_clips}"
        )

    cheaper_steps = ""
    if c.tail_steps:
        cheaper_steps = f"tail_steps is {c.tail_steps}"
    elif c.outside_window != "exact":
        cheaper_steps = f"outside_window is {c.outside_window}"
    if cheaper_steps and c.algorithm == "grpo" and c.window_form.is_whole:
        yield f"{cheaper_steps}, but sde_window {c.sde_window} leaves no steps to make cheaper"


# Rules: `c` is the configuration, `ranks` the number of data-parallel ranks.


def _rewards_are_known(c: Config, ranks: int) -> str | None:
    named = [("reward_model", name) for name in c.reward_model or ()]
    if c.holdout_reward is not None:
        named.append(("holdout_reward", c.holdout_reward))
    for flag, name in named:
        if name not in REWARDS and name not in ALIASES and not in_file(name):
            return f"{flag} names {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME"
    return None


def _remote_rewards_have_an_address(c: Config, ranks: int) -> str | None:
    names = (*(c.reward_model or ()), c.holdout_reward)
    remote = [name for name in names if name in ("remote", "judge")]
    if remote and c.remote_reward_url is None:
        return f"the reward {remote[0]} needs the address of its server: give remote_reward_url"
    if c.remote_reward_url is not None and not remote:
        return (
            f"remote_reward_url is {c.remote_reward_url}, "
            "but no reward_model or holdout_reward is remote or judge"
        )
    return None


def _hacking_is_measurable(c: Config, ranks: int) -> str | None:
    if c.stop_on_hacking and c.holdout_reward is None:
        return "stop_on_hacking is True, but there is nothing to compare with: give holdout_reward"
    return None


def _groups_fit_the_ranks(c: Config, ranks: int) -> str | None:
    """All ranks together hold whole groups; each holds whole groups or an even part of one."""
    group = c.num_generations

    def fits(batch: int) -> bool:
        return batch * ranks % group == 0 and (batch % group == 0 or group % batch == 0)

    if fits(c.batch_size):
        return None
    sizes = filter(fits, range(1, 4 * max(c.batch_size, group)))
    by_distance = sorted(sizes, key=lambda size: abs(size - c.batch_size))
    nearest = " or ".join(map(str, sorted(by_distance[:2])))
    return (
        f"batch_size is {c.batch_size} on {ranks} data-parallel rank(s) with num_generations {group}: "
        "whole groups must fit, and a rank holds whole groups or an even part of one; "
        f"the nearest batch_size is {nearest}"
    )


def _trained_clips_fit_the_ranks(c: Config, ranks: int) -> str | None:
    """Each rank trains equally many clips: of each of its groups, or its part of one."""
    if c.group_trained > c.num_generations:
        return (
            f"train_clips is {c.train_clips}; a group has num_generations ({c.num_generations}) clips, "
            "so it can be at most that"
        )
    ranks_per_group = max(1, c.num_generations // c.batch_size)
    if c.group_trained % ranks_per_group:
        return (
            f"train_clips is {c.train_clips}; with batch_size {c.batch_size} a group of "
            f"{c.num_generations} is spread over {ranks_per_group} ranks, which train equally many clips: "
            f"use a multiple of {ranks_per_group}"
        )
    return None


def _shards_run_equal_windows(c: Config, ranks: int) -> str | None:
    window = c.window_form
    moves = window.per_group and not window.is_whole
    if moves and c.enable_fsdp and not c.gather_for_rollout:
        return (
            f"sde_window is {c.sde_window}; ranks of a sharded model would run different numbers of "
            f"forwards: set gather_for_rollout True, or use {window.kind}_iteration"
        )
    return None


def _shards_run_equal_forwards(c: Config, ranks: int) -> str | None:
    if c.prompts_per_forward > 1 and c.enable_fsdp:
        return (
            f"prompts_per_forward is {c.prompts_per_forward}; ranks of a sharded model would run "
            "different forwards: set prompts_per_forward 1"
        )
    return None


def _groups_explore(c: Config, ranks: int) -> str | None:
    if c.algorithm != "grpo" and c.same_init_noise:
        return (
            f"algorithm is {c.algorithm}, whose clips differ only by their initial noise: "
            "set same_init_noise False"
        )
    return None


def _guidance_is_trained_as_sampled(c: Config, ranks: int) -> str | None:
    if c.algorithm == "grpo" and c.guided_levels != (0.0, 1.0):
        return (
            f"guidance_interval is {c.guidance_interval}; grpo trains the guided velocity at every step: "
            "use algorithm awm or nft, or guidance_interval 0:1"
        )
    return None


def _graphs_are_possible(c: Config, ranks: int) -> str | None:
    needed = {
        "guidance_scale": 1,
        "sp_size": 1,
        "outside_window": "exact",
        "enable_fsdp": False,
        "compile": False,
    }
    if c.cuda_graphs and any(getattr(c, name) != value for name, value in needed.items()):
        wanted = ", ".join(f"{name} {value}" for name, value in needed.items())
        return f"cuda_graphs needs {wanted}"
    return None


def _micro_batches_divide_a_prompt(c: Config, ranks: int) -> str | None:
    clips = min(c.batch_size, c.num_generations)
    if c.micro_batch_size and clips % c.micro_batch_size:
        return f"micro_batch_size is {c.micro_batch_size}; it must divide the {clips} clips of a prompt"
    trained = min(c.rank_trained, c.group_trained)
    if trained % c.trained_micro_batch:
        return (
            f"micro_batch_size is {c.micro_batch_size}; it must divide the {trained} clips of a prompt "
            f"that train_clips ({c.train_clips}) leaves on a rank, or be larger"
        )
    return None


def _updates_or_accumulation(c: Config, ranks: int) -> str | None:
    if c.updates_per_rollout > 1 and c.gradient_accumulation_steps > 1:
        return (
            f"updates_per_rollout is {c.updates_per_rollout} and gradient_accumulation_steps "
            f"{c.gradient_accumulation_steps}; one of them must be 1"
        )
    return None


def _intervals_end_with_an_update(c: Config, ranks: int) -> str | None:
    accumulation = c.gradient_accumulation_steps
    for name in ("max_steps", "save_interval", "validation_interval"):
        value = getattr(c, name)
        if value % accumulation:
            return (
                f"{name} is {value}; "
                f"it must be a multiple of gradient_accumulation_steps ({accumulation})"
            )
    return None


def _adapters_need_lora(c: Config, ranks: int) -> str | None:
    if c.pretrained_lora_path and not c.use_lora:
        return "pretrained_lora_path needs use_lora True"
    return None


def _weights_have_one_source(c: Config, ranks: int) -> str | None:
    if c.pretrained_lora_path and c.init_from_checkpoint:
        return "pretrained_lora_path and init_from_checkpoint both name the weights to start from"
    return None


def _mixed_precision_is_sharded(c: Config, ranks: int) -> str | None:
    if c.dtype not in (None, c.master_weight_type) and not c.enable_fsdp:
        return (
            f"dtype {c.dtype} with master_weight_type {c.master_weight_type} needs enable_fsdp True, "
            "which works on one GPU too; else choose one of them for both"
        )
    return None


def _trackers_are_known(c: Config, ranks: int) -> str | None:
    unknown = sorted(set(c.report_to) - set(TRACKERS))
    if unknown:
        return f"report_to names {unknown[0]}; choose from {', '.join(TRACKERS)}"
    return None


def _trackers_are_installed(c: Config, ranks: int) -> str | None:
    for name in c.report_to:
        if name != "none" and find_spec(name) is None:
            return f"report_to names {name}, which is not installed: pip install {name}, or leave it out"
    return None


def _videos_can_be_written(c: Config, ranks: int) -> str | None:
    if c.validation_videos != 0 and find_spec("imageio_ffmpeg") is None:
        return (
            "validation writes videos, which needs ffmpeg: "
            "pip install imageio-ffmpeg, or set validation_videos 0"
        )
    return None


def _one_transformer_has_no_second(c: Config, ranks: int) -> str | None:
    for name, value in (("lora_experts", "both"), ("guidance_scale_2", None)):
        if getattr(c, name) != value:
            return refused_for_one_transformer(name, getattr(c, name))
    return None


def _experts_need_lora(c: Config, ranks: int) -> str | None:
    if c.lora_experts != "both" and not c.use_lora:
        return f"lora_experts is {c.lora_experts}, which chooses adapters: set use_lora True"
    return None


def _mixed_weights_are_sharded(c: Config, ranks: int) -> str | None:
    """Transformers that take turns are not sharded, and their adapters are fp32: an adapter casts what it reads."""
    return None if c.use_lora else _mixed_precision_is_sharded(c, ranks)


def _shards_run_equal_experts(c: Config, ranks: int) -> str | None:
    """Ranks of a sharded model gather the weights of a transformer together, so all must run the same one."""
    if not c.enable_fsdp:
        return None
    reason = "ranks of a sharded model would run different transformers at a time"
    window = c.window_form
    if window.per_group and not window.is_whole:
        return f"sde_window is {c.sde_window}; {reason}: use {window.kind}_iteration:{window.size}"
    if c.enable_timestep_permutation:
        return f"enable_timestep_permutation is True; {reason}: set it to False"
    if window.is_whole and c.timestep_fraction < 1 and c.lora_experts == "both":
        return (
            f"timestep_fraction is {c.timestep_fraction:g}: without enable_timestep_permutation it trains the noisiest "
            "steps alone, and the transformer for low noise may never learn; set it to 1, or use a window such as "
            "sde_window random_iteration:2"
        )
    return None


def _graphs_run_one_transformer(c: Config, ranks: int) -> str | None:
    if c.cuda_graphs:
        return "cuda_graphs is True, but the model chooses between transformers by noise level: set it to False"
    return None


# For models with one transformer, and for those with one for high and one for low noise levels.
RULES_OF_ONE = (_one_transformer_has_no_second, _mixed_precision_is_sharded)
RULES_OF_EXPERTS = (
    _experts_need_lora,
    _mixed_weights_are_sharded,
    _shards_run_equal_experts,
    _graphs_run_one_transformer,
)

# The first problem is the one reported.
RULES = (
    _rewards_are_known,
    _remote_rewards_have_an_address,
    _hacking_is_measurable,
    _groups_fit_the_ranks,
    _trained_clips_fit_the_ranks,
    _shards_run_equal_windows,
    _shards_run_equal_forwards,
    _groups_explore,
    _guidance_is_trained_as_sampled,
    _graphs_are_possible,
    _micro_batches_divide_a_prompt,
    _updates_or_accumulation,
    _intervals_end_with_an_update,
    _adapters_need_lora,
    _weights_have_one_source,
    _trackers_are_known,
    _trackers_are_installed,
    _videos_can_be_written,
)
