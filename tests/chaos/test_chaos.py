"""Faults drawn from a seed, a comparison that detects a single bit, and a short campaign against real runs."""

import json
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_grpo.config.parse import from_values
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.files import manifest
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from tests.chaos import chaos
from tests.chaos.faults import KINDS, Fault, broken_promise, damage
from tests.chaos.world import write_model
from tests.hostile import hashes_of

ALL = list(KINDS)


def test_the_same_seed_gives_the_same_plans():
    count = 2 * len(ALL)
    plans = chaos.draw_plans(3, count, ALL, 2)
    assert plans == chaos.draw_plans(3, count, ALL, 2) != chaos.draw_plans(4, count, ALL, 2)
    faults = [fault for plan in plans for fault in plan.faults]
    assert len(faults) == count and all(len(plan.faults) == 5 for plan in plans[:-1])
    assert {plan.layout for plan in plans} == set(chaos.LAYOUTS)
    assert all(sum(fault.kind == kind for fault in faults) == 2 for kind in ALL)
    assert all(fault.moment in KINDS[fault.kind] and fault.rank in (0, 1) for fault in faults)
    for plan in plans:
        steps = [fault.step for fault in plan.faults]
        assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] <= 20


def test_a_whole_campaign_has_every_kind():
    for seed in range(20):
        plans = chaos.draw_plans(seed, chaos.read_flags(["--output", "nowhere"]).faults, ALL, 2)
        assert {fault.kind for plan in plans for fault in plan.faults} == set(ALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two iterations with a checkpoint after each, and a copy that may be changed and restored."""
    folder = tmp_path_factory.mktemp("chaos")
    model = write_model(folder / "model")[1]
    flags = {
        "pretrained_model_root": model, "output_dir": str(folder / "run"), "reward_model": "shapes", "batch_size": 2,
        "num_generations": 2, "num_sampling_steps": 2, "max_steps": 2, "save_interval": 1, "report_to": "none",
        "validation_num_inference_steps": 2, "use_lora": True, "lora_r": 4,
    }  # fmt: skip
    build_trainer(from_values(flags), Ranks(0, 1, torch.device("cpu"))).train()
    return folder / "run"


@pytest.fixture
def copy(trained, tmp_path):
    # the lock of the finished run may vanish meanwhile
    return shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("lock"))


def test_an_equal_run_has_no_differences(trained, copy):
    assert chaos.differences(copy, trained) == []


def test_one_changed_bit_is_noticed(trained, copy):
    checkpoint = copy / "checkpoints" / "step-000002"
    file = checkpoint / "trainer" / "rank-00000.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    name = sorted(name for name in tensors if name.startswith("optimizer/") and tensors[name].ndim)[
        5
    ]
    tensors[name].view(torch.uint8).flatten()[7] ^= 1
    save_file(tensors, file, metadata)
    files = [
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != manifest.NAME
    ]
    (checkpoint / manifest.NAME).write_text(json.dumps({"files": hashes_of(checkpoint, files)}))
    assert chaos.differences(copy, trained) == [f"{name} in {file} differs"]


def test_minus_zero_is_not_zero_and_nan_is_itself():
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert chaos.same_bits(nan, nan.clone()) and chaos.same_bits(torch.tensor(1), torch.tensor(1))
    assert not chaos.same_bits(zero, -zero) and not chaos.same_bits(zero, zero.double())
    assert not chaos.same_bits(zero, None) and not chaos.same_bits(zero, zero[:1])


def test_what_is_lost_or_left_is_noticed(trained, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    changed = lines[1].replace('"lr": 1e-05', '"lr": 2e-05')
    assert changed != lines[1] and json.loads(lines[1])["kind"] == "train"
    (copy / "metrics.jsonl").write_text("\n".join([lines[0], changed, *lines[3:]]) + "\n")
    (copy / "checkpoints" / "step-000003.tmp").mkdir()
    state = copy / "checkpoints" / "step-000001" / "trainer" / "state.json"
    state.write_text(state.read_text() + " ")
    left, damaged, one, two = chaos.differences(copy, trained)
    assert left.endswith("step-000003.tmp is left") and f"{state} was changed" in damaged
    assert (one, two) == ("the metrics of train 1 differ", "the metrics of train 2 differ")


def test_damage_of_every_sort_is_noticed(trained, tmp_path):
    words = set()
    for seed in range(30):
        target = shutil.copytree(trained / "checkpoints" / "step-000002", tmp_path / str(seed))
        damage(target, random.Random(seed))
        with pytest.raises(manifest.Damaged) as error:
            manifest.check(target)
        words |= {
            word
            for word in ("was changed", "is missing", "cannot be read")
            if word in str(error.value)
        }
    assert words == {"was changed", "is missing", "cannot be read"}


@pytest.mark.parametrize(
    "kind, seen, wrong",
    [
        ("term_rank", {}, ""),
        ("term_rank", {"state": "failed"}, "failed instead of preempted"),
        ("term_launcher", {"newest": 3}, "that of 3, but the signal came after 4"),
        ("reward_hangs", {"message": "100% of the rewards failed"}, ""),
        ("reward_raises", {}, "did not stop for its reward"),
        ("hang_rank", {"flight": 0}, "no flight record"),
        ("damage", {}, "the damage was not noticed"),
        ("damage", {"said": "step-000004 is damaged and left out"}, ""),
        ("kill_launcher", {}, "no start found the run folder in use"),
        ("kill_launcher", {"state": "done"}, ""),
        ("two_starts", {"said": "output_dir x is in use by process 7 on a since b"}, ""),
        ("two_starts", {"said": None}, ""),
        ("slow_disk", {"flight": 1}, "a slow disk ended the run"),
        ("slow_disk", {"flight": 0}, ""),
        ("clock_jump", {"flight": 1}, "the run ended"),
        ("pause_all", {"flight": 0}, ""),
        ("reward_nan", {}, "did not stop for its reward"),
        ("litter", {}, "the litter was not noticed"),
        ("litter", {"said": "step-099999 is damaged and left out: x"}, ""),
        ("double_term", {"state": "running", "newest": 0}, ""),
        ("kill_all", {"state": "running", "newest": 0, "flight": 0}, ""),
    ],
)
def test_a_fault_has_its_promises(kind, seen, wrong):
    seen = {"state": "preempted", "message": "", "newest": 4, "said": "", "flight": 1} | seen
    state = {name: seen.pop(name) for name in ("state", "message")}
    found = broken_promise(Fault(kind, "iteration", 4, 0.5, 0, 0), step=4, state=state, **seen)
    assert wrong in found and bool(found) == bool(wrong)


@pytest.mark.slow
def test_a_short_campaign(tmp_path, monkeypatch, capfd):
    """One fault and one rank, because starts take nearly all of the time; `make chaos` has two, and all kinds.

    Slow: real torchrun and a restart; tests/train/test_faults.py and tests/runs/test_lock.py test each fault alone.
    """
    monkeypatch.setenv(TOKEN_VARIABLE, "the script makes its own")
    monkeypatch.setattr(chaos, "STEPS_PER_FAULT", 3)
    flags = ["--faults", "1", "--kinds", "damage", "--seed", "24", "--ranks", "1"]
    output = tmp_path / "out"
    assert chaos.main([*flags, "--output", str(output)]) == 0, capfd.readouterr().out
    [outcome] = json.loads((output / "results.json").read_text())["outcomes"]
    assert outcome["fault"].startswith("damage") and outcome["resumed"] is not None
    assert capfd.readouterr().out.count("| yes |") == 1
