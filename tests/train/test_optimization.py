"""One optimizer step on two numbers: clipping, decay, averaging."""

import json
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sage_grpo.config.fields import Config
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.train.optimization import Optimization
from tests.dist import run_ranks


def optimization(**flags):
    weights = {"w": torch.nn.Parameter(torch.tensor([3.0, 4.0]))}
    return Optimization(Denoiser(), weights, Config(learning_rate=0.1, **flags))


def test_the_gradient_is_clipped_to_its_norm_and_no_further():
    for limit, expected in ((2.5, 2.5), (100.0, 5.0)):
        optimized = optimization(max_grad_norm=limit)
        optimized.parameters["w"].grad = torch.tensor([3.0, -4.0])
        assert optimized.clip() == pytest.approx(5.0)
        assert optimized.parameters["w"].grad.norm().item() == pytest.approx(expected, rel=1e-5)


def clipped_twice(ranks):
    """Local gradients and norm after our clipping and after torch's, of one sharded tensor and one without gradient."""
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    weights = {
        name: torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        for name in ("w", "unused")
    }
    gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for clip in (
        lambda: Optimization(Denoiser(), weights, Config(max_grad_norm=0.3)).clip(),
        lambda: torch.nn.utils.clip_grad_norm_(weights.values(), 0.3).full_tensor().item(),
    ):
        weights["w"].grad = distribute_tensor(gradient, mesh, [Shard(0)])
        found.append((clip(), weights["w"].grad.to_local()))
    return found


def test_sharded_gradients_are_clipped_as_torch_does():
    for (norm, gradient), (wanted_norm, wanted) in run_ranks(2, clipped_twice):
        assert norm == wanted_norm > 0.3
        assert torch.equal(gradient, wanted)


def test_without_a_gradient_weights_decay_by_rate_times_decay():
    optimized = optimization(weight_decay=0.2)
    optimized.parameters["w"].grad = torch.zeros(2)
    optimized.step()
    torch.testing.assert_close(
        optimized.parameters["w"].detach(), torch.tensor([3.0, 4.0]) * (1 - 0.1 * 0.2)
    )
    assert optimized.updates == 1


def test_the_average_keeps_the_share_of_its_decay():
    optimized = optimization(ema_decay=0.9)
    optimized.parameters["w"].grad = torch.tensor([1.0, -1.0])
    optimized.step()
    now = optimized.parameters["w"].detach().clone()
    expected = 0.9 * torch.tensor([3.0, 4.0]) + 0.1 * now
    torch.testing.assert_close(optimized.average["w"], expected)
    with pytest.raises(KeyError), optimized.using(optimized.average):
        torch.testing.assert_close(optimized.parameters["w"].detach(), expected)
        raise KeyError
    assert torch.equal(optimized.parameters["w"], now)


def test_the_old_policy_follows_by_a_decay_that_grows_to_its_largest():
    optimized = optimization(algorithm="nft", nft_decay=0.5, nft_decay_growth=0.3)
    expected = torch.tensor([3.0, 4.0])
    for decay in (0.3, 0.5, 0.5):
        optimized.parameters["w"].grad = torch.tensor([1.0, -1.0])
        optimized.step()
        expected = decay * expected + (1 - decay) * optimized.parameters["w"].detach()
        torch.testing.assert_close(optimized.old_policy["w"], expected)
    assert (
        optimization(algorithm="nft", nft_decay=0.0).old_policy
        == optimization(algorithm="awm").old_policy
        == {}
    )


@pytest.mark.parametrize(
    ("flags", "copy"),
    [
        ({"ema_decay": 0.95}, "average"),
        ({"algorithm": "nft", "nft_decay": 0.95, "nft_decay_growth": 1.0}, "old_policy"),
    ],
    ids=["average", "old_policy"],
)
def test_copies_of_bf16_weights_follow_them(flags, copy):
    """In bf16 a copy at 1.0 would stay there: a twentieth of the way to 1.03 is less than half a rounding step."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimized = Optimization(Denoiser(), {"w": weight}, Config(learning_rate=0.0, **flags))
    with torch.no_grad():
        weight.fill_(1.03)
    for _ in range(20):
        weight.grad = torch.zeros_like(weight)
        optimized.step()
    target = weight.item()
    followed = getattr(optimized, copy)["w"].item()
    assert followed == pytest.approx(target - 0.95**20 * (target - 1), rel=1e-4)

    with optimized.using(getattr(optimized, copy)):
        assert optimized.parameters["w"].item() == pytest.approx(followed, abs=2**-8)
    assert optimized.parameters["w"].item() == target


def test_warmup_ends_at_the_learning_rate():
    optimized = optimization(warmup_steps=2)
    rates = []
    for _ in range(4):
        rates.append(optimized.learning_rate)
        optimized.parameters["w"].grad = torch.ones(2)
        optimized.step()
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1]) and math.isclose(
        optimized.optimizers[0].param_groups[0]["lr"], 0.1
    )


def test_counters_of_a_fused_optimizer_come_back_to_the_device_of_its_weights():
    """A GPU refuses to step otherwise; the meta device stands in for it here."""
    weights = {"w": torch.nn.Parameter(torch.ones(2, device="meta"))}
    stored = {
        "w.step": torch.tensor(7.0),
        "w.exp_avg": torch.ones(2),
        "w.exp_avg_sq": torch.ones(2),
    }
    for fused, home in ((True, "meta"), (None, "cpu")):
        optimized = Optimization(Denoiser(), weights, Config())
        optimized.optimizers[0].param_groups[0]["fused"] = fused
        optimized.load_tensors(stored)
        state = optimized.tensors()
        assert state["w.step"].device.type == home and state["w.exp_avg"].device.type == "meta"
    assert state["w.step"].item() == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, True])
def test_tiny_gradients_count_and_absent_ones_do_not(dtype, fused):
    weights = {"w": torch.nn.Parameter(torch.zeros(3, dtype=dtype))}
    optimized = Optimization(Denoiser(), weights, Config(learning_rate=0.1))
    optimized.optimizers[0].param_groups[0]["fused"] = fused
    for _ in range(3):
        weights["w"].grad = torch.tensor([1e-9, -1e-12, 0.0], dtype=dtype)
        optimized.step()
    torch.testing.assert_close(
        weights["w"].detach().float(), torch.tensor([-0.3, 0.3, 0.0]), rtol=0.01, atol=0
    )


class Matrices(Denoiser):
    def is_block_matrix(self, name, parameter):
        return parameter.ndim == 2


@pytest.mark.parametrize("size", [1e-9, 0.0])
def test_muon_takes_tiny_gradients_as_it_takes_large_ones(size):
    moved = []
    for scale in (1.0, size):
        weights = {"w": torch.nn.Parameter(torch.zeros(4, 6))}
        optimized = Optimization(Matrices(), weights, Config(learning_rate=0.1, optimizer="muon"))
        weights["w"].grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * scale
        optimized.step()
        moved.append(weights["w"].detach().norm().item())
    assert moved[0] > 0.05 and moved[1] == pytest.approx(moved[0] if size else 0.0, rel=0.02)


def test_a_gradient_below_eps_is_said_after_the_first_iteration(make, capsys):
    trainer = make(adam_eps=0.01, max_grad_norm=1e-3, validation_interval=0)
    trainer.train()
    lines = [
        json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    ]
    norms = [
        (line["policy/grad_norm"], line["policy/grad_rms"])
        for line in lines
        if line["kind"] == "train"
    ]
    count = sum(p.numel() for p in trainer.optimization.parameters.values())
    assert len(norms) == 2 and all(norm > 1e-3 for norm, _ in norms)
    assert [rms for _, rms in norms] == pytest.approx([1e-3 / math.sqrt(count)] * 2)
    assert (
        capsys.readouterr().err.count("iteration 1: gradient below eps: the gradient's RMS is ")
        == 1
    )


def test_rms_is_that_of_the_clipped_gradient():
    optimized = optimization(max_grad_norm=2.0)
    assert optimized.rms(1.0) == pytest.approx(1 / math.sqrt(2)) and optimized.rms(
        5.0
    ) == pytest.approx(math.sqrt(2))
