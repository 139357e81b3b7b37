"""What shapes the samples and rewards of a run: recorded when it starts, compared when it resumes.

Some of it is the yardstick by which results are compared. Where that changes, a series of results ends and another one
begins (runs/history.py): a higher reward after it may come from the yardstick alone.
"""

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sage_grpo
from sage_grpo import rewards
from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.files.fingerprints import files_fingerprint, text_fingerprint
from sage_grpo.files.manifest import file_sha256
from sage_grpo.models.backbone import Backbone
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.plugins import in_file
from sage_grpo.rewards.base import Composite

# packages that samples or rewards depend on, and that a machine may lack
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "peft",
    "numpy",
    "pillow",
    "triton",
    "rapidocr-onnxruntime",
    "onnxruntime",
)

# The yardstick: settings and fingerprints that determine what a clip is and how it is scored, by series. The reward
# and what decodes clips belong to both.
SETTINGS = {
    "train": (
        "algorithm",
        "dtype",
        "eta",
        "fps",
        "guidance_interval",
        "guidance_scale",
        "guidance_scale_2",
        "height",
        "negative_prompt",
        "num_frames",
        "num_sampling_steps",
        "outside_window",
        "reward_fps",
        "same_init_noise",
        "sde_type",
        "sde_window",
        "seed",
        "tail_solver",
        "tail_steps",
        "timestep_shift",
        "width",
    ),
    "validation": (
        "dtype",
        "fps",
        "guidance_scale",
        "guidance_scale_2",
        "negative_prompt",
        "reward_fps",
        "validate_video_length",
        "validation_fixed_size",
        "validation_global_seed",
        "validation_num_inference_steps",
        "validation_solver",
        "validation_timestep_shift",
    ),
}
FINGERPRINTS = {
    "train": ("training prompts", "sampler code"),
    "validation": ("validation prompts", "held-out reward"),
}
SHARED = (
    "VAE",
    "encoders",
    "transformer config",
    "transformer_2 config",
    "boundary",
    "reward",
    "reward code of this program",
    *(f"versions {name}" for name in ("torch", "diffusers", "transformers")),
)


def fingerprints(
    config: Config,
    backbone: Backbone,
    training_requests: Sequence[Request],
    validation_requests: Sequence[Request],
    reward: Composite | None,
    holdout_reward: Composite | None,
    ranks: Ranks,
) -> dict[str, Any]:
    """What a run is started with; a resumed run is told what changed. All ranks must call."""

    def read() -> dict[str, Any]:
        """The rewards are on the first rank, and one rank reads the files for all."""
        if not ranks.is_first:
            return {}
        return {
            **backbone.fingerprints(),
            "reward": reward_fingerprint(reward),
            "held-out reward": reward_fingerprint(holdout_reward),
            "versions": versions(),
            "device": device_name(ranks.device),
        }

    names = [*(config.reward_model or ()), config.holdout_reward, config.sde_type]
    plugin_hashes = {file: file_sha256(Path(file))[:8] for file in map(_file, names) if file}
    training_prompts = [(str(request), request.seed) for request in training_requests]
    # the index of a validation prompt is part of its noise
    validation_prompts = [
        (str(request), request.seed, request.index) for request in validation_requests
    ]
    return ranks.on_all(read)[0] | {
        "training prompts": _list_fingerprint(training_prompts),
        "validation prompts": _list_fingerprint(validation_prompts),
        "ranks": ranks.world_size,
        "plug-ins": plugin_hashes,
        "sampler code": plugin_hashes.get(_file(config.sde_type), "built in"),
        "reward code of this program": reward_code(),
    }


def _file(name: str | None) -> str:
    """The file of a plug-in `FILE.py:NAME`; empty for other names."""
    return name.rpartition(":")[0] if name and in_file(name) else ""


def _list_fingerprint(entries: Sequence[Any]) -> str:
    """The number of entries, and a hash of them in order."""
    return f"{len(entries)}, {text_fingerprint(repr(entries))[:8]}"


def reward_fingerprint(reward: Composite | None) -> dict[str, str]:
    """Scores with their weights, and what each reward consists of; empty if there is no reward."""
    if reward is None:
        return {}
    names = ", ".join(reward.rewards)
    return {"names": names, "weights": str(reward), **reward.fingerprint()}


@cache
def versions() -> dict[str, str]:
    """Versions of Python, this program and the installed libraries."""
    result = {"python": platform.python_version(), "sage_grpo": program_version()}
    for name in LIBRARIES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    result["torch"] = torch.__version__  # with its build, such as +cu130
    return result


def program_version() -> str:
    """With a hash of the code: an edited or updated working copy has the version of the original."""
    code = Path(sage_grpo.__file__).parent
    files = [path for path in sorted(code.rglob("*")) if path.suffix in (".py", ".txt")]
    return f"{sage_grpo.__version__}, {files_fingerprint(files)[:8]}"


@cache
def reward_code() -> str:
    """A hash of the package with the rewards: it decides what each of them sees of a clip."""
    return files_fingerprint(sorted(Path(rewards.__file__).parent.rglob("*.py")))[:8]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def flat(fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    """Fingerprints with those of parts under names of their own, such as `versions torch`."""
    result = {}
    for name, value in fingerprints.items():
        if isinstance(value, dict):
            result.update({f"{name} {part}": entry for part, entry in value.items()})
        else:
            result[name] = value
    return result


def yardstick(config: Config, fingerprints: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By series, `train` and `validation`: everything that two results must share to be comparable."""
    result = {}
    # a name stands for a fingerprint with all its parts, or for one part, such as `versions torch`
    named = {**fingerprints, **flat(fingerprints)}
    for series, settings in SETTINGS.items():
        parts = (*SHARED, *FINGERPRINTS[series])
        values = {name: getattr(config, name) for name in settings}
        values.update(flat({name: named[name] for name in parts if name in named}))
        result[series] = values
    return result
