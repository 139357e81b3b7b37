"""Parts of the VAE's training that replace stock code."""

import torch

from research.tiny import learn_vae


def test_slices_pad_as_the_stock_padding():
    x = torch.randn(2, 3, 5, 4, 6, dtype=torch.float64, requires_grad=True)
    padding = (1, 1, 1, 1, 2, 0)
    mine, stock = (
        learn_vae.replicate_pad(x, padding),
        torch.nn.functional.pad(x, padding, mode="replicate"),
    )
    assert torch.equal(mine, stock)
    weight = torch.randn(mine.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((padded * weight).sum(), x)[0] for padded in (mine, stock)]
    torch.testing.assert_close(*gradients)
