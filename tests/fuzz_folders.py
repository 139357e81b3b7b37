"""The good folders that `tests/fuzz.py` damages: models in both layouts, rewards, an adapter, a checkpoint, a run."""

import shutil

import torch

from research.tiny.tiny import TinyConfig, build_tiny
from sage_grpo.config.parse import from_values
from sage_grpo.files.torch_files import convert
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from tests.models.hunyuan15.tencent_folder import write_tencent_folder
from tests.rewards.test_clip import write_clip
from tests.shared_fixtures import FIXTURES, SAMPLING, WORDS
from tests.tools.fake_run import make_run
from tests.train.iterations import save


def make_folders(good):
    """Write them into `good`; returns a trainer that fits the checkpoint, and a backbone for weights."""
    good.mkdir()
    pipe = build_tiny(0, WORDS, TinyConfig(rope=(4, 6, 6), layers=2, latent_channels=8))
    pipe.save_pretrained(good / "model")
    (good / "model" / "world.json").write_text('{"world": "shapes"}')
    SAMPLING.to_json(good / "model" / "sampling.json")
    write_tencent_folder(good / "model", good / "tencent")
    shutil.copytree(FIXTURES / "videoalign" / "VideoReward", good / "videoalign")
    for source in good.glob("videoalign/checkpoint-*/*.pth"):
        convert(source)
        source.unlink()
    write_clip(good / "clip")
    trainer = make_trainer(good)
    shutil.move(save(trainer, good / "saved"), good / "checkpoint")
    (good / "adapter").mkdir()
    shutil.copy(good / "checkpoint" / LORA_FILE, good / "adapter")
    make_run(good / "run", iterations=2, every=2, prompts=3)
    return trainer, Hunyuan15(good / "model")


def make_trainer(good):
    prompts = good / "prompts.txt"
    prompts.write_text("a red circle moving left\na green square moving right\n")
    flags = {
        "pretrained_model_root": str(good / "model"), "output_dir": str(good / "output"), "train_prompts": str(prompts),
        "validation_prompts": str(prompts), "reward_model": "shapes", "batch_size": 4, "num_generations": 2,
        "num_sampling_steps": 3, "num_frames": 5, "height": 16, "width": 16, "report_to": "none", "lora_r": 4,
        "lora_alpha": 8, "use_lora": True, "kl_weight": 0.1, "dtype": "fp32", "device": "cpu",
    }  # fmt: skip
    return build_trainer(from_values(flags), Ranks(0, 1, torch.device("cpu")))
