"""The small data classes of the contract."""

import json

import pytest
import torch

from sage_grpo.models.policy import Conditioning, Sampling

SAMPLING = Sampling(frames=9, height=32, width=48, fps=8, shift=5.0, guidance=3.5, num_steps=20)


def test_conditioning_moves_both_parts():
    cond = Conditioning(torch.ones(3, 4), torch.zeros(0, 2)).to(dtype=torch.float64)
    assert (cond.text.dtype, cond.glyph.dtype) == (torch.float64, torch.float64)
    assert cond.to("meta").glyph.device.type == "meta"
    assert cond.to("meta").text.shape == (3, 4)


def test_sampling_survives_its_file(tmp_path):
    SAMPLING.to_json(tmp_path / "sampling.json")
    assert Sampling.from_json(tmp_path / "sampling.json") == SAMPLING


@pytest.mark.parametrize("change", [{"steps": 3}, {"fps": None}])
def test_sampling_file_with_other_keys_is_refused(tmp_path, change):
    SAMPLING.to_json(tmp_path / "sampling.json")
    values = json.loads((tmp_path / "sampling.json").read_text()) | change
    values = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "sampling.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="needs exactly"):
        Sampling.from_json(tmp_path / "sampling.json")


@pytest.mark.parametrize("change", [{"fps": 7.5}, {"fps": True}, {"frames": 0}, {"width": "9"}, {"shift": None},
                                    {"guidance": float("nan")}, {"guidance": 10**400}])  # fmt: skip
def test_sampling_file_with_other_values_is_refused(tmp_path, change):
    SAMPLING.to_json(tmp_path / "sampling.json")
    values = json.loads((tmp_path / "sampling.json").read_text())
    (tmp_path / "sampling.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=rf"sampling\.json has {next(iter(change))} .*; it must be a .*number above 0"):
        Sampling.from_json(tmp_path / "sampling.json")
