"""Fixtures of the tests that compare Wan with stock diffusers."""

import pytest
import torch


@pytest.fixture
def exact(monkeypatch):
    """Norms and modulation in fp64 too: the stock blocks compute them in fp32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
