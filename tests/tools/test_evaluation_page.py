"""The columns and tables of an evaluation, against hand-computed numbers."""

import json
from pathlib import Path

import pytest

from sage_grpo.runs.clips import Clip
from sage_grpo.tools.evaluation_page import columns, compared, pages


def clip(**values):
    return Clip(Path("x.mp4"), "a", 1, {f"reward/{name.replace('__', '.')}": value for name, value in values.items()})


def test_the_columns_of_the_papers_table_come_first():
    scored = clip(ocr__ocr=0.5, pickscore__pickscore=0.74, clipscore__cosine=0.2, videoalign__VQ=-0.75,
                  videoalign__MQ=-0.5, videoalign__TA=1.5, total=9.0)  # fmt: skip
    found = columns(scored)
    assert list(found) == ["Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore", "ocr"]
    assert found["Overall"] == 0.25 and found["CLIPScore"] == pytest.approx(0.5) and found["PickScore"] == 0.74
    assert columns(clip(cosine=-0.2)) == {"CLIPScore": 0} and columns(clip(VQ=1.0, TA=2.0)) == {"VQ": 1, "TA": 2}


def test_two_rewards_with_one_name_stay_apart():
    assert columns(clip(videoalign__VQ=1.0, shapes__VQ=2.0)) == {"VQ": 1, "shapes.VQ": 2}


def write(folder, values, distances):
    folder.mkdir(parents=True)
    entries = [
        {
            "file": f"{seed}.mp4",
            "prompt": "<b>",
            "seed": seed,
            "scores": {"level": value},
            "gold": {"distance": distance},
        }
        for seed, (value, distance) in enumerate(zip(values, distances, strict=True))
    ]
    (folder / "clips.json").write_text(json.dumps(entries))
    (folder / "0.mp4").write_bytes(b"clip")


def test_differences_are_paired_and_smaller_distances_win(tmp_path):
    write(tmp_path / "one", [1.0, 2.0, 3.0, None], [0.4, 0.4, 0.4, 0.4])
    write(tmp_path / "two", [2.0, 3.0, 3.0, 9.0], [0.1, 0.2, 0.1, 0.5])
    found = compared(tmp_path, ["one", "two"])
    level = found["systems"]["two"]["columns"]["level"]
    assert level["count"] == 4 and level["pairs"] == 3
    assert level["difference"] == pytest.approx(2 / 3) and level["win_rate"] == pytest.approx(2.5 / 3)
    distance = found["systems"]["two"]["columns"]["gold/distance"]
    assert distance["difference"] == pytest.approx(-0.175) and distance["win_rate"] == 0.75
    assert found["systems"]["one"]["columns"]["level"]["count"] == 3
    shown = pages(tmp_path, found)
    assert "2.000 ±" in shown and "wins 83%" in shown
    text = (tmp_path / "evaluation.html").read_text()
    assert "<h3>&lt;b&gt;</h3>" in text and text.count("<video") == 2
    assert json.loads((tmp_path / "evaluation.json").read_text())["reference"] == "one"


def test_names_and_prompts_are_escaped(tmp_path):
    bad, system = "<script>alert(1)</script>", "<img src=x>"
    for name in ("one", system):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.mp4").write_bytes(b"clip")
        entry = {"file": "a.mp4", "prompt": bad, "seed": 1, "scores": {bad: 1.0}, "gold": {bad: 0.5}}
        (tmp_path / name / "clips.json").write_text(json.dumps([entry]))
    pages(tmp_path, compared(tmp_path, [system, "one"]))
    text, escaped = (tmp_path / "evaluation.html").read_text(), "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert "<script" not in text and "<img" not in text
    assert f"<h3>{escaped}</h3>" in text and f"<small>{escaped} 1.000" in text and f"<td>{escaped}</td>" in text
    assert all(f"{tag}&lt;img src=x&gt;<" in text for tag in ("<td>", "<td>against ", "<b>"))
