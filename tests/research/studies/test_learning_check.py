"""The control of the learning check: shuffled rewards are the same numbers on other clips, in training only."""

import json

import pytest
import torch

from research.studies import learning_check as check
from sage_grpo.config.parse import parse
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from tests.smallest_run import command_line

COLOURS = ("red", "green", "red", "green", "red", "green", "red", "green")


@pytest.fixture
def words(flags):
    return command_line(flags | {"max_steps": 1})


def test_totals_are_dealt_out_anew_and_nothing_else_is(words):
    trainer = build_trainer(parse(words), Ranks(0, 1, torch.device("cpu")))
    true, shuffled = trainer.reward, check.shuffled(trainer.reward, trainer)
    generator = torch.Generator().manual_seed(0)
    clips = list(torch.randint(0, 256, (8, 5, 32, 32, 3), generator=generator, dtype=torch.uint8))
    arguments = (clips, [f"a {colour} circle moving left" for colour in COLOURS], 8.0)
    expected, dealt = true.score(*arguments), shuffled.score(*arguments)
    assert shuffled.names == true.names and shuffled.weights == true.weights
    assert len(set(expected.total.tolist())) == 8  # or a permutation would not show
    assert sorted(dealt.total.tolist()) == sorted(expected.total.tolist())
    assert not torch.equal(dealt.total, expected.total)
    assert dealt.named.keys() == expected.named.keys()
    assert all(torch.equal(dealt.named[name], expected.named[name]) for name in expected.named)
    assert torch.equal(shuffled.score(*arguments).total, dealt.total)
    trainer.state.step = 1  # a fixed permutation could be learned
    assert not torch.equal(shuffled.score(*arguments).total, dealt.total)


@pytest.mark.slow
def test_a_shuffled_run_is_validated_by_the_true_reward(words, tmp_path, monkeypatch):
    """Slow: trains the embedded model."""
    seen, scores, train = {}, {}, check.Trainer.train

    def watched(trainer):
        seen["training"], seen["validation"] = trainer.reward, trainer.validation.reward
        train(trainer)

    monkeypatch.setattr(check.Trainer, "train", watched)
    for kind in ("true", "shuffled"):
        folder = tmp_path / kind
        check.train(kind, 3, folder, words)
        assert (folder / "done").is_file()
        assert (seen["training"] is seen["validation"]) == (kind == "true")
        clips = json.loads((folder / "validation" / "step-000000" / "clips.json").read_text())
        scores[kind] = [clip["scores"] for clip in clips]
    assert scores["true"] == scores["shuffled"]
