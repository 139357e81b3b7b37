"""Weights read in slices equal the full tensors, and bad files are named."""

import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.weights import (
    STEM,
    Rows,
    Weights,
    check_names,
    fill_model,
    load_model,
    open_folder,
)
from sage_grpo.parallel.fsdp import full_tensor, shard
from scripts.export_checkpoint import save_weights
from tests.dist import run_ranks

SINGLE = f"{STEM}.safetensors"


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def tensors():
    numbers = torch.arange(12, dtype=torch.int64)
    return {
        "a.weight": draw(6, 4),
        "a.bias": draw(6, dtype=torch.bfloat16),
        "count": torch.tensor(7.0),
        "n": numbers,
    }


def sharded(folder, tensors, size=100):
    """A folder with several files and an index."""
    save_weights(folder, iter(tensors.items()), size)
    assert (folder / f"{SINGLE}.index.json").is_file()
    return folder


@pytest.mark.parametrize("size", [5e9, 100, 1])
def test_what_is_saved_is_read_again_to_the_last_bit(tmp_path, tensors, size):
    save_weights(tmp_path, tensors.items(), size)
    weights = open_folder(tmp_path)
    assert sorted(weights.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.read(name).dtype == tensor.dtype and torch.equal(weights.read(name), tensor)


def test_shards_have_the_usual_names_and_an_index(tmp_path, tensors):
    sharded(tmp_path, tensors)
    index = json.loads((tmp_path / f"{SINGLE}.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 4 * 4 + 6 * 2 + 4 + 12 * 8
    first, second, third = (f"{STEM}-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"] == {"a.weight": first, "a.bias": second, "count": second, "n": third}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [first, second, third, f"{SINGLE}.index.json"]
    )


def test_a_sharded_transformer_is_what_diffusers_loads(tiny_folder, tmp_path):
    weights = ModelFolder(tiny_folder).weights("transformer")
    save_weights(tmp_path, ((name, weights.read(name)) for name in weights.names), 3e5)
    shutil.copy(tiny_folder / "transformer" / "config.json", tmp_path)
    stock = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path).state_dict()
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert all(torch.equal(stock[name], weights.read(name)) for name in stock)


def test_saving_holds_one_shard_at_a_time(tmp_path):
    arrays = []
    held = []

    def produce():
        for i in range(6):
            held.append(sum(array() is not None for array in arrays))
            array = np.zeros(10, dtype=np.float32)  # lives as long as the tensor that is made of it
            arrays.append(weakref.ref(array))
            yield f"t{i}", torch.from_numpy(array)
            del array

    save_weights(tmp_path, produce(), 80)
    # two tensors a shard, written and forgotten as soon as a third is known
    assert held == [0, 1, 2, 1, 2, 1]


def test_saving_leaves_older_weights_alone(tmp_path, tensors):
    sharded(tmp_path, tensors)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"already holds diffusion_pytorch_model.*; write to another folder\.$"
    ):
        save_weights(tmp_path, tensors.items())
    assert before == sorted(path.name for path in tmp_path.iterdir())


def test_every_range_of_rows_equals_the_slice_of_the_whole(tmp_path):
    """Rows of complete tensors, of one block of three, of swapped halves, and of tensors stacked from several."""
    stored = {"qkv": draw(6, 2), "swap": draw(4), "q": draw(2, 3), "k": draw(2, 3) + 1}
    save_weights(tmp_path, stored.items())
    recipes = {
        "k": [Rows("qkv", 1, 3)],
        "halves": [Rows("swap", 1, 2), Rows("swap", 0, 2)],
        "stack": [Rows("q", 0, 1), Rows("k", 0, 1)],
    }
    weights = open_folder(tmp_path).renamed(recipes)
    whole = {
        "k": stored["qkv"][2:4],
        "halves": torch.cat([stored["swap"][2:], stored["swap"][:2]]),
        "stack": torch.cat([stored["q"], stored["k"]]),
    }
    assert weights.names == list(whole)
    for name, tensor in whole.items():
        assert weights.shape(name) == tuple(tensor.shape)
        for start in range(len(tensor) + 1):
            for stop in (*range(start, len(tensor) + 1), None):
                rows = tensor[start:stop]
                assert torch.equal(weights.read(name, start, stop), rows)
                place = torch.full_like(rows, torch.nan, dtype=torch.float64)
                weights.copy_to(place, name, start, stop)
                assert torch.equal(place, rows.double())


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    save_weights(tmp_path, [("a", torch.ones(1000)), ("one", torch.tensor(1.0))])
    weights = open_folder(tmp_path)
    rows = weights.read("a", 10, 900)
    scalar = weights.read("one")
    path = tmp_path / SINGLE
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert rows.sum() == 890 and scalar == 1


def test_rows_that_cannot_be_split_are_refused(tmp_path):
    save_weights(tmp_path, [("qkv", torch.zeros(7, 2))])
    with pytest.raises(ValueError, match=r"^qkv in '.*' has 7 rows, not a multiple of 3\.$"):
        open_folder(tmp_path).renamed({"q": [Rows("qkv", 0, 3)]})


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_named(tmp_path, tensors, keep):
    save_weights(tmp_path, tensors.items())
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError,
        match=rf"^.*{SINGLE} is not a complete safetensors file \(.*\); download it again\.$",
    ):
        open_folder(tmp_path)


def test_a_missing_shard_is_named(tmp_path, tensors):
    shard = sharded(tmp_path, tensors) / f"{STEM}-00002-of-00003.safetensors"
    shard.unlink()
    with pytest.raises(
        ValueError,
        match=r"-00002-of-00003\.safetensors is not a complete .* \(not a file\); download",
    ):
        open_folder(tmp_path)
    (tmp_path / f"{SINGLE}.index.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"^'.*' has 2 of 3 shards; download that folder again\.$"
    ):
        open_folder(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path, tensors):
    shard = sharded(tmp_path, tensors) / f"{STEM}-00002-of-00003.safetensors"
    save_file({"a.bias": torch.zeros(1), "extra": torch.zeros(1)}, shard)
    with pytest.raises(
        ValueError, match=r"index.json disagrees with its files about count, extra; download"
    ):
        open_folder(tmp_path)


OUTSIDE = [
    "../other.safetensors",
    "/other.safetensors",
    "sub/other.safetensors",
    "other.bin",
    "*.safetensors",
    "",
    7,
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, tensors, name):
    """As a checkpoint, and as any part of a model folder; the file is there, in each of the places."""
    save_weights(tmp_path / "other", tensors.items())
    shutil.copy(tmp_path / "other" / SINGLE, tmp_path / "other.safetensors")
    folder = tmp_path / "transformer"
    save_weights(folder, tensors.items())
    (folder / "config.json").write_text("{}")
    name = str(tmp_path / name[1:]) if str(name).startswith("/") else name
    index = folder / f"{SINGLE}.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    for read in (open_folder, lambda _: ModelFolder(tmp_path).part("transformer")):
        with pytest.raises(
            ValueError,
            match=r"index\.json names .*, which is not a safetensors file beside it; download",
        ):
            read(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))
    assert sorted(open_folder(folder).names) == sorted(tensors)


def test_one_tensor_in_two_files_is_refused(tmp_path, tensors):
    save_weights(tmp_path, tensors.items())
    save_file({"count": torch.tensor(8.0)}, tmp_path / f"{STEM}.fp16.safetensors")
    with pytest.raises(
        ValueError, match=r"^count is in both .* and .*; keep one of these files\.$"
    ):
        open_folder(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"^'.*' has no \*\.safetensors; download that folder again\.$"
    ):
        open_folder(tmp_path)


def test_what_does_not_fit_is_counted_and_named(tmp_path, tensors):
    save_weights(tmp_path, tensors.items())
    weights = open_folder(tmp_path)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_names(weights, shapes)
    expected = {"a.weight": (4, 6), "a.bias": (6,)} | {f"b{i}": (1,) for i in range(5)}
    with pytest.raises(ValueError) as error:
        check_names(weights, expected)
    assert str(error.value) == (
        f"'{tmp_path}' does not fit this model: of its tensors 5 missing (b0, b1, b2 and others), "
        "2 unexpected (count, n), 1 of another shape (a.weight (6, 4) instead of (4, 6))."
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_gets_its_weights_in_the_precision_asked_for(tmp_path, device):
    source = nn.Linear(3, 2)
    save_weights(tmp_path, source.state_dict().items())
    with torch.device(device):
        model = nn.Linear(3, 2, dtype=torch.float64)
    before = model.weight
    load_model(model, open_folder(tmp_path), "cpu", torch.float64)
    assert torch.equal(model.weight, source.weight.double())
    assert torch.equal(model.bias, source.bias.double())
    assert model.weight.requires_grad and (model.weight is before) == (device == "cpu")


def test_long_copies_show_their_progress_and_a_tensor_with_two_names_is_read_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sage_grpo.models.weights.LONG", 24)
    save_weights(tmp_path, [("0.weight", draw(2, 3))])
    weights = open_folder(tmp_path)
    weights.pieces["1.weight"] = weights.pieces["0.weight"]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False))
    load_model(model, weights, "cpu", torch.float32)
    first, second = model.parameters()
    assert torch.equal(first, weights.read("0.weight"))
    assert first.data_ptr() == second.data_ptr()
    assert "24.0/24.0" in capsys.readouterr().err

    fill_model(nn.Linear(3, 1, bias=False), Weights(tmp_path, {"weight": [draw(1, 3)]}))
    assert not capsys.readouterr().err  # short


def test_a_transformer_with_an_extra_tensor_is_refused_before_anything_is_loaded(
    tiny_folder, tmp_path
):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    path = folder / "transformer" / SINGLE
    save_file(load_file(path) | {"guidance_in.weight": torch.zeros(1)}, path)
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel.from_config(
            json.loads((path.parent / "config.json").read_text())
        )
    with pytest.raises(ValueError, match=r"of its tensors 1 unexpected \(guidance_in\.weight\)\.$"):
        load_model(model, ModelFolder(folder).weights("transformer"), "cpu", torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())


def fill(ranks, folder):
    """Numbers that this rank read from the files, those of the whole model, and the full tensors."""
    backbone = Hunyuan15(folder)
    plain = Weights.copy_to
    counts = []

    def counted(self, target, *rows):
        counts.append(target.numel())
        plain(self, target, *rows)

    Weights.copy_to = counted  # this process has no other work
    model = backbone.empty_transformer()
    shard(model, model.transformer_blocks, ranks.shard_mesh, torch.float32)
    backbone.fill_transformer(model)
    weights = {name: full_tensor(p).detach() for name, p in model.named_parameters()}
    return sum(counts), sum(value.numel() for value in weights.values()), weights


def test_a_rank_of_a_sharded_model_reads_its_own_rows_and_no_more(tiny_folder):
    plain = Hunyuan15(tiny_folder).transformer.state_dict()
    for read, total, weights in run_ranks(2, fill, tiny_folder, sharded=True):
        assert 0.45 * total < read < 0.55 * total
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in plain)
