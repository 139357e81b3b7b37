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
    assert torch.equal(values.float().abs().amax(1), torch.full((8,), fp8.LARGEST))
    error = (values.float() * scale - x).norm(dim=1) / x.norm(dim=1)
    assert (error < 0.04).all()  # three bits after the leading one
    assert (error > 0.01).all()


def test_a_row_of_zeros_stays_zero():
    values, scale = fp8.rounded(torch.zeros(1, 16))
    assert not (values.float() * scale).any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_product_is_that_of_the_rounded_factors(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, weight, bias = (
        drawn(*shape, device=device, dtype=dtype) for shape in ((2, 3, 32), (48, 32), (48,))
    )
    rounded = [
        (values.double() * scale) for values, scale in map(fp8.rounded, (x.flatten(0, 1), weight))
    ]
    expected = F.linear(*rounded, bias.double()).view(2, 3, 48)
    torch.testing.assert_close(
        fp8.linear(x, weight, bias).double(),
        expected,
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-2,
    )


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    for capability, fits in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if fits:
            fp8.check(torch.device("cuda"))
        else:
            with pytest.raises(
                ValueError, match="this GPU cannot multiply 8-bit floats: set outside_window exact"
            ):
                fp8.check(torch.device("cuda"))
    fp8.check(torch.device("cpu"))


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
    graphs, layers = (
        CompileCounter(),
        nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)),
    )
    switch, x = fp8.Switch(layers), drawn(4, 32)
    compiled = [torch.compile(layer.forward, backend=graphs) for layer in layers]
    with torch.no_grad(), switch:
        assert all(
            torch.equal(fast(x), layer(x)) for fast, layer in zip(compiled, layers, strict=True)
        )
        assert graphs.frame_count == 1
    with torch.no_grad():
        assert all(
            torch.equal(fast(x), layer(x)) for fast, layer in zip(compiled, layers, strict=True)
        )
    assert graphs.frame_count == 2
