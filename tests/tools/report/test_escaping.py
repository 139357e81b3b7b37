"""Nothing in a run folder becomes markup in its page."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files.foreign import Refused
from sage_grpo.runs.history import RunError, read_run
from sage_grpo.tools.report.page import page, write_report
from sage_grpo.tools.report.settings import has_meaning
from tests.tools.fake_run import make_run, read_lines, run_line, train_line, write_lines

HOSTILE = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


def test_text_from_files_is_escaped(drawn, tmp_path):
    run = make_run(tmp_path / "<img src=x> & co", iterations=2, every=2, prompts=2)
    bad = '<script>alert("x")</script> & co'
    good = "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; co"
    (run / "command.txt").write_text(bad)
    (run / "config.yaml").write_text(f"prompt: {bad}")
    lines = [{k.replace("VQ", bad): v for k, v in line.items()} for line in read_lines(run)]
    about = {"device": bad, "world": bad, "time": bad, "versions": {"python": bad, bad: "1"}}
    failed = {"reward/error": bad}
    extra = {"run": about, "train": failed, "validation": {f"holdout/{bad}": 0.5}}
    write_lines(run, [line | extra[line["kind"]] for line in lines])
    for path in run.glob("validation/*/clips.json"):
        clips = [clip | {"prompt": bad} for clip in json.loads(path.read_text())]
        path.write_text(
            json.dumps(
                [clip | {"gold": {bad: 2.0}, "scores": {bad: 1.0, "total": 0.5}} for clip in clips]
            )
        )
    text = page(read_run(run))
    assert "<script" not in text and 'alert("' not in text and "<img" not in text
    places = (
        '<pre class="command">',
        "defaults</summary><pre><span>prompt: ",
        "configuration</summary><pre>prompt: ",
        "<p>",
        " · world ",
        " · python ",
        " · started ",
        "The first error of a reward: ",
        "<figure>\n<h3>",
        'aria-label="',
        '<figure class=""><h3>',
        '<figure class=""><h3>holdout/',
        "<tr><td>",
        "<tr><td>gold ",
    )
    assert [place for place in places if f"{place}{good}" not in text] == []
    assert f" · {good} 1 · " in text and f"{good}&nbsp;2.000" in text
    assert all(f"<{tag}>&lt;img src=x&gt; &amp; co</{tag}>" in text for tag in ("title", "h1"))


def poisoned(value):
    """Every run of a JSON value in which one key, the last part of one key, or one leaf is HOSTILE."""
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {k: v for k, v in value.items() if k != key}
            yield rest | {HOSTILE: inner}
            yield rest | {f"{key.rpartition('/')[0]}/{HOSTILE}": inner}
            yield from (rest | {key: bad} for bad in poisoned(inner))
    elif isinstance(value, list):
        yield from ([bad, *value[1:]] for bad in poisoned(value[0]))
    else:
        yield HOSTILE


def hostile_page(folder: Path) -> str:
    """The page of a run; empty where the run is refused in one sentence, because a number is none."""
    try:
        return page(read_run(folder))
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return ""


def test_no_field_of_a_metrics_line_is_markup(tmp_path):
    """One metric to a line, so that hardly anything has to be drawn."""
    train = train_line(1, np.random.default_rng(0))
    metrics = train | {"per_step": {"grad_v": [1.0]}, "reward/error": "none", "holdout/x": 0.5}
    head = {"kind": "run", "step": 0}
    first = {"kind": "train", "step": 1}
    second = {"kind": "validation", "step": 1}
    cases = [({key: value} | head, [first]) for key, value in run_line().items()]
    cases += [
        (head | {key: {"VQ": 0.9}}, [first | {"reward/VQ": 0.5}])
        for key in ("perfect", "vae_floor")
    ]
    cases += [
        ({key: value} | line, []) for line in (first, second) for key, value in metrics.items()
    ]
    texts = []
    for line, others in cases:
        for bad in poisoned(line):
            write_lines(tmp_path, [bad, *others])
            texts.append(hostile_page(tmp_path))
            assert "<script" not in texts[-1], bad
    assert sum(ESCAPED in text for text in texts) > 20


@pytest.mark.parametrize("step", [HOSTILE, [1], {}, 1.5, None, 2**60, "1"], ids=str)
@pytest.mark.parametrize("kind", ["run", "train", "validation"])
def test_a_step_is_a_number(tmp_path, kind, step):
    write_lines(tmp_path, [{"kind": kind, "step": step}, {"kind": "train", "step": 1}])
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1 is damaged"):
        read_run(tmp_path)


VALUES = {
    "text": "x",
    "list": [[1]],
    "object": {"a": {}},
    "huge": 10**400,
    "half a letter": "\ud800",
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_of_another_kind_gives_a_page_or_one_sentence(tmp_path, value):
    """Each field of each kind of line in turn."""
    lines = [run_line(), train_line(1, np.random.default_rng(0))]
    lines += [
        {
            "kind": "validation",
            "step": 1,
            "reward/total": 1.0,
            "reward/total_stderr": 0.1,
            "reward/error": "x",
        }
    ]
    shown = [
        bool(hostile_page(tmp_path))
        for line in lines
        for key in line
        if not write_lines(
            tmp_path, [{"kind": line["kind"], "step": 1, key: value}, {"kind": "train", "step": 2}]
        )
    ]
    assert len(shown) > 40 and any(shown) and not all(shown)


def test_a_page_follows_no_links(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a password")
    run = make_run(tmp_path / "run", iterations=1, every=1, prompts=2)
    clip = next(run.glob("validation/step-000000/*.mp4"))
    inner = tmp_path / "elsewhere"
    places = [clip, clip.with_name("clips.json"), clip.parent, clip.parents[1]]
    for path in (
        *places,
        *(
            run / name
            for name in (
                "command.txt",
                "config.yaml",
                "metrics.jsonl",
                "status.json",
            )
        ),
    ):
        kept = path.rename(inner) if path.exists() else secret
        path.symlink_to(kept)
        with pytest.raises(Refused, match=rf"{path} is a link, which is not followed"):
            write_report(run)
        path.unlink()
        if kept == inner:
            inner.rename(path)
    page = run / "report.html"
    page.symlink_to(secret)  # is replaced
    assert write_report(run) == page and not page.is_symlink()
    assert secret.read_text() == "a password"


def test_no_field_of_a_clip_or_the_configuration_is_markup(tmp_path):
    write_lines(tmp_path, [{"kind": "validation", "step": step} for step in (0, 1)])
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(dict.fromkeys(asdict(Config()), HOSTILE) | {HOSTILE: 1})
    )
    clip = {
        "file": "a.mp4",
        "prompt": "a",
        "seed": 1,
        "number": 0,
        "scores": {"total": 0.5, "VQ": 1.0},
    }
    clip |= {"gold": {"match": 1}, "holdout": {"x": 0.5}}
    shown = 0
    for bad in poisoned(clip):
        for step in (0, 1):
            folder = tmp_path / f"validation/step-{step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "a.mp4").write_bytes(b"clip")
            (folder / "clips.json").write_text(json.dumps([bad]))
        text = hostile_page(tmp_path)
        assert "<script" not in text, bad
        shown += f"<h3>{ESCAPED}" in text or f"{ESCAPED}&nbsp;" in text
        # in the whole configuration, and in the list of settings that mean something
        settings = asdict(Config())
        listed = [name for name in settings if has_meaning(name, {})]
        assert not text or text.count(ESCAPED) > len(settings) + len(listed)
    assert shown > 5
