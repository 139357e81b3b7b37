"""LoRA on VideoAlign's language model: it begins as nothing, and is merged into a folder that VideoAlign reads."""

import pytest
import torch

from sage_grpo.rewards.videoalign.adapter import LAYERS, adapter_size, add_adapter, merge_adapter
from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rewards.videoalign.writing import stored_dtype, write_with_weights

PROMPTS = ["a red circle", "a blue square moving left"]


def inputs(reward):
    generator = torch.Generator().manual_seed(0)
    clips = torch.randint(0, 256, (2, 4, 56, 56, 3), generator=generator, dtype=torch.uint8)
    return reward.inputs(list(clips), PROMPTS, 2.0)


@torch.no_grad()
def trained(parameters):
    """As if it had learned something."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in parameters.items():
        if ".lora_B." in name:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_follows_from_its_seed(videoalign_folders):
    reward = VideoAlign(videoalign_folders["VideoReward"])
    before = reward.hidden(inputs(reward))
    parameters = add_adapter(reward.model, rank=3, seed=1)
    assert torch.equal(reward.hidden(inputs(reward)), before)
    assert sum(value.numel() for value in parameters.values()) == adapter_size(
        VideoAlign(videoalign_folders["VideoReward"]).model, 3
    )
    trainable = {name for name, value in reward.model.named_parameters() if value.requires_grad}
    assert trainable == set(parameters)
    assert all("language_model." in name for name in parameters)
    assert {layer for layer in LAYERS for name in parameters if f".{layer}." in name} == set(LAYERS)

    same, other = (
        add_adapter(VideoAlign(videoalign_folders["VideoReward"]).model, 3, seed) for seed in (1, 2)
    )
    name = next(name for name in parameters if ".lora_A." in name)
    assert torch.equal(same[name], parameters[name])
    assert not torch.equal(other[name], parameters[name])


@pytest.mark.parametrize("layout", ["VideoReward", "VideoReward_split"])
@torch.no_grad()
def test_a_merged_adapter_is_read_back_from_the_folder(videoalign_folders, tmp_path, layout):
    base = videoalign_folders[layout]
    reward = VideoAlign(base)
    names = list(reward.model.state_dict())
    before = reward.hidden(inputs(reward))
    trained(add_adapter(reward.model, rank=3, seed=1))
    adapted = reward.hidden(inputs(reward))
    assert (adapted - before).abs().max() > 1e-3

    merge_adapter(reward.model, torch.float32)
    merged = reward.hidden(inputs(reward))
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    assert list(reward.model.state_dict()) == names

    head = torch.randn(3, merged.shape[-1])
    write_with_weights(base, tmp_path / "new", reward.model, head)
    check_folder(tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*.pth"))
    new = VideoAlign(tmp_path / "new")
    assert torch.equal(new.head, head)
    # weights in bf16 are rounded by up to 0.4 %; single states near 0 may move more
    tolerance = 1e-6 if stored_dtype(base) == torch.float32 else 2e-2
    assert (new.hidden(inputs(new)) - merged).norm() < tolerance * merged.norm()
