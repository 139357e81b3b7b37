"""The small data classes of the backbone interface, and behavior shared by every backbone."""

import json
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.data.requests import Request
from sage_grpo.files.tensor_files import write_file
from sage_grpo.models.backbone import Backbone, Guidance, Sampling
from sage_grpo.models.lora import adapter_parameters, add_adapter, init_adapter
from sage_grpo.models.registry import open_backbone

SAMPLING = Sampling(frames=9, height=32, width=48, fps=8, shift=5.0, guidance=3.5, num_steps=20)


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
    with pytest.raises(
        ValueError,
        match=rf"sampling\.json has {next(iter(change))} .*; it must be a .*number above 0",
    ):
        Sampling.from_json(tmp_path / "sampling.json")


@pytest.mark.parametrize(
    "scale, runs",
    [(1.0, ["positive"]), (3.0, ["positive", "negative"]), (0.0, ["positive", "negative"])],
)
def test_the_negative_branch_runs_only_where_it_counts(scale, runs):
    velocities = {"positive": torch.tensor([5.0]), "negative": torch.tensor([2.0])}
    seen = []

    def branch(x, sigma, cond):
        seen.append(cond)
        return velocities[cond]

    negative = SimpleNamespace(seeing=lambda other: "negative" if other == "positive" else None)
    model = SimpleNamespace(branch=branch)
    velocity = Backbone.velocity(model, None, 0.5, "positive", Guidance(scale, negative))
    assert seen == runs and velocity.item() == 2 + scale * 3


@torch.no_grad()
def velocity(backbone):
    x = torch.randn(
        1, *backbone.latent_shape(5, 32, 32), generator=torch.Generator().manual_seed(0)
    )
    return backbone.velocity(x, 0.5, backbone.encode([Request("a red circle")])[0], Guidance())


def test_loaded_weights_start_from_the_base_model_each_time(tiny_folder, tmp_path):
    """An adapter on top of full weights, or of another adapter, would be a third model."""
    base = velocity(open_backbone(tiny_folder))
    for name in ("full", "lora"):
        trained = open_backbone(tiny_folder)
        if name == "lora":
            add_adapter(trained.transformer, 4, 8, ("to_q",), torch.float32)
            init_adapter(trained.transformer, 0)
            changed = adapter_parameters(trained.transformer).values()
        else:
            changed = trained.transformer.parameters()
        for parameter in changed:
            parameter.data += 0.1
        (tmp_path / name / "transformer").mkdir(parents=True)
        for file, contents in trained.exported(use_lora=name == "lora").items():
            write_file(tmp_path / name / file, contents)
        backbone = open_backbone(tiny_folder)
        backbone.load_weights(tmp_path / name)
        assert torch.equal(velocity(backbone), velocity(trained))
        assert not torch.equal(velocity(trained), base)

    lora = velocity(backbone)
    backbone.load_weights(tmp_path / "full")
    for _ in range(2):
        backbone.load_weights(tmp_path / "lora")
        assert torch.equal(velocity(backbone), lora)
    backbone.load_weights(None)
    assert torch.equal(velocity(backbone), base)
