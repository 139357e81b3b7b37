import pytest
import torch

from sage_grpo.worlds.shapes.damage import DAMAGES, add_noise, fade, jitter
from sage_grpo.worlds.shapes.scenes import render, sample_scenes


def clips():
    return render(sample_scenes(8, torch.Generator().manual_seed(0)), 9, 32, 24)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_keeps_shape_and_range_and_grows_with_strength(name):
    clean = clips()
    sizes = []
    for strength in (0.0, 0.2, 0.4, 0.8):
        damaged = DAMAGES[name](clean, strength, torch.Generator().manual_seed(1))
        assert damaged.shape == clean.shape
        assert damaged.min() >= 0
        assert damaged.max() <= 1
        sizes.append((damaged - clean).square().mean().sqrt().item())
    assert sizes[0] < 1e-5
    assert sizes == sorted(sizes)
    assert sizes[1] > 10 * sizes[0]
    assert sizes[-1] > 0.01


def test_noise_has_the_strength_it_says():
    grey = torch.full((4, 5, 16, 16, 3), 0.5)
    assert add_noise(grey, 0.05, torch.Generator().manual_seed(0)).std().item() == pytest.approx(
        0.05, rel=0.05
    )


def test_full_fade_ends_on_the_bare_background():
    faded = fade(clips(), 1.0)
    torch.testing.assert_close(
        faded[:, -1], faded[:, -1, :1, :1].expand_as(faded[:, -1]), atol=1e-6, rtol=0
    )


def test_jitter_moves_frames_apart():
    ramp = ((torch.arange(32) + 0.5) / 32)[None, None, None, :, None].expand(200, 5, 32, 32, 3)
    shift = (jitter(ramp, 0.5, torch.Generator().manual_seed(0)) - ramp)[:, :, 16, 16, 0] * 32
    assert shift.std().item() == pytest.approx(0.5, rel=0.1)
