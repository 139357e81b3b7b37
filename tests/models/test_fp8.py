"""Products in 8 bits: the rounding they promise, and layers that use them inside the switch alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from sage_grpo.models import fp8

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def drawn(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def test_rows_are_rounded_relative_to_their_largest_number():
    x = drawn(8, 64) * torch.logspace(-6, 6, 8)[:, None]
    values, scale = fp8.rounded(x)
    assert values.dtype == fp8.FORMAT
    assert torch.equal(values.float().abs().amax(1), torch.full((8,), fp8.MAX_VALUE))
    error = (values.float() * scale - x).norm(dim=1) / x.norm(dim=1)
    assert (error < 0.04).all()  # three bits after the leading one
    assert (error > 0.01).all()


def test_a_row_of_zeros_stays_zero():
    values, scale = fp8.rounded(torch.zeros(1, 16))
    assert not (values.float() * scale).any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_product_is_that_of_the_rounded_factors(device):
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 1e-2)
    x = drawn(2, 3, 32, device=device, dtype=dtype)
    weight = drawn(48, 32, device=device, dtype=dtype)
    bias = drawn(48, device=device, dtype=dtype)

    def as_rounded(factor):
        values, scale = fp8.rounded(factor)
        return values.double() * scale

    expected = F.linear(as_rounded(x.flatten(0, 1)), as_rounded(weight), bias.double())
    product = fp8.linear(x, weight, bias).double()
    torch.testing.assert_close(product, expected.view(2, 3, 48), rtol=tolerance, atol=1e-2)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_a_recent_gpu_and_a_cpu_are_accepted(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    fp8.check(torch.device("cuda"))
    fp8.check(torch.device("cpu"))


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    message = "this GPU cannot multiply 8-bit floats: set outside_window exact"
    with pytest.raises(ValueError, match=message):
        fp8.check(torch.device("cuda"))


def test_layers_follow_the_switch_but_for_adapters_and_odd_sizes():
    layers = nn.ModuleDict(
        {"plain": nn.Linear(32, 32), "lora_A": nn.Linear(32, 32), "odd": nn.Linear(32, 17)}
    )
    x = drawn(4, 32)
    exact = {name: layer(x) for name, layer in layers.items()}
    with fp8.Switch(layers):
        inside = {name: torch.equal(layer(x), exact[name]) for name, layer in layers.items()}
    assert inside == {"plain": False, "lora_A": True, "odd": True}
    assert all(torch.equal(layer(x), exact[name]) for name, layer in layers.items())


def test_layers_that_are_alike_share_a_compiled_graph():
    """With a graph each, the 54 blocks of the real model compile for minutes."""
    torch._dynamo.reset()
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
    switch = fp8.Switch(layers)
    graphs = CompileCounter()
    compiled = [torch.compile(layer.forward, backend=graphs) for layer in layers]
    x = drawn(4, 32)

    def agree():
        pairs = zip(compiled, layers, strict=True)
        return all(torch.equal(fast(x), layer(x)) for fast, layer in pairs)

    with torch.no_grad(), switch:
        assert agree()
        assert graphs.frame_count == 1
    with torch.no_grad():
        assert agree()
    assert graphs.frame_count == 2
