"""The prompts for real-world models: enough, of many lengths, some with on-screen text, no duplicates."""

import re
from itertools import combinations

import pytest

from sage_grpo.data.requests import read_requests
from sage_grpo.train.build import PROMPTS

TRAIN, VALID = (read_requests(PROMPTS / f"{kind}.csv") for kind in ("train", "valid"))


def words(text):
    return re.findall(r"[\w'-]+", text.lower())


@pytest.mark.parametrize("prompts, least, most", [(TRAIN, 380, 430), (VALID, 64, 64)], ids=["train", "valid"])
def test_counts_lengths_and_quotes(prompts, least, most):
    assert least <= len(prompts) <= most
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    lengths = sorted(len(words(prompt.text)) for prompt in prompts)
    assert lengths[0] <= 10 and 15 <= lengths[len(lengths) // 2] <= 25 and lengths[-1] > 60
    assert all(8 <= length <= 80 for length in lengths)
    quoting = sum(bool(re.search('".+?"', prompt.text)) for prompt in prompts)
    assert 0.08 <= quoting / len(prompts) <= 0.1


def test_quotes_and_spaces_are_clean():
    for prompt in TRAIN + VALID:
        assert prompt.text.count('"') % 2 == 0 and not set(prompt.text) & set("“”„«»\t\n"), prompt
        assert prompt.text == " ".join(prompt.text.split()) and prompt.text.endswith("."), prompt


def test_every_prompt_is_its_own():
    """Over both files, so nothing that validates is trained on in other words: at most 4 of 10 words are shared."""
    sets = [(prompt.text, set(words(prompt.text))) for prompt in TRAIN + VALID]
    alike = [(a, b) for (a, left), (b, right) in combinations(sets, 2) if len(left & right) > 0.4 * len(left | right)]
    assert not alike


def test_only_held_out_prompts_have_seeds_and_each_another():
    assert {prompt.seed for prompt in TRAIN} == {None}
    seeds = [prompt.seed for prompt in VALID]
    assert None not in seeds and len(set(seeds)) == len(VALID)
