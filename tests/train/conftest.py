"""Trainers on an untrained miniature model: real classes, two iterations in a fraction of a second.

On a machine with a GPU, `TEST_DEVICE=cuda pytest tests/train` runs them on it.
"""

import os

import pytest
import torch

from sage_grpo.config.parse import from_values
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
PROMPTS = ("a red circle moving left", "a green square moving right", "a red square moving right")


@pytest.fixture
def flags(tiny_folder, tmp_path):
    """Flags of the smallest run: 4 clips of 2 prompts, 3 denoising steps."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    return {
        "pretrained_model_root": str(tiny_folder),
        "output_dir": str(tmp_path / "run"),
        "train_prompts": str(prompts),
        "validation_prompts": str(prompts),
        "reward_model": "shapes",
        "batch_size": 4,
        "num_generations": 2,
        "num_sampling_steps": 3,
        "num_frames": 5,
        "height": 16,  # the VAE is half of the time at 32
        "width": 16,
        "guidance_scale": 1.0,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "validate_video_length": 5,
        "validation_fixed_size": "16x16",
        "validation_num_inference_steps": 2,
        "validation_interval": 1000,
        "save_interval": 0,
        "report_to": "none",
        "lora_r": 4,
        "lora_alpha": 8,
        "kl_weight": 0.1,
        "enable_gradient_checkpointing": False,
        "dtype": "fp32",
    }


@pytest.fixture
def make(flags):
    """make(flag=value, ...) -> a Trainer on one rank."""

    def build(**changes):
        return build_trainer(from_values(flags | changes), Ranks(0, 1, DEVICE))

    return build
