"""The page of a complete run, of incomplete runs, and of folders that are not runs."""

import base64
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from sage_grpo.config.fields import Config
from sage_grpo.runs.diagnosis import RULES
from sage_grpo.runs.history import RunHistory, read_run
from sage_grpo.tools.figure_style import BLUE, GREY
from sage_grpo.tools.paired import clip_rows, number
from sage_grpo.tools.report import page as page_module
from sage_grpo.tools.report.__main__ import main
from sage_grpo.tools.report.figures import TOTAL_REWARD, curve_panel, gradient_map, phase_seconds
from sage_grpo.tools.report.page import (
    before_after,
    changed_settings,
    page,
    print_summary,
    write_report,
)
from tests.programs import exit_code
from tests.smallest_run import slow
from tests.tools.fake_run import make_run, read_lines, run_line, train_line, write_lines

ROOT = Path(__file__).parents[3]
HEADINGS = [
    "Before and after",
    "Reward",
    "Gold",
    "Clips",
    "Trust region and updates",
    "By denoising step",
    "Schedule",
    "Time",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Read-only: `copy` before changing it."""
    return make_run(tmp_path_factory.mktemp("runs") / "demo", iterations=12, every=12)


@pytest.fixture(scope="module")
def text(whole):
    return page(read_run(whole))


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "demo"))


@pytest.mark.parametrize("series", [slow(["train"]), slow(["validation"]), ["train", "validation"]])
def test_no_curve_crosses_a_break(drawn, whole, tmp_path, monkeypatch, series):
    """It is drawn as a vertical line, what precedes it in gray, and captions speak of what follows."""
    lines = [*read_lines(whole), *read_lines(whole)[-2:]]
    place = next(i for i, line in enumerate(lines) if line["step"] == 6) + 1
    changed = {"reward weights": ["1 VQ", "2 VQ"]}
    lines[place:place] = [
        run_line(6),
        {"kind": "break", "step": 6, "series": series, "changed": changed},
        read_lines(whole)[1] | {"step": 6},
    ]
    write_lines(tmp_path, lines)
    axes = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: axes.extend(figure.axes))
    monkeypatch.setattr("sage_grpo.tools.report.drawing.inline_svg", lambda svg, title: svg)
    panel = curve_panel(read_run(tmp_path), TOTAL_REWARD)
    assert "Dotted lines" in panel.caption

    curves = [line for line in axes[0].get_lines() if len(line.get_xdata()) > 2]
    dotted = [line for line in axes[0].get_lines() if list(line.get_xdata()) == [6, 6]]
    assert len(dotted) == 1
    by_color = {line.get_color(): list(line.get_xdata()) for line in curves}
    if "train" in series:
        assert by_color[BLUE] == list(range(7, 13))
        assert by_color[GREY] == list(range(1, 7))
    else:
        assert by_color[BLUE] == list(range(1, 13))
    validated = [line["step"] for line in read_run(tmp_path).validations]
    assert validated == ([6, 12] if "validation" in series else [0, 6, 12])


def tile(value: str, name: str) -> str:
    return f"<b>{value}</b><span>{name}</span>"


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def table_row(text: str, name: str) -> str:
    """The cells of one metric before and after, without their titles for narrow windows."""
    row = re.search(rf"<tr><td>{re.escape(name)}</td>(.*?)</tr>", text, re.DOTALL).group(1)
    return re.sub(' data-title="[^"]*"', "", row)


def without(folder: Path, *prefixes: str) -> str:
    """The page of a run whose lines lack the keys that start so."""
    lines = [
        {k: v for k, v in line.items() if not k.startswith(prefixes)} for line in read_lines(folder)
    ]
    write_lines(folder, lines)
    return page(read_run(folder))


def test_all_sections_are_there(text):
    assert headings(text) == HEADINGS
    titles = re.findall(r"<h3>(.*?)</h3><svg", text)
    assert titles[:5] == ["Total reward", "Exploration", "VQ", "MQ", "TA"] and len(titles) == 22
    assert {rule.panel for rule in RULES.values() if rule.panel} <= set(titles)


def test_the_page_needs_no_other_file(text):
    assert "://" not in text and "<script" not in text and "<link" not in text
    assert set(re.findall(r'(?:src|href)="(data:\w+/\w+|#)', text)) == {
        "data:image/png",
        "data:video/mp4",
        "#",
    }
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_clips_are_embedded_in_pairs(whole, text):
    embedded = [
        base64.b64decode(data) for data in re.findall(r"data:video/mp4;base64,([^\"]+)", text)
    ]
    assert len(embedded) == 24  # 12 of 14 prompts, before and after
    for step, videos in ((0, embedded[0::2]), (12, embedded[1::2])):
        files = {
            path.read_bytes() for path in (whole / f"validation/step-{step:06d}").glob("*.mp4")
        }
        assert len(set(videos)) == 12 and set(videos) <= files
    assert text.count("<video autoplay loop muted playsinline") == 24


def test_clips_without_a_video_are_counted_and_not_shown(copy):
    kept = sorted((copy / "validation/step-000000").glob("*.mp4"))[:2]
    for file in copy.glob("validation/step-*/*.mp4"):
        if file.name not in [path.name for path in kept]:
            file.unlink()
    shown = clip_rows(before_after(read_run(copy)), total=True)
    assert {clip.path.name for row in shown for _, clip, _ in row} == {path.name for path in kept}
    for path in copy.glob("validation/*/*.mp4"):
        path.unlink()
    text = page(read_run(copy))
    assert "iteration 12, 14 clips" in text and "<video" not in text


def test_numbers_of_the_table(whole, text):
    clips = [
        json.loads((whole / f"validation/step-{step:06d}/clips.json").read_text())
        for step in (0, 12)
    ]
    before, after = (np.array([clip["scores"]["total"] for clip in part]) for part in clips)
    row = table_row(text, "total reward")
    factor = 2.1604 / 14**0.5  # Student's t, 13 degrees of freedom
    assert f"<td>{number(before.mean())} ± {number(factor * before.std(ddof=1))}</td>" in row
    gains = after - before
    change = f"{number(gains.mean(), sign='+')} ± {number(factor * gains.std(ddof=1))}"
    assert f'<td class="better">{change}, wins {(gains > 0).mean():.0%} of 14, better</td>' in row
    assert '<td class="better">−0.00' in table_row(text, "gold distance (lower is better)")
    assert "± is half of the 95 % interval" in text
    assert "total reward 1.740. The total reward is the sum" in text
    assert "Differences are taken clip by clip, same prompt and seed." in text


def test_head(whole, text):
    assert "<h1>demo</h1>" in text and tile("12", "iterations") in text
    assert (
        '<pre class="command">python post_train.py --config configs/tiny_cpu.yaml --output_dir outputs/demo</pre>'
        in text
    )
    assert "NVIDIA H200 · world shapes · 1,204,224 trainable parameters · python 3.11.7" in text
    lines = {
        line["step"]: line["reward/total"]
        for line in read_lines(whole)
        if line["kind"] == "validation"
    }
    assert tile(f"{number(lines[0])} → {number(lines[12])}", "total reward") in text
    closed = 100 * (lines[12] - lines[0]) / (1.74 - lines[0])
    assert tile(f"{closed:.0f} %", "of the gap to perfect clips") in text
    assert tile("18.2 GB", "peak memory") in text
    assert "Over the whole run: 0 failed rewards" in text


def test_the_gap_to_perfect_clips_is_shown_only_where_they_are_the_best(copy):
    assert "of the gap to perfect clips" in page(read_run(copy))
    assert "of the gap to perfect clips" not in without(copy, "perfect_is_best")


def test_configuration(text):
    """All of it is folded away, what is not the default apart from the rest."""
    number, shown, whole = re.search(
        r"<details><summary>(\d+) settings are not the defaults</summary><pre>(.*?)</pre></details>"
        r"\s*<details>.*?<pre>(.*?)</pre></details>",
        text,
        re.DOTALL,
    ).groups()
    assert number == "4"
    assert re.findall(r"<span>(.*?)</span>", shown) == [
        "eta: 0.7",
        "height: 32",
        "width: 32",
        "reward_weights: {&#39;VQ&#39;: 1.0}",
    ]
    assert "eta: 0.7" in whole and "clip_range: 0.0001" in whole


@pytest.mark.parametrize("use_lora", [True, False])
def test_settings_that_mean_nothing_in_a_run_are_not_listed(copy, use_lora):
    config = Config(use_lora=use_lora, lora_r=7, nft_beta=0.3, overwrite=True, eta=0.9)
    (copy / "config.yaml").write_text(config.to_yaml())
    shown = changed_settings(read_run(copy))
    assert ("lora_r: 7" in shown) is use_lora
    assert "eta: 0.9" in shown
    assert not [line for line in shown if line.startswith(("nft_", "overwrite"))]


def test_cells_carry_the_titles_of_their_columns_for_narrow_windows(text):
    row = re.search(r"<tr><td>total reward</td>(.*?)</tr>", text, re.DOTALL).group(1)
    assert re.findall('data-title="([^"]*)"', row) == [
        "iteration 0, 14 clips",
        "iteration 12, 14 clips",
        "iteration 12 minus iteration 0",
    ]


def test_the_rewards_of_all_iterations_are_drawn_and_counted(tmp_path):
    lines = [
        {"kind": "train" if step % 10 == 0 else "reward", "step": step, "reward/total": 0.1 * step}
        | {"reward/failed": 1}
        for step in range(1, 26)
    ]
    write_lines(tmp_path, lines)
    run = read_run(tmp_path)
    assert [line["step"] for line in run.iteration_lines] == list(range(1, 26))
    assert [line["step"] for line in run.full_lines] == [10, 20]
    assert run.iterations == 25
    text = page(run)
    assert "Over the whole run: 25 failed rewards." in text
    assert "First to last: training 0.2 → 2.4." in text

    # a resume after iteration 12 voids what came later
    write_lines(tmp_path, [*lines, {"kind": "run", "step": 12}])
    assert read_run(tmp_path).iterations == 12


def test_skipped_updates_are_counted_once(tmp_path):
    """The metric itself counts from the start of the run."""
    lines = [
        {"kind": "train", "step": step, "reward/total": 0.5, "policy/skipped_updates": 2}
        for step in (1, 2)
    ]
    write_lines(tmp_path, lines)
    assert "<p>Over the whole run: 2 skipped updates.</p>" in page(read_run(tmp_path))


def test_the_words_of_a_failed_reward_are_shown(tmp_path):
    lines = [
        {"kind": "train", "step": step, "reward/total": 0.1 * step, "reward/failed": 1}
        for step in (1, 2, 3)
    ]
    lines[1] |= {"reward/error": "server: OSError: <gone>"}
    lines[2] |= {"reward/error": "server: OSError: again"}
    write_lines(tmp_path, lines)
    assert "3 failed rewards. The first error of a reward: server: OSError: &lt;gone&gt;<" in page(
        read_run(tmp_path)
    )


def test_reward_hacking_is_named(copy, text):
    assert "Here reward and gold improved together (distance" in text
    path = copy / "validation/step-000012/clips.json"
    clips = json.loads(path.read_text())
    for clip in clips:
        clip["gold"]["distance"] += 0.05
    path.write_text(json.dumps(clips))
    words = "Here the reward rose and gold got worse (distance): reward hacking. Look at the clips."
    assert words in only_validation(copy, 0, 12)
    path.write_text(json.dumps(clips[:7]))
    assert "Here the" not in (few := page(read_run(copy))) and "of 7, too few clips</td>" in few
    for clip in clips[::2]:
        clip["scores"]["total"] -= 0.6  # no clear gain on average any more
    path.write_text(json.dumps(clips))
    assert "Here the" not in page(read_run(copy))


@pytest.mark.parametrize(
    ("prefixes", "missing"),
    [
        (("gold/", "schedule", "time/"), {"Gold", "Schedule", "Time"}),
        (
            ("per_step", "kl/", "policy/", "lr", "reward/"),
            {"By denoising step", "Trust region and updates", "Reward"},
        ),
    ],
)
def test_what_was_not_measured_is_left_out(copy, prefixes, missing):
    assert headings(without(copy, *prefixes)) == [
        heading for heading in HEADINGS if heading not in missing
    ]


def test_without_validation(copy):
    write_lines(copy, [line for line in read_lines(copy) if line["kind"] != "validation"])
    text = page(read_run(copy))
    assert headings(text) == [
        heading for heading in HEADINGS if heading not in ("Before and after", "Clips")
    ]
    assert tile("12", "iterations") in text and "total reward</span>" not in text


def only_validation(folder: Path, *steps: int) -> str:
    """The page of a run of which only these validations are left."""
    write_lines(
        folder,
        [
            line
            for line in read_lines(folder)
            if line["kind"] == "validation" and line["step"] in steps
        ],
    )
    return page(read_run(folder))


def test_one_validation(copy):
    text = only_validation(copy, 12)
    assert headings(text) == ["Reward", "Gold"]
    assert tile("0", "iterations") in text and re.search(r"<b>−?0\.\d+</b><span>total reward", text)


def test_clips_that_were_deleted(copy):
    assert headings(only_validation(copy, 0, 12)) == ["Before and after", "Reward", "Gold", "Clips"]
    shutil.rmtree(copy / "validation")
    assert headings(page(read_run(copy))) == ["Reward", "Gold"]


def test_a_single_iteration(tmp_path):
    write_lines(tmp_path, [run_line(), train_line(1, np.random.default_rng(0))])
    text = page(read_run(tmp_path))
    assert tile("1", "iterations") in text and len(headings(text)) == 6


def test_a_run_with_one_update_per_rollout(tmp_path):
    """Ratios are exactly 1 then, so every logarithmic scale meets nothing but 0."""
    line = train_line(1, np.random.default_rng(0))
    zero = {key: 0.0 for key in line if key.startswith(("policy/", "kl/"))}
    nothing = {key: [0.0] * len(values) for key, values in line["per_step"].items()}
    write_lines(tmp_path, [line | zero | {"step": step, "per_step": nothing} for step in (1, 2, 3)])
    text = page(read_run(tmp_path))
    assert headings(text) == ["Reward", "Gold", "Trust region and updates", "Time"]
    assert "<h3>Learning rate</h3>" in text and "<h3>KL</h3>" not in text, (
        "what is 0 throughout is not drawn"
    )


def test_a_run_that_only_started(tmp_path):
    write_lines(tmp_path, [run_line()])
    assert headings(page(read_run(tmp_path))) == ["Schedule"]


def test_the_same_run_gives_the_same_page(drawn, tmp_path):
    write_lines(tmp_path, [run_line()])
    first, second = (page(read_run(tmp_path)) for _ in range(2))
    assert first == second and "<path" in first


def test_a_resumed_run_says_so(tmp_path):
    write_lines(tmp_path, [run_line(), run_line(12)])
    assert "started 2026-11-15T05:00:00 · resumed 1 ×" in page(read_run(tmp_path))


def test_where_the_page_goes(tmp_path, capsys):
    write_lines(tmp_path, [run_line()])
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert main([str(tmp_path), "--output", str(tmp_path / "other.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'other.html'}\n"
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert exit_code(main, [str(tmp_path)]) == 2
    assert capsys.readouterr() == (
        "",
        f"{tmp_path} is not a run folder: it holds no metrics.jsonl\n",
    )


def test_a_damaged_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "run", "step": 0}\n{"ki\n{"kind": "run", "step": 0}\n'
    )
    assert exit_code(main, [str(tmp_path)]) == 2
    assert "line 2 is damaged" in capsys.readouterr().err


def transparent_share(svg: str) -> float:
    """Share of a heat map's picture that lets its background through."""
    data = re.search(r'data:image/png;base64,([^"]+)"', svg).group(1)
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    return float((np.asarray(image)[..., 3] == 0).mean())


@pytest.mark.parametrize(("values", "share"), [([1.0, 2.0], 0), ([1.0, 2.0, None, None], 0.5)])
def test_untrained_cells_show_a_gray_background(drawn, values, share):
    line = {"step": 1, "per_step": {"grad_v": values}}
    svg = gradient_map(RunHistory(Path(), [], [line], [])).svg
    assert transparent_share(svg) == share
    assert f"fill: {GREY}; fill-opacity" in svg


def test_phases_add_up_to_the_whole(tmp_path):
    write_lines(
        tmp_path,
        [{"kind": "train", "step": 1, "time/rollout": 2.0, "time/gold": None, "time/total": 5.0}],
    )
    phases = phase_seconds(read_run(tmp_path))
    assert {name: values.tolist() for name, values in phases.items()} == {
        "rollout": [2.0],
        "other": [3.0],
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (-1.5, "−1.500"), (0.0, "0.000"), (2.34e-5, "2e−05"), (float("nan"), "–")],
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_every_metric_is_explained():
    """docs/metrics.md names each key that a run writes."""
    lines = [train_line(1, np.random.default_rng(0))]
    keys = {key for line in lines for key in (*line, *line["per_step"])} - {"kind"}
    keys |= {
        f"{name}_stderr"
        for name in ("reward/total", "gold/match", "gold/distance", "gold/prompt_distance")
    }
    keys |= {
        *run_line()["schedule"],
        "perfect",
        "perfect_is_best",
        "vae_floor",
        "schedule",
        "time/validation",
        "signal/rescoring",
    }
    words = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert len(keys) > 55 and not keys - words


def test_a_run_is_done_without_its_report(copy, capsys):
    (copy / "report.html").mkdir()  # no file can be written there
    print_summary(copy)
    out, err = capsys.readouterr()
    assert "total reward" in out
    assert "the run is done, but its report could not be written: " in err
    assert f"tools.report {copy}` makes it" in err


def test_no_escape_of_a_score_reaches_the_terminal(undrawn, copy, capsys):
    for path in copy.glob("validation/*/clips.json"):
        clips = json.loads(path.read_text())
        for clip in clips:
            clip["scores"]["\x1b]0;PWNED\x07"] = 1.0
        path.write_text(json.dumps(clips))
    print_summary(copy)
    out = capsys.readouterr().out
    assert "PWNED" in out and out.replace("\n", "").isprintable()


def test_nothing_in_its_folder_makes_a_run_fail_that_is_done(copy, capsys, monkeypatch):
    def broken(folder):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(page_module, "write_report", broken)
    print_summary(copy)
    assert "its report could not be written: division by zero" in capsys.readouterr().err


def test_only_logged_iterations_wait_for_the_oracle(copy):
    """Ten iterations per line, each of 60 s and 30 s more for the oracle if it is logged."""
    run = read_run(copy)
    lines = [{"step": step, "time/total": 90.0, "time/gold": 30.0} for step in (10, 20)]
    shortened = dataclasses.replace(run, full_lines=lines, reward_only_lines=[])
    assert tile("21 min", "in iterations") in page(shortened)
