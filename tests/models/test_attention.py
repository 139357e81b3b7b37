"""Split attention equals attention, and is used where it pays off."""

import pytest
import torch

from sage_grpo.models import attention as module
from sage_grpo.models.attention import attention, best_attention, parted_attention, tiled_attention


@pytest.fixture(autouse=True)
def kernels_for_a_cpu(monkeypatch):
    """Split attention on the CPU: torch's kernels for the first part, plain matmuls for the remaining keys."""
    on_gpu = {
        name: getattr(module, name)
        for name in ("_kernel", "_kernel_backward", "_products", "_add_keys")
    }

    def kernel(query, key, value):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)

    def kernel_backward(*tensors):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, False
        )

    def add_keys(query, key, value, out, normalizer):
        scores = query @ key.mT * query.shape[-1] ** -0.5  # (B, H, S, R)
        total = torch.logaddexp(normalizer, scores.logsumexp(-1))
        weights = (scores - total[..., None]).exp()
        return out * (normalizer - total).exp()[..., None] + weights @ value, total

    on_cpu = {
        "_kernel": kernel,
        "_kernel_backward": kernel_backward,
        "_products": torch.matmul,
        "_add_keys": add_keys,
    }
    for name, call in on_cpu.items():

        def either(x, *others, name=name, call=call):
            return (on_gpu[name] if x.is_cuda else call)(x, *others)

        monkeypatch.setattr(module, name, either)


def tensors(tokens, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, tokens, 3, 8, generator=draw, dtype=dtype).mul(2).requires_grad_()
        for _ in range(4)
    ]


@pytest.mark.parametrize("tokens", [129, 255, 300])
def test_two_parts_give_the_values_and_gradients_of_the_whole(tokens):
    *inputs, gradient = tensors(tokens)
    whole = attention(*inputs)
    parted, _ = parted_attention(*inputs)
    torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(parted, inputs, gradient)
    expected = torch.autograd.grad(whole, inputs, gradient)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_only_long_sequences_with_something_left_over_are_parted(monkeypatch):
    monkeypatch.setattr(module, "LONG", 256)
    monkeypatch.setattr(module, "parted_attention", lambda *x: ("parted", None))
    monkeypatch.setattr(module, "attention", lambda *x: "whole")
    kinds = {tokens: tiled_attention(*tensors(tokens)[:3]) for tokens in (255, 256, 257, 384)}
    assert kinds == {255: "whole", 256: "whole", 257: "parted", 384: "whole"}


def test_a_cpu_has_no_tiles_to_fill():
    assert best_attention(torch.zeros(1)) is attention


@pytest.mark.parametrize("tokens", [129, 300])
def test_the_compiler_is_told_the_truth_about_the_operators(tokens):
    *inputs, gradient = tensors(tokens)
    torch.library.opcheck(parted_attention, inputs)
    out, total = parted_attention(*inputs)
    torch.library.opcheck(
        module._parted_backward, [x.detach() for x in (gradient, *inputs, out, total)]
    )


def test_compiled_with_any_number_of_tokens_it_stays_the_same():
    compiled = torch.compile(parted_attention, dynamic=True, backend="aot_eager", fullgraph=True)
    for tokens in (300, 401):
        *inputs, gradient = tensors(tokens)
        gradients = torch.autograd.grad(compiled(*inputs)[0], inputs, gradient)
        expected = torch.autograd.grad(parted_attention(*inputs)[0], inputs, gradient)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [129, 511, 1024 + 33])
def test_the_kernel_that_joins_the_parts_on_a_gpu(tokens):
    *inputs, gradient = (x.detach().cuda().repeat(1, 1, 1, 16).bfloat16() for x in tensors(tokens))
    inputs = [x.requires_grad_() for x in inputs]
    whole = attention(*inputs)
    parted, _ = parted_attention(*inputs)
    results = (parted, *torch.autograd.grad(parted, inputs, gradient))
    expected = (whole, *torch.autograd.grad(whole, inputs, gradient))
    for result, reference in zip(results, expected, strict=True):
        error = (result.float() - reference.float()).norm()
        assert error < 0.01 * reference.float().norm()
