"""Samplers compared on the embedded model: the same noise for all rows, and forwards as they are run."""

from research.benchmarks.cheap_samplers import TABLES, Way, main
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.worlds.shapes.world import ShapesWorld

SHIFT = 3.0


def brightness(world, clips, requests):
    return {"match": clips.double().mean((1, 2, 3, 4)) / 255}


def test_rows_share_noise_and_tell_the_forwards_that_are_run(monkeypatch, capsys):
    plain = Hunyuan15.branch
    clips = []

    def counted(self, x, sigma, cond):
        clips.append(len(x))
        return plain(self, x, sigma, cond)

    monkeypatch.setattr(Hunyuan15, "branch", counted)
    # the oracle, tested elsewhere, would take most of the time
    monkeypatch.setattr(ShapesWorld, "gold", brightness)
    ways = (Way("euler", 2), Way("euler", 2), Way("dpm", 2, 2.0, (0.9, 1.0)))
    main(["--prompts", "3"], {"a title": ways})
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("| a title | forwards per clip |")
    assert rows[1].endswith("| +0.000 ± 0.000 |")
    told = [int(row.split("|")[2]) for row in rows]
    assert told == [2, 2, 3] and sum(clips) == 3 * sum(told)


def test_forwards_of_the_ways_that_are_compared():
    told = {title: [way.forwards(SHIFT) for way in ways] for title, ways in TABLES.items()}
    assert told["without guidance"] == [way.steps for way in TABLES["without guidance"]]
    assert told["guidance 2"] == [20, 10, 10, 8, 7, 7]
    assert len({way for ways in TABLES.values() for way in ways}) == sum(map(len, TABLES.values()))
