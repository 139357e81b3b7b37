"""Every recipe in configs/ is valid on the machine it names; the published ones are as published."""

from itertools import pairwise
from pathlib import Path

import pytest

from sage_grpo.config.fields import FIELDS, resolve
from sage_grpo.config.parse import parse
from sage_grpo.config.rules import check
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.models.registry import open_backbone
from sage_grpo.tools.plan.calibration import GPU_MODELS
from sage_grpo.tools.plan.memory import checkpoint_bytes, fits
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.tools.plan.times import clips_per_gpu_hour, times, validation_time
from sage_grpo.train.inputs import requests_from, train_requests, validation_requests

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = CONFIGS.parent / "assets" / "tiny"
RANKS = {"hunyuan15_8gpu": 8, "hunyuan15_8gpu_published": 8, "hunyuan15_64gpu": 64, "wan21_8gpu": 8}
RANKS |= {"hunyuan15_8gpu_i2v": 8, "hunyuan15_64gpu_720p": 64, "hunyuan15_8gpu_nft": 8}
RANKS |= {"wan22_5b_8gpu": 8, "wan22_a14b_8gpu_lora": 8}
FULL_SIZE = RANKS | {"hunyuan15_1gpu_lora": 1, "wan21_1gpu_24gb_lora": 1}
FULL_SIZE |= {"hunyuan15_1gpu_nft": 1, "wan21_1gpu_24gb_nft": 1, "wan22_5b_1gpu_24gb_lora": 1}
HALF_HOUR = 1800
START, DISK = 300, 1e9  # assumed: seconds to load and compile, bytes per second to the disk
PUBLISHED = {  # the published README and the paper's appendix; kl_target as in the published code
    "learning_rate": 1e-5, "num_generations": 4, "sde_type": "sage_grpo", "eta": 0.5, "num_sampling_steps": 20,
    "sde_window": "all", "use_grad_balancing": True, "enable_timestep_permutation": True, "updates_per_rollout": 1,
    "clip_range": 1e-4, "adv_clip_max": 5.0, "advantage_std": "group", "ratio_norm": False, "timestep_fraction": 1.0,
    "kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7, "kl_target": 1e-5, "kl_schedule": "adaptive",
    "kl_warmup_steps": 100, "kl_feedback": "paper", "use_moving_KL": True, "update_ref_model_step": 10,
    "use_dual_kl": True, "dual_kl_moving_weight": 1.0, "dual_kl_step_weight": 0.1, "step_kl_estimator": "logprob",
    "reward_weights": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
}  # fmt: skip
LAUNCHED = {
    "batch_size": 2, "max_steps": 10000, "enable_fsdp": True, "enable_gradient_checkpointing": True, "sp_size": 2,
    "reference_mode_offload": True, "validate_video_length": 81,
    "validation_timestep_shift": 5.0, "validation_num_inference_steps": 40, "reward_model": ("videoalign",),
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_run(path):
    config, backbone = parse(["--config", str(path)]), open_backbone(TINY)
    for device in ("cpu", "cuda"):
        check(resolve(config, backbone, device), RANKS.get(path.stem, 1))
    assert config.output_dir == f"outputs/{path.stem}"


@pytest.mark.parametrize(
    "name, values",
    [("tiny_published", PUBLISHED), ("hunyuan15_8gpu_published", PUBLISHED | LAUNCHED)],
)
def test_the_published_recipes_write_out_what_was_published(name, values):
    """Written out: a default of ours that changes must not change them."""
    path = CONFIGS / f"{name}.yaml"
    config, written = parse(["--config", str(path)]), yaml_mapping(path.read_text(), name)
    assert {key: getattr(config, key) for key in values} == values
    assert set(values) <= set(written) <= set(FIELDS)


def test_wan_fits_a_card_of_24_gb():
    """With the reward beside it; also at the size that the model is meant for, if attention is recomputed."""
    recipe = [
        "--config",
        str(CONFIGS / "wan21_1gpu_24gb_lora.yaml"),
        "--pretrained_model_root",
        "none",
    ]
    assert fits(plan_of(parse(recipe), 1), 24e9)
    large = [*recipe, "--num_frames", "81", "--height", "480", "--width", "832"]
    assert not fits(plan_of(parse(large), 1), 24e9)
    assert fits(plan_of(parse([*large, "--keep_attention", "False"]), 1), 24e9)


# The card that each recipe names, and as many validation clips as decide GRPO's gain within 20 updates on the embedded
# world (research/studies/first_hours.py)
CARDS = dict.fromkeys(FULL_SIZE, "h100")
CARDS |= {"wan21_1gpu_24gb_lora": "4090", "wan21_1gpu_24gb_nft": "4090"}
CARDS |= {"wan22_5b_1gpu_24gb_lora": "4090"}
ENOUGH_CLIPS = 64


@pytest.mark.parametrize("name", FULL_SIZE)
def test_validation_can_decide_at_a_price_and_at_intervals_that_a_person_waits_for(name):
    """On the recipe's own card: enough clips, at least every two hours, in at most an eighth of the time."""
    path = CONFIGS / f"{name}.yaml"
    config = parse(["--config", str(path), "--pretrained_model_root", "none"])
    plan = plan_of(config, FULL_SIZE[name], gpu_model=CARDS[name])
    assert fits(plan, GPU_MODELS[CARDS[name]].memory)

    requests = validation_requests(plan.config)
    assert len(requests) >= ENOUGH_CLIPS
    if name == "hunyuan15_8gpu_published":
        return  # it validates as published
    validation = validation_time(plan, len(requests))
    between = plan.config.validation_interval * sum(times(plan).values())
    assert between < 2 * 3600
    assert validation / (validation + between) < 1 / 8
    # whole updates lie between two validations
    assert plan.config.validation_interval % plan.config.gradient_accumulation_steps == 0


@pytest.mark.parametrize("name", FULL_SIZE)
def test_no_prompt_is_both_trained_on_and_validated_with(name):
    config = parse(["--config", str(CONFIGS / f"{name}.yaml"), "--pretrained_model_root", "none"])
    plan = plan_of(config, FULL_SIZE[name])
    trained = {(r.text, r.image and r.image.path) for r in train_requests(plan.config)}
    validated = {(r.text, r.image and r.image.path) for r in validation_requests(plan.config)}
    assert not trained & validated
    images = {image for _, image in trained} - {None}
    assert not images & {image for _, image in validated}


@pytest.mark.parametrize(
    "name, gpu_bytes",
    [("hunyuan15_1gpu_nft", 80e9), ("hunyuan15_8gpu_nft", 80e9), ("wan21_1gpu_24gb_nft", 24e9)],
)
def test_nft_fits_its_cards_and_samples_more_with_fewer_trained_clips(name, gpu_bytes):
    recipe = ["--config", str(CONFIGS / f"{name}.yaml"), "--pretrained_model_root", "none"]
    every, two = (
        plan_of(parse([*recipe, *flags]), FULL_SIZE[name]) for flags in ([], ["--train_clips", "2"])
    )
    assert fits(every, gpu_bytes)
    # least with Wan's small clips, a third of whose time is decoding
    assert clips_per_gpu_hour(two) > 1.2 * clips_per_gpu_hour(every)


@pytest.mark.parametrize(
    "version, shift, beside", [("720p_t2v", 9.0, 150), ("720p_i2v", 7.0, 150 + 729)]
)
@pytest.mark.parametrize("sp_size", [4, 8])
def test_720p_fits_a_card_of_80_gb(version, shift, beside, sp_size):
    recipe = [
        "--config",
        str(CONFIGS / "hunyuan15_64gpu_720p.yaml"),
        "--pretrained_model_root",
        "none",
    ]
    plan = plan_of(
        parse([*recipe, "--pretrained_transformer_version", version, "--sp_size", str(sp_size)]), 64
    )
    assert (
        fits(plan, 80e9)
        and plan.config.timestep_shift == plan.config.validation_timestep_shift == shift
    )
    assert plan.tokens == 21 * 45 * 80 + beside


def test_image_to_video_fits_a_card_of_80_gb_and_has_images():
    recipe = [
        "--config",
        str(CONFIGS / "hunyuan15_8gpu_i2v.yaml"),
        "--pretrained_model_root",
        "none",
    ]
    plan = plan_of(parse(recipe), 8)
    assert fits(plan, 80e9) and plan.tokens == 21 * 22 * 39 + 150 + 729
    open_backbone("none", version="480p_i2v", complete=False).check_requests(
        validation_requests(plan.config)
    )


@pytest.mark.parametrize("name", FULL_SIZE)
def test_half_an_hour_shows_clips_and_is_never_lost(name):
    """By the planner, without overlap: first clips, first checkpoint, and the time between two later ones."""
    plan = plan_of(
        parse(["--config", str(CONFIGS / f"{name}.yaml"), "--pretrained_model_root", "none"]),
        FULL_SIZE[name],
    )
    c, iteration = plan.config, sum(times(plan, overlap=False).values())
    prompts = requests_from(c.validation_prompts, Path("none"), "valid")[: c.num_validation_prompts]
    clock = validation_time(plan, len(prompts))
    assert c.validate_at_step0 and prompts and START + clock < HALF_HOUR
    saved = [0.0]
    for step in range(1, 101):
        clock += iteration
        if step % c.save_interval == 0 or clock - saved[-1] > 60 * c.save_minutes:
            saved.append(clock)
    assert START + saved[1] + checkpoint_bytes(c, plan.trained) / DISK < HALF_HOUR
    assert len(saved) > 2 and all(
        later - earlier < HALF_HOUR for earlier, later in pairwise(saved[1:])
    )
    assert not c.use_lora or 5 <= c.save_interval <= 10
