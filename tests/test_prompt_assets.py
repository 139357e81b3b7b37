"""The prompts for real-world models: enough, of many lengths, some with on-screen text, no duplicates.

Each short one has a long version: the kind of caption that HunyuanVideo-1.5 was trained with.
"""

import re
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from sage_grpo.data.requests import read_requests
from sage_grpo.models.hunyuan15.text import MAX_TEXT_TOKENS
from sage_grpo.train.inputs import BUNDLED_PROMPTS
from scripts.render_images import SCENES
from scripts.render_images import main as render_images

TRAIN, VALID = (read_requests(BUNDLED_PROMPTS / f"{kind}.csv") for kind in ("train", "valid"))
LONG_TRAIN, LONG_VALID = (
    read_requests(BUNDLED_PROMPTS / f"{kind}_long.csv") for kind in ("train", "valid")
)
SHARED = 6  # words in a row that two long prompts may not have in common
COMMON = "with from into that over unde afte befo then when whil wher each ever anot same unti thro towa agai betw alon"


def words(text):
    return re.findall(r"[\w'-]+", text.lower())


@pytest.mark.parametrize(
    "prompts, least, most", [(TRAIN, 380, 430), (VALID, 64, 64)], ids=["train", "valid"]
)
def test_counts_lengths_and_quotes(prompts, least, most):
    assert least <= len(prompts) <= most
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    lengths = sorted(len(words(prompt.text)) for prompt in prompts)
    assert lengths[0] <= 10 and 15 <= lengths[len(lengths) // 2] <= 25 and lengths[-1] > 60
    assert all(8 <= length <= 80 for length in lengths)
    quoting = sum(bool(re.search('".+?"', prompt.text)) for prompt in prompts)
    assert 0.08 <= quoting / len(prompts) <= 0.1


def test_quotes_and_spaces_are_clean():
    for prompt in TRAIN + VALID + LONG_TRAIN + LONG_VALID:
        assert prompt.text.count('"') % 2 == 0 and not set(prompt.text) & set("“”„«»\t\n"), prompt
        assert prompt.text == " ".join(prompt.text.split()) and prompt.text.endswith("."), prompt


@pytest.mark.parametrize("prompts", [TRAIN + VALID, LONG_TRAIN + LONG_VALID], ids=["short", "long"])
def test_every_prompt_is_its_own(prompts):
    """Over both files, so nothing that validates is trained on in other words: at most 4 of 10 words are shared."""
    sets = [(prompt.text, set(words(prompt.text))) for prompt in prompts]
    alike = [
        (a, b)
        for (a, left), (b, right) in combinations(sets, 2)
        if len(left & right) > 0.4 * len(left | right)
    ]
    assert not alike


def test_only_held_out_prompts_have_seeds_and_each_another():
    assert {prompt.seed for prompt in TRAIN} == {None}
    seeds = [prompt.seed for prompt in VALID]
    assert None not in seeds and len(set(seeds)) == len(VALID)


@pytest.mark.parametrize(
    "short, long", [(TRAIN, LONG_TRAIN), (VALID, LONG_VALID)], ids=["train", "valid"]
)
def test_long_prompts_say_what_the_short_ones_say(short, long):
    """Index, seed and on-screen text agree, and at least half of the short prompt's nouns and verbs appear."""
    assert [(p.index, p.seed) for p in long] == [(p.index, p.seed) for p in short]
    for brief, full in zip(short, long, strict=True):
        assert re.findall('"(.+?)"', full.text) == re.findall('"(.+?)"', brief.text), full
        stems, found = (
            {word[:4] for word in words(p.text) if len(word) > 3} - set(COMMON.split())
            for p in (brief, full)
        )
        assert len(stems & found) >= 0.5 * len(stems), (brief.text, sorted(stems - found))


def test_long_prompts_are_captions_of_one_length_that_fit_the_text_encoder():
    for prompt in LONG_TRAIN + LONG_VALID:
        assert (
            60 <= len(words(prompt.text)) <= 120 and len(re.split(r"(?<=[.!?]) ", prompt.text)) >= 3
        ), prompt
        assert len(prompt.text.encode()) <= MAX_TEXT_TOKENS, prompt  # a token has at least one byte


def test_no_phrase_is_repeated_in_long_prompts():
    seen = {}
    for prompt in LONG_TRAIN + LONG_VALID:
        found = words(prompt.text)
        for phrase in {tuple(found[i : i + SHARED]) for i in range(len(found) - SHARED + 1)}:
            assert phrase not in seen, (seen[phrase], prompt.text)
            seen[phrase] = prompt.text


def test_image_prompts_and_their_images():
    """Six small pictures of several shapes."""
    requests = read_requests(BUNDLED_PROMPTS / "images.csv")
    shapes = [request.image.shape for request in requests]
    assert {height < width for height, width in shapes} == {True, False} and len(set(shapes)) == 3
    assert (
        len({request.image for request in requests})
        == len({request.text for request in requests})
        == len(SCENES)
    )


def test_image_prompts_are_as_scripts_render_images_writes_them(tmp_path):
    render_images([str(tmp_path)])
    files = sorted((BUNDLED_PROMPTS / "images").iterdir())
    assert [path.name for path in files] == sorted(
        path.name for path in (tmp_path / "images").iterdir()
    )
    assert sum(path.stat().st_size for path in files) < 200_000
    for path in files:
        drawn, stored = (
            np.array(Image.open(picture).convert("RGB"))
            for picture in (tmp_path / "images" / path.name, path)
        )
        assert np.array_equal(drawn, stored), path.name
    for name in ("images_train.csv", "images_valid.csv"):
        assert (tmp_path / name).read_text() == (BUNDLED_PROMPTS / name).read_text()


def test_no_image_is_both_trained_on_and_validated_with():
    trained, validated = (
        read_requests(BUNDLED_PROMPTS / f"images_{kind}.csv") for kind in ("train", "valid")
    )
    images = {Image.open(request.image.path).convert("RGB").tobytes() for request in trained}
    held_out = {Image.open(request.image.path).convert("RGB").tobytes() for request in validated}
    assert len(images) == len(trained) == 32 and not images & held_out
    assert not {request.text for request in trained} & {request.text for request in validated}
    assert len(held_out) == 16 and len({(r.image.path, r.seed) for r in validated}) == 64
