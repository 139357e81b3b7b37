"""Blocks of any architecture: here each takes and returns one tensor, and the module list has a different name."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sage_grpo.models.denoiser import Denoiser


class Small(nn.Module, Denoiser):
    block_list = "layers"

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.all_blocks:
            x = self.run_block(block, (x,))
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small().double()


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("share, count", [(0.0, 0), (0.5, 2), (1.0, 3)])
def test_a_share_of_the_blocks_is_recomputed_and_no_gradient_changes(model, share, count):
    x = torch.ones(2, 4, dtype=torch.float64)
    calls = []
    expected = gradients(copy.deepcopy(model), x)
    for block in model.layers:
        block[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.prepare_blocks(recomputed=share)
    assert all(map(torch.equal, gradients(model, x), expected))
    assert len(calls) == 3 + count


def test_compiled_blocks_of_one_tensor_keep_no_history_without_gradients(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    x = torch.ones(2, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    model.prepare_blocks(recomputed=1.0, compiled=True)
    with torch.no_grad():
        rollout = model(x)
    velocity = model(x)
    assert torch.equal(rollout, velocity) and velocity.requires_grad and not rollout.requires_grad
    torch.testing.assert_close(velocity, plain(x), rtol=1e-12, atol=1e-12)


def test_only_matrices_of_blocks_are_for_muon(model):
    matrices = [name for name, p in model.named_parameters() if model.is_block_matrix(name, p)]
    assert matrices == ["layers.0.0.weight", "layers.1.0.weight", "layers.2.0.weight"]


def test_a_model_without_sequence_parallelism_says_so(model, monkeypatch):
    model.split_sequence(None)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="sp_size is 2; this model has no sequence parallelism"):
        model.split_sequence(object())
