"""Reference numbers of short runs, in numbers.json: a change either keeps them or explicitly updates them.

    make golden     rewrites numbers.json and bits.json; the commit message says why the numbers changed

The runs train the embedded model in fp64, one of them a tiny Wan 2.1. On another processor or version of torch they
agree up to rounding: latents and log-probabilities are fp32, clips are uint8. On a platform listed in bits.json, they
agree to the last bit.
"""

import hashlib
import json
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from research.benchmarks.random_wan import TINY_SAMPLING, build_tiny_wan
from sage_grpo.config.parse import from_values
from sage_grpo.train.build import load_trainer
from tests.dist import run_ranks
from tests.smallest_run import slow
from tests.train.iterations import in_fp64

ROOT = Path(__file__).parents[2]
FILE, BITS = (Path(__file__).with_name(name) for name in ("numbers.json", "bits.json"))
SHARED = {
    "num_frames": 5, "num_sampling_steps": 4, "batch_size": 4, "num_generations": 4, "max_steps": 3, "save_interval": 0,
    "validation_num_inference_steps": 3, "validation_interval": 3, "report_to": "none", "learning_rate": 1e-3,
    "enable_gradient_checkpointing": False, "lora_r": 4, "lora_alpha": 8, "guidance_scale": 1.0, "kl_weight": 0.1,
    "kl_warmup_steps": 2, "adam_eps": 1e-8, "validate_video_length": 5, "height": 24, "width": 24,
    "validation_fixed_size": "24x24", "reward_model": "shapes",
}  # fmt: skip
RUNS = {
    "published": {"step_kl_estimator": "logprob", "guidance_scale": 2.0},
    "sage": {"use_lora": True, "updates_per_rollout": 2, "update_ref_model_step": 2, "ema_decay": 0.5},
    "precise": {"sde_type": "precise", "kl_feedback": "trust_region", "optimizer": "muon", "use_moving_KL": False,
                "use_lora": True},  # Muon works in bf16, which few CPUs have: small matrices
    "dance": {"sde_type": "dance_grpo", "use_grad_balancing": False, "kl_weight": 0, "advantage_std": "batch"},
    "flow": {"sde_type": "flow_grpo", "ratio_norm": True, "use_dual_kl": False, "updates_per_rollout": 2},
    "cps": {"sde_type": "cps", "sde_window": "random:2", "timestep_fraction": 0.5, "gradient_accumulation_steps": 3},
    "wan": {"use_lora": True, "guidance_scale": 2.0, "height": 32, "width": 48, "validation_fixed_size": "32x48"},
}  # fmt: skip
LEFT_TO_ALL = ("published", "precise", "dance", "flow", "cps")
LEFT_OUT = (
    "time",
    "memory",
    "signal",
    "policy/grad_rms",
)  # the last one is the norm in other units
PROMPTS = 3


def numbers_of(ranks, values):
    """Every number that a run writes, and the size of what it changed, by name."""
    in_fp64()
    trainer = load_trainer(from_values(values), ranks)
    trainer.run.open(0)
    # the oracle is slow, and tested elsewhere
    trainer.world = trainer.gold = trainer.validation.gold = None
    parameters = trainer.optimization.parameters
    before = {name: p.detach().clone() for name, p in parameters.items()}
    trainer.train()
    found = {
        f"moved/{name}": (p.detach() - before[name]).norm().item() for name, p in parameters.items()
    }
    for line in map(json.loads, (trainer.run.path / "metrics.jsonl").read_text().splitlines()):
        kept = {key: value for key, value in line.items() if not key.startswith(LEFT_OUT)}
        found |= flat(kept, f"{line['kind']}{line['step']}")
    return found


def flat(value, name):
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, part in enumerate(value) for k, v in flat(part, f"{name}/{i}").items()}
    return {name: value} if isinstance(value, float) else {}


def run(name, folder):
    prompts = folder / "prompts.txt"
    prompts.write_text(
        "\n".join((ROOT / "assets/tiny/prompts_train.txt").read_text().splitlines()[:PROMPTS])
    )
    places = {"output_dir": str(folder / name), "pretrained_model_root": str(ROOT / "assets/tiny")}
    places |= {"train_prompts": str(prompts), "validation_prompts": str(prompts)}
    if name == "wan":
        places["pretrained_model_root"] = str(folder / "model")
        build_tiny_wan(0, prompts.read_text().split()).save_pretrained(folder / "model")
        TINY_SAMPLING.to_json(folder / "model" / "sampling.json")
    (found,) = run_ranks(1, numbers_of, SHARED | RUNS[name] | places)
    return found


def tolerance(name, key):
    """How far a number may differ on another platform: what rounding of its inputs makes of it."""
    if (
        "/reward/" in key
    ):  # clips are uint8: a pixel that rounds the other way moves a score by as much
        return {"rel": 0, "abs": 5e-3}
    if re.search(
        r"/(loss|objective|log_ratio_mean|approx_kl|ratio_max_deviation|kl_rollout|rollout)\b", key
    ):
        return {"rel": 1e-3, "abs": 2e-7}  # differences of fp32 log-probabilities near 1
    if key.startswith(
        "moved/"
    ):  # AdamW divides by the gradient's size; Muon orthogonalizes in bf16: 1.6 % were seen
        return {"rel": 3e-2 if RUNS[name].get("optimizer") == "muon" else 1e-3, "abs": 1e-9}
    return {"rel": 1e-3, "abs": 1e-9}


def this_platform():
    """What decides the last bits: processor, its instructions that torch uses, and torch."""
    info = Path("/proc/cpuinfo")
    found = re.search(
        r"^(?:model name|CPU part)\s*:\s*(.+)$",
        info.read_text() if info.is_file() else "",
        re.MULTILINE,
    )
    cpu = found[1] if found else platform.processor()
    return f"{platform.machine()}, {cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def digest(numbers):
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", [slow(name) if name in LEFT_TO_ALL else name for name in RUNS])
def test_the_numbers_have_not_changed(name, tmp_path):
    """Slow: samplers that no recipe uses; tests/algo compares their tables with closed forms."""
    expected, found = json.loads(FILE.read_text())[name], run(name, tmp_path)
    assert found.keys() == expected.keys(), (
        "the metrics have changed: `make golden`, and say 'new numbers'"
    )
    changed = {
        k: (v, found[k])
        for k, v in expected.items()
        if found[k] != pytest.approx(v, **tolerance(name, k))
    }
    assert not changed, (
        "the numbers have changed: if that is intended, `make golden`, and say 'new numbers'"
    )
    bits = json.loads(BITS.read_text()).get(this_platform(), {}).get(name)
    assert bits in (None, digest(found)), (
        "the last bits have changed on this platform, though within rounding"
    )


def test_the_runs_differ():
    kept = json.loads(FILE.read_text())
    norms = [kept[name]["train3/policy/grad_norm"] for name in RUNS]
    assert len(set(norms)) == len(RUNS)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        written = {name: run(name, Path(folder)) for name in sys.argv[1:] or RUNS}
    for file, new in (
        (FILE, written),
        (BITS, {this_platform(): {n: digest(found) for n, found in written.items()}}),
    ):
        kept = json.loads(file.read_text()) if file.is_file() else {}
        if file == BITS:
            new = {place: kept.get(place, {}) | runs for place, runs in new.items()}
        file.write_text(json.dumps(kept | new, indent=0) + "\n")
