"""The embedded model learns to begin with an image and draws the same without one; what is shipped is what it wrote."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from PIL import Image
from safetensors.torch import load_file

from research.tiny import learn_images
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.models.registry import open_backbone
from sage_grpo.worlds.shapes.world import ShapesWorld

TINY = Path("assets/tiny")
FEW = "--clips 16 --prompts 4 --steps 6 --batch 4"


SEEDS = {"before": None, "first": 0, "same": 0, "other": 1}


class Folders:
    """The embedded model before, and after a few steps with a seed, each made on first use: `folders / "first"`."""

    def __init__(self, root):
        self.root = root

    def __truediv__(self, name):
        folder = self.root / name
        if not folder.exists():
            shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("image_encoder"))
            with pytest.MonkeyPatch.context() as patch:
                if SEEDS[name] is not None:
                    learn(folder, SEEDS[name], patch)
        return folder


def learn(folder, seed, patch):
    patch.setattr(learn_images, "ENCODED", 8)
    patch.setattr(learn_images, "REQUESTS", {"train": 2, "valid": 1})
    patch.setattr(learn_images, "quality", lambda folder: {})  # takes longer than all else
    flags = ["--model", str(folder), "--seed", str(seed), *FEW.split()]
    patch.setattr(sys, "argv", ["learn_images.py", *flags])
    learn_images.main()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("images"))


def test_what_has_learned_is_not_taught_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learn_images.py", "--model", str(TINY)])
    with pytest.raises(SystemExit, match="assets/tiny animates images already"):
        learn_images.main()


def weights(folder):
    return load_file(folder / learn_images.WEIGHTS)


@pytest.mark.slow
def test_everything_follows_from_the_seed(folders):
    """Slow: three runs of the whole program; one is looked at by all other tests."""
    first, same, other = (weights(folders / name) for name in ("first", "same", "other"))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.slow
def test_only_what_text_to_video_never_reads_has_changed(folders):
    """Slow: a run of the whole program."""
    before, after = weights(folders / "before"), weights(folders / "first")
    assert list(before) == list(after)
    rows = learn_images.image_rows(open_backbone(folders / "first").empty_transformer())
    for name, part in rows.items():
        assert not torch.equal(before[name][part], after[name][part]), name
        after[name][part] = before[name][part]
    for name, values in before.items():
        assert values.dtype == after[name].dtype
        assert torch.equal(values.view(torch.uint8), after[name].view(torch.uint8)), (
            name
        )  # eight bits are not compared


@pytest.mark.slow
def test_a_clip_without_an_image_is_the_same_to_the_bit(folders):
    """Slow: a run of the whole program."""
    asked, x = Request("a small red circle moving left slowly"), torch.randn(1, 32, 3, 6, 6)
    velocities = []
    for name in ("before", "first"):
        backbone = open_backbone(folders / name)
        with torch.no_grad():
            velocities.append(backbone.branch(x, 0.7, *backbone.encode([asked])))
    assert torch.equal(*velocities)


@pytest.mark.slow
def test_it_learns(folders):
    """A few steps lower the loss of a fixed batch. Slow: real learning steps."""
    args = learn_images.arguments().parse_args(
        ["--model", ".", "--clips", "8", "--prompts", "1", "--steps", "15"]
    )
    backbone = open_backbone(folders / "first")
    backbone.load_weights(None)
    vision = learn_images.vision_model(0, 16, 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn_images, "ENCODED", 8)
        (bucket,) = buckets = learn_images.build_buckets(backbone, vision, args)
    args.batch = 8

    def loss():
        with torch.no_grad():
            return learn_images.loss(
                backbone.transformer, bucket, 3.0, torch.Generator().manual_seed(7)
            ).item()

    before = loss()
    learn_images.train(backbone, buckets, args)
    assert loss() < 0.95 * before


def test_what_is_shipped_is_what_the_program_writes(tmp_path):
    """Images, requests, and what the card says."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for kind, count in learn_images.REQUESTS.items():
        shutil.copy(TINY / f"prompts_{kind}.txt", folder)
        learn_images.write_requests(folder, kind, count, 48)
        assert (folder / f"images_{kind}.csv").read_text() == (
            TINY / f"images_{kind}.csv"
        ).read_text()
        for request in read_requests(TINY / f"images_{kind}.csv"):
            drawn = Image.open(folder / "images" / request.image.path.name)
            assert np.array_equal(np.array(drawn), np.array(Image.open(request.image.path)))
    record = json.loads((TINY / "images.json").read_text())
    defaults = vars(learn_images.arguments().parse_args(["--model", "."]))
    assert record["flags"] == {name: value for name, value in defaults.items() if name != "model"}
    assert (
        f"| with image | {record['quality']['with image']['clips']} |"
        in (TINY / "README.md").read_text()
    )


@pytest.mark.slow
def test_the_shipped_model_begins_with_its_image():
    """A few clips of few steps are nearer to their images than clips of the same noise that never saw them.

    Slow: sampling with the shipped weights; that they are what the program writes is tested without.
    """
    requests = [one.sized(48, 48) for one in read_requests(TINY / "images_valid.csv")[:6]]
    found = {}
    for version in ("i2v", None):
        backbone = open_backbone(TINY, version=version)
        asked = [one if backbone.sees_image else Request(one.text) for one in requests]
        with torch.no_grad():
            clips = torch.cat(
                [learn_images.sampled(backbone, one, 3, number) for number, one in enumerate(asked)]
            )
        found[version] = ShapesWorld().gold(clips, requests)["image_distance"]
    assert found["i2v"].mean() < 0.75 * found[None].mean(), found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_both_stock_pipelines_read_the_folder():
    both = (HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline)
    text, image = (kind.from_pretrained(TINY).components for kind in both)
    assert set(image) - set(text) == {"image_encoder", "feature_extractor"}
