"""The committed tiny model: it loads anywhere, its quality matches its card, and generate.py runs on it."""

import json
import math
import shlex
import socket
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

import generate
from research.tiny import card as model_card
from research.tiny import pretrain
from research.tiny.quality import random_prompts
from sage_grpo.data.requests import read_requests
from sage_grpo.models.registry import open_backbone
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, object_mask, parse, sample_scenes
from sage_grpo.worlds.shapes.world import round_trip

ROOT = Path(__file__).parents[1]
TINY = ROOT / "assets" / "tiny"
SUBSET = 10  # prompts of the card's table that are sampled again


@pytest.fixture(scope="module")
def backbone():
    return open_backbone(TINY)


@pytest.fixture(scope="module")
def card():
    return json.loads((TINY / "quality.json").read_text())


def test_the_stock_pipeline_loads_it_without_a_network(monkeypatch, backbone):
    monkeypatch.setattr(
        socket.socket, "connect", lambda *_: pytest.fail("something asked for the network")
    )
    pipe = HunyuanVideo15Pipeline.from_pretrained(TINY)
    assert pipe.transformer.config.task_type == "t2v" and pipe.transformer.dtype == torch.float32
    assert (
        pipe.guider.guidance_scale == backbone.sampling.guidance
        and pipe.scheduler.shift == backbone.sampling.shift
    )
    ours = backbone.transformer.state_dict()
    assert all(
        torch.equal(value, ours[name]) for name, value in pipe.transformer.state_dict().items()
    )


def test_it_is_small():
    assert (
        sum(path.stat().st_size for path in (ROOT / "assets").rglob("*") if path.is_file()) < 25e6
    )


def test_encode_then_decode_is_near_identity(backbone):
    """A blur of 0.75 pixels costs about 0.02 (docs/world.md): the round trip is no worse, and no attribute is lost."""
    clips, decoded, sentences = round_trip(backbone, 8)
    gap = (decoded.float() - clips.float()).square().mean(-1) / 255**2
    scenes = sample_scenes(8, torch.Generator().manual_seed(0))  # those of round_trip
    inside = object_mask(scenes, *clips.shape[1:4])
    assert gap.mean().sqrt() < 0.022 and gap.mean((1, 2, 3)).max().sqrt() < 0.05
    assert (
        (gap * inside).sum() / inside.sum()
    ).sqrt() < 0.06  # objects are a tenth of a frame: their colour too
    assert read(decoded, sentences).match.all()


def test_the_card_shows_what_was_measured(card):
    assert model_card.table(card) in (TINY / "README.md").read_text()


def test_quality_leaves_room_and_no_attribute_is_at_chance(card):
    """It draws well and chooses badly: half of the colours, which its captions misnamed, are wrong."""
    row = card["guidance 1"]
    assert 0.30 <= row["match"] <= 0.50 and 0.45 <= row["colour"] <= 0.60
    assert all(row[name] > 0.75 for name in ATTRIBUTES if name != "colour")


@pytest.mark.slow
def test_the_cards_table_can_be_measured_again(backbone, card):
    """Adds to the attributes of one clip, below, the shares in the card's table: of its first prompts.

    Two standard errors and one clip of tolerance, because other machines round otherwise.
    """
    stored = card[f"guidance {backbone.sampling.guidance:g}"]
    prompts = random_prompts(stored["clips"], seed=1)[:SUBSET]
    row, _ = model_card.measure(backbone, prompts, backbone.sampling.guidance)
    for name in ("match", *ATTRIBUTES):
        share = stored[name]
        assert abs(row[name] - share) * SUBSET <= 2 * math.sqrt(SUBSET * share * (1 - share)) + 1, (
            name
        )
    assert row["distance"] == pytest.approx(stored["distance"], rel=0.25)


def test_the_command_of_the_record_still_means_the_same():
    """Changed defaults of the script would make another model than the one that is here."""
    record = json.loads((TINY / "training.json").read_text())
    args = pretrain.arguments().parse_args(shlex.split(record["command"])[3:])
    assert {name: str(getattr(args, name)) for name in record["flags"]} == record["flags"]


def test_its_prompts_are_complete_and_kept_apart():
    train, valid = (
        [prompt.text for prompt in read_requests(TINY / f"prompts_{n}.txt")]
        for n in ("train", "valid")
    )
    assert (len(set(train)), len(set(valid))) == (512, 64) and not set(train) & set(valid)
    assert all(set(parse(prompt)) == set(ATTRIBUTES) for prompt in (*train, *valid))


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # imageio's reader leaves its pipes open
def test_generate_works_out_of_the_box(tmp_path, monkeypatch):
    """The default model; what plays in the file shows the shape and the direction of the prompt."""
    monkeypatch.chdir(ROOT)
    prompt = "a large red triangle moving left fast on a white background"
    generate.main(["--prompt", prompt, "--output_path", str(tmp_path)])
    (path,) = tmp_path.glob("*.mp4")
    with imageio.get_reader(path) as reader:
        frames = np.stack(list(reader.iter_data()))
        assert reader.get_meta_data()["fps"] == 8
    assert frames.shape == (9, 288, 288, 3)
    reading = read(torch.from_numpy(frames[None, :, 3::6, 3::6]), [prompt])  # back to 48 pixels
    for name in ("shape", "direction", "background"):  # colours are what it often gets wrong
        assert reading.attributes[name].item() == parse(prompt)[name]
