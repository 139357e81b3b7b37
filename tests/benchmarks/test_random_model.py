"""Random weights of any size, in files that the loader can read."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15

from benchmarks import random_model as script
from sage_grpo.models.weights import check_names, open_folder


def test_a_part_is_written_as_diffusers_writes_it(tmp_path):
    folder = tmp_path / "vae"
    folder.mkdir()
    sizes = {"latent_channels": 4, "block_out_channels": (16, 32, 32), "layers_per_block": 1}
    sizes |= {"spatial_compression_ratio": 4, "temporal_compression_ratio": 4}
    count = script.write_part(AutoencoderKLHunyuanVideo15, folder, torch.device("cpu"), torch.bfloat16, **sizes)
    model = AutoencoderKLHunyuanVideo15.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == count
    check_names(open_folder(folder), {name: value.shape for name, value in model.state_dict().items()})
    assert model.encoder.conv_in.conv.weight.std() > 0.01
