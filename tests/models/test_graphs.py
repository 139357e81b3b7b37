"""CUDA graphs, on a CPU by recorded ones; whether CUDA can capture the kernels is left to the test that needs a GPU."""

import pytest
import torch
from torch import nn

from sage_grpo.models.graphs import Graphs
from tests.recorded_graphs import record_graphs

SHAPES = ((3, 5), (4, 5), (3, 5))


@pytest.fixture
def recorded_graphs(monkeypatch):
    record_graphs(monkeypatch)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2), nn.Linear(2, 2)).double()
    # a layer that the forward never enters, as in the real models
    model.append(nn.Linear(9, 9)).double()
    model[0].bias.requires_grad_(False)
    model.forward = lambda x, scale: model[3](model[2](model[1](model[0](x)))) * scale[:, None]
    return model


def inputs(device="cpu"):
    draw = torch.Generator().manual_seed(1)
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
        yield x.to(device), torch.rand(rows, generator=draw, dtype=torch.float64).to(device)


def trained(model, device="cpu"):
    """Outputs without and with gradients, and parameters after a few steps, each with the sum of three gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    outputs = []
    for _ in range(3):
        for x, scale in inputs(device):
            with torch.no_grad():
                outputs.append(model(x, scale))
            output = model(x, scale)
            outputs.append(output.detach())
            output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, [p.detach().clone() for p in model.parameters()]


def assert_equal(tensors, expected):
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def test_training_is_the_same_to_the_bit(recorded_graphs):
    expected_outputs, expected_parameters = trained(network())
    model = network()
    graphs = Graphs(model)
    outputs, parameters = trained(model)
    assert_equal(outputs, expected_outputs)
    assert_equal(parameters, expected_parameters)
    assert not torch.equal(parameters[0], next(network().parameters()))  # they did move
    assert len(graphs.pairs) == 2 and graphs.replays == len(outputs)  # one pair for each shape


def test_inputs_and_results_outlive_the_next_forward(recorded_graphs):
    model = network()
    Graphs(model)
    (first, scale), *_ = inputs()
    tensors = (first, model(first, scale).detach())
    copies = [tensor.clone() for tensor in tensors]
    model(2 * first, scale)
    assert_equal(tensors, copies)


def test_a_backward_after_another_forward_is_refused(recorded_graphs):
    model = network()
    Graphs(model)
    first, second, _ = inputs()
    loss = model(*first).sum()
    with torch.no_grad():
        model(*second)
    with pytest.raises(RuntimeError, match="another forward has overwritten"):
        loss.backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    expected_outputs, expected_parameters = trained(network().cuda(), "cuda")
    model = network().cuda()
    Graphs(model)
    outputs, parameters = trained(model, "cuda")
    assert_equal(outputs, expected_outputs)
    assert_equal(parameters, expected_parameters)
