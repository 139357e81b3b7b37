"""The path KL to the base model: a closed form, a computation from scratch in fp64, and a run that records it."""

import math
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import yaml

from research.studies.one_run import train_and_measure
from research.studies.path_kl import measure, measured_config, path_kls
from sage_grpo import rng
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.registry import open_backbone
from sage_grpo.tools.report import page as report
from sage_grpo.train.build import open_model
from sage_grpo.train.checkpoint_folders import list_checkpoints

PROMPTS = [
    Request("a red circle moving left", 0),
    Request("the green square", 1),
    Request("a red letter", 2),
]
HELD_OUT = ("a red circle moving left", "a green square moving right")
STEPS, ETA, SEED = 4, 0.6, 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tiny_folder):
    """With guidance, and with flags of training that the measure must not follow."""
    flags = {
        "pretrained_model_root": str(tiny_folder), "num_sampling_steps": STEPS, "num_frames": 5, "height": 16,
        "width": 16, "guidance_scale": 2.0, "eta": ETA, "sde_window": "all_but_last", "validation_global_seed": SEED,
        "dtype": "fp32", "timestep_fraction": 0.5, "prompts_per_forward": 2,
    }  # fmt: skip
    return open_model(from_values(flags), CPU)[1]


@pytest.fixture
def pair(config):
    """Two backbones with the base model's weights: a policy to be changed, and the base."""
    return tuple(open_model(config, CPU)[0] for _ in range(2))


def changed(policy, name="", by=0.02):
    """Add noise to the policy's weights, or to those whose name begins with `name`."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in policy.transformer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(by * noise.to(parameter) * key.startswith(name))


def table(shift):
    """(sigma, a, b, variance) of each exploring step, from the formulas of Euler-Maruyama and of sage (Eq. 5 and 7)."""
    u = [1 - i / STEPS for i in range(STEPS + 1)]
    sigmas = [shift * v / (1 + (shift - 1) * v) for v in u]
    rows = []
    for sigma, after in list(pairwise(sigmas))[:-1]:
        top = min(sigma, 0.997)
        variance = ETA**2 * (after - sigma + math.log((1 - after) / (1 - top)))
        rows.append(
            (
                sigma,
                1 - variance / (2 * sigma),
                after - sigma - variance * (1 - sigma) / (2 * sigma),
                variance,
            )
        )
    return rows


def test_the_base_model_has_exactly_zero(config, pair):
    assert path_kls(*pair, config, PROMPTS).tolist() == [0.0, 0.0, 0.0]


def test_a_constant_change_of_velocity_has_its_closed_form(config, pair):
    """A bias c of the last layer moves every velocity by c: the KL is the sum of b^2 mean(c^2) / (2 variance)."""
    policy, base = pair
    before = policy.transformer.proj_out.bias.detach().clone()
    changed(policy, "proj_out.bias", 0.1)
    square = (policy.transformer.proj_out.bias - before).detach().double().square().mean().item()
    expected = sum(
        b**2 * square / (2 * variance) for _, _, b, variance in table(config.timestep_shift)
    )
    assert path_kls(policy, base, config, PROMPTS).tolist() == pytest.approx(
        [expected] * 3, rel=1e-4
    )


def from_scratch(config, policy, base, prompts):
    """|mean - mean_base|^2 / (2 variance) along the policy's own paths, in fp64 and prompt by prompt."""
    kls, shape = [], policy.latent_shape(config.num_frames, config.height, config.width)
    for position, prompt in enumerate(prompts):
        negative, cond = policy.encode([Request(config.negative_prompt), prompt])
        guidance, key, total = Guidance(config.guidance_scale, negative), {"prompt": position}, 0.0
        x = rng.normal(shape, SEED, "rollout_init", **key).double()[None]
        for i, (sigma, a, b, variance) in enumerate(table(config.timestep_shift)):
            level = torch.tensor([sigma], dtype=torch.float64)
            ours, theirs = (
                a * x + b * m.velocity(x, level, cond, guidance) for m in (policy, base)
            )
            total += ((ours - theirs) ** 2).mean().item() / (2 * variance)
            x = (
                ours
                + math.sqrt(variance)
                * rng.normal(shape, SEED, "rollout_sde", index=i, **key).double()
            )
        kls.append(total)
    return kls


@torch.no_grad()
def test_a_changed_model_has_the_kl_of_a_computation_from_scratch(config, pair, tiny_folder):
    policy, base = pair
    exact = [open_backbone(tiny_folder, dtype=torch.float64) for _ in range(2)]
    changed(policy, by=0.05)
    exact[0].transformer.load_state_dict(
        policy.transformer.state_dict()
    )  # the very numbers of the fp32 policy
    expected = from_scratch(config, *exact, PROMPTS)
    assert len({f"{value:.2g}" for value in expected}) == 3 and min(expected) > 1e-4
    assert path_kls(policy, base, config, PROMPTS).tolist() == pytest.approx(expected, rel=1e-3)
    backwards = from_scratch(
        config, *exact[::-1], PROMPTS
    )  # along the paths of the base model: another number
    assert any(abs(one / other - 1) > 0.01 for one, other in zip(expected, backwards, strict=True))


def test_seed_and_training_flags_of_a_run_change_nothing(config, pair):
    policy, base = pair
    changed(policy)
    expected = path_kls(policy, base, config, PROMPTS).tolist()
    other = {
        "seed": 5,
        "num_generations": 2,
        "same_init_noise": True,
        "kl_weight": 0.0,
        "updates_per_rollout": 2,
    }
    assert (
        path_kls(policy, base, replace(config, **other, timestep_fraction=1.0), PROMPTS).tolist()
        == expected
    )
    again = path_kls(policy, base, replace(config, validation_global_seed=8), PROMPTS).tolist()
    assert again != expected and again == pytest.approx(expected, rel=0.5)


def test_a_path_that_is_not_finite_has_no_kl(config, pair):
    policy, base = pair
    with torch.no_grad():
        policy.transformer.proj_out.bias.fill_(math.inf)
    assert all(map(math.isnan, path_kls(policy, base, config, PROMPTS).tolist()))


@pytest.mark.parametrize("flags", [{"algorithm": "nft"}, {"sde_window": "random:2"}])
def test_paths_without_a_density_are_refused(config, flags):
    with pytest.raises(
        ConfigError, match="the path KL needs a sampler that explores from the first step on"
    ):
        measured_config(replace(config, **flags))


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    """A run of two iterations that ended with its measurement: its configuration file and its folder."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in HELD_OUT))
    flags = {
        "pretrained_model_root": str(tiny_folder), "train_prompts": [str(folder / "prompts.txt")],
        "validation_prompts": [str(folder / "prompts.txt")], "batch_size": 4, "num_generations": 2, "max_steps": 2,
        "num_sampling_steps": 2, "num_frames": 5, "height": 16, "width": 16, "guidance_scale": 1.0, "ema_decay": 0.5,
        "validation_num_inference_steps": 2, "validate_video_length": 5, "validation_fixed_size": "16x16",
        "save_interval": 0, "reward_model": ["shapes"], "kl_weight": 0.3, "kl_schedule": "fixed",
        "enable_gradient_checkpointing": False, "report_to": ["none"], "validation_videos": 0, "device": "cpu",
        "learning_rate": 0.01, "output_dir": str(folder / "run"), "resume_from_checkpoint": "auto",
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(flags))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "print_summary", lambda folder: None)  # draws figures
        assert train_and_measure(["--config", str(folder / "run.yaml")], ["path_kl"]) == 0
    return folder, from_values(flags)


@pytest.mark.slow
def test_a_run_records_the_kl_of_the_weights_that_it_exports(trained):
    """Slow: a real run; the KL itself is tested against formulas."""
    folder, config = trained
    told = yaml.safe_load((folder / "run" / "path_kl.json").read_text())
    (policy, resolved), (base, _) = (open_model(config, CPU) for _ in range(2))
    policy.load_weights(list_checkpoints(folder / "run" / "checkpoints")[-1])
    kls = path_kls(policy, base, resolved, [Request(text, i) for i, text in enumerate(HELD_OUT)])
    assert told == {
        "mean": kls.mean().item(),
        "stderr": kls.std().item() / math.sqrt(2),
        "clips": 2,
    }
    assert told["mean"] > 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_that_ended_before_its_measurement_is_measured_by_the_next_call(trained):
    """Slow: a real run; the KL itself is tested against formulas."""
    folder, _ = trained
    file = folder / "run" / "path_kl.json"
    before = file.read_text()
    file.unlink()
    assert (
        train_and_measure(["--config", str(folder / "run.yaml")], ["path_kl"]) == 0
        and file.read_text() == before
    )


@pytest.mark.slow
def test_only_the_last_checkpoint_is_measured(trained, tmp_path):
    """Slow: a real run; the KL itself is tested against formulas."""
    folder, config = trained
    shutil.copytree(folder / "run" / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint of its last iteration, 3"):
        measure(replace(config, output_dir=str(tmp_path), max_steps=3))
    assert (
        train_and_measure(["--config", str(folder / "run.yaml"), "--eta", "-1"], ["path_kl"]) == 2
    )  # nothing is measured
