"""The smallest run that trains, and the model of 219 parameters on which most tests of training run it.

Checkpoints, resuming, guards, schedules and logs know nothing of a model, so their tests use the trivial one
(`tests/trivial_backbone.py`): an iteration takes milliseconds and a checkpoint kilobytes.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from sage_grpo.models.registry import BACKBONES
from sage_grpo.runs import card
from sage_grpo.tools.report import page as report
from sage_grpo.train import reward_checks, saving
from tests.trivial_backbone import TinyDenoiser

DEMO = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"
PIPELINE, TRIVIAL = "TrivialPipeline", "tests.trivial_backbone:Trivial"
PROMPTS = ("a red circle moving left", "a green square moving right", "a red square moving right")

# what takes longer than the smallest run itself: drawings, the pauses of a save, and a dozen calls of the reward
QUICK = (
    (reward_checks, "NUM_RESCORED", 2),
    (card, "curve", lambda steps, values: b"no drawing"),
    (report, "print_summary", lambda folder: None),
    (saving, "PAUSE", 0.002),
)


def prepare_process():
    """Make this process, which does nothing else, know the trivial model, be quick and use one thread."""
    torch.set_num_threads(1)
    BACKBONES[PIPELINE] = TRIVIAL
    for owner, name, value in QUICK:
        setattr(owner, name, value)


def slow(*values):
    """A case of a parametrized test that is left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


# for tests that take `flags` or `make`: with the classes of HunyuanVideo-1.5 alone, or in `make test-all` with them too
on_tiny = pytest.mark.parametrize("model", ["tiny"])
on_both = pytest.mark.parametrize("model", ["trivial", slow("tiny")])


def write_trivial_model(folder):
    """A model folder of the trivial backbone with random weights."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = TinyDenoiser().state_dict()
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def smallest_run(model, folder, **changes):
    """Flags of a run of `model` in `folder`: 4 clips of 2 prompts, 3 denoising steps, 2 iterations."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    return {
        "pretrained_model_root": str(model),
        "output_dir": str(folder / "run"),
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
        "timestep_shift": 5.0,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "validate_video_length": 5,
        "validation_fixed_size": "16x16",
        "validation_num_inference_steps": 2,
        "validation_interval": 1000,
        "validation_videos": 0,  # ffmpeg takes longer than the iterations
        "rollout_videos": 0,
        "save_interval": 0,
        "report_to": "none",
        "lora_r": 4,
        "lora_alpha": 8,
        "kl_weight": 0.1,
        "enable_gradient_checkpointing": False,
        "dtype": "fp32",
        **changes,
    }


def write_smaller_demo(path, **changes):
    """The recipe of the demo with batches of 2 clips of 32 x 32."""
    small = {
        "batch_size": 2,
        "num_generations": 2,
        "num_sampling_steps": 2,
        "height": 32,
        "width": 32,
        "num_validation_prompts": 2,
        "validation_fixed_size": "32x32",
        "validation_num_inference_steps": 2,
    }
    recipe = yaml.safe_load(DEMO.read_text())
    path.write_text(yaml.safe_dump(recipe | small | changes))


def command_line(flags):
    """The words of a command line that gives these flags."""
    words = []
    for name, value in flags.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}", *map(str, values)]
    return words
