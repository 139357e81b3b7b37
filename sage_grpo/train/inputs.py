"""What a configuration names and a run reads before anything is sampled: prompts and rewards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_rewards
from sage_grpo.rewards.registry import DEFAULT as DEFAULT_REWARD
from sage_grpo.train.validation import validation_sampling
from sage_grpo.worlds.registry import world_of

BUNDLED_PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"


def train_requests(config: Config) -> list[Request]:
    """The prompts of training, each with its size."""
    requests = requests_from(config.train_prompts, Path(config.pretrained_model_root), "train")
    return [request.sized(config.height, config.width) for request in requests]


def validation_requests(config: Config) -> list[Request]:
    """The held-out prompts of a validation, each with its size."""
    sampling = validation_sampling(config)
    requests = requests_from(config.validation_prompts, Path(config.pretrained_model_root), "valid")
    requests = requests[: config.num_validation_prompts]
    return [request.sized(sampling.height, sampling.width) for request in requests]


def requests_from(files: Sequence[str] | None, folder: Path, kind: str) -> list[Request]:
    """Requests from `files`, else from the model folder; for real-world models without any, from the bundled file.

    kind: "train" or "valid".
    """
    if files is None:
        files = _default_files(folder, kind)
    requests = [request for file in files for request in read_requests(file)]
    if len(files) > 1:
        requests = [replace(request, index=index) for index, request in enumerate(requests)]
    return requests


def _default_files(folder: Path, kind: str) -> Sequence[str]:
    file = folder / f"prompts_{kind}.txt"
    if file.is_file():
        return [str(file)]
    if world_of(folder) is None:
        return [str(BUNDLED_PROMPTS / f"{kind}_long.csv")]
    if kind == "valid":
        return []
    raise ConfigError(
        f"the model folder has no {file.name}; name a prompt file with --train_prompts"
    )


def build_composite(
    config: Config, names: Sequence[str], weights: dict[str, Any] | None, device: torch.device
) -> Composite:
    """Combine the named rewards; weights that nobody gave fit themselves to the scores."""
    timeout = config.collective_timeout / 2
    rewards = build_rewards(names, reward_setup(config, device, timeout, config.start_timeout))
    default_weights = Config().reward_weights
    if weights == default_weights:  # VideoAlign's; the single score of another reward counts 1
        weights = {}
        for name, reward in rewards.items():
            known = {
                score: default_weights[score] for score in reward.names if score in default_weights
            }
            weights[name] = known or 1.0
    return Composite(rewards, weights, config.reward_batch_size, timeout)


def reward_setup(
    config: Config, device: torch.device, timeout: float, start_timeout: float
) -> Setup:
    """What a configuration says about its rewards; `timeout` and `start_timeout` as in `Setup`."""
    return Setup(
        path=reward_folder(config),
        device=device,
        sample_fps=config.reward_fps,
        url=config.remote_reward_url,
        timeout=timeout,
        start_timeout=start_timeout,
        judge_model=config.judge_model,
        judge_rubric=config.judge_rubric,
        judge_cache=config.judge_cache,
    )


def build_rewards_of(
    config: Config, requests: Sequence[Request], held_out: Sequence[Request], device: torch.device
) -> tuple[Composite, Composite | None]:
    """The training reward and the held-out reward, if any; an error if one cannot score the prompts that it is for."""
    reward = build_composite(config, reward_names(config), config.reward_weights, device)
    reward.check([*requests, *held_out])
    holdout_reward = None
    if config.holdout_reward:
        holdout_reward = build_composite(config, (config.holdout_reward,), None, device)
        holdout_reward.check(held_out)
    return reward, holdout_reward


def reward_names(config: Config) -> tuple[str, ...]:
    """The rewards that were asked for; else the learned one, or without it that of the model's world."""
    if config.reward_model:
        return config.reward_model
    world = None if reward_folder(config).is_dir() else world_of(config.pretrained_model_root)
    return (world.reward if world else DEFAULT_REWARD,)


def reward_folder(config: Config) -> Path:
    return Path(config.reward_path or Path(config.pretrained_model_root) / "VideoReward")
