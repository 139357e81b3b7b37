"""Rates of other GPU models are scaled by what bounds them."""

import pytest

from sage_grpo.tools.plan.calibration import GPU_MODELS, calibrate


def test_rates_are_scaled_by_arithmetic_memory_or_links():
    h200, a100 = calibrate("h200"), calibrate("a100")
    assert calibrate() == h200 and a100.gpu_model == "a100"
    for name in ("attention", "attention_backward", "linear"):
        assert getattr(a100, name) / getattr(h200, name) == pytest.approx(312 / 989)
    assert a100.optimizer / h200.optimizer == pytest.approx(2.04 / 4.8)
    assert a100.decode_tiled / h200.decode_tiled == pytest.approx(4.8 / 2.04)
    for name in ("rest", "rest_backward", "decode_untiled"):
        slower = [a / b for a, b in zip(getattr(a100, name), getattr(h200, name), strict=True)]
        assert slower == pytest.approx([4.8 / 2.04] * 2)
    assert a100.nvlink / h200.nvlink == pytest.approx(300 / 450)


def test_sizes_and_other_links_are_the_same_on_every_gpu():
    h200 = calibrate()
    same = ("forward_activations", "training_activations", "saved_activations", "reserve", "nic")
    for gpu_model in GPU_MODELS:
        other = calibrate(gpu_model)
        assert [getattr(other, name) for name in same] == [getattr(h200, name) for name in same]
        assert other.rewards == h200.rewards


def test_an_h100_computes_as_fast_and_has_slower_memory():
    h100, h200 = calibrate("h100"), calibrate("h200")
    assert h100.linear == h200.linear and h100.decode_tiled > h200.decode_tiled
