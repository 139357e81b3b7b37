"""The page that follows runs: what it knows, what it survives, and whom it answers."""

import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch

from sage_grpo.runs import gallery
from sage_grpo.runs.gallery import Gallery, record_of, step_folders
from sage_grpo.runs.history import read_run
from sage_grpo.tools.report.page import page, spread
from sage_grpo.tools.watch.__main__ import main
from sage_grpo.tools.watch.server import build_page
from sage_grpo.tools.watch.state import Watched
from tests.programs import exit_code
from tests.tools.fake_run import make_run, run_line

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of 12 iterations with three validations. Read-only."""
    return make_run(tmp_path_factory.mktemp("made") / "run", iterations=12, every=6, prompts=3)


@pytest.fixture
def run(made, tmp_path, monkeypatch):
    """A copy of that run, with two pairs of rollouts."""
    folder = shutil.copytree(made, tmp_path / "runs" / "mine")
    monkeypatch.setattr(
        gallery, "write_mp4", lambda path, clip, fps, crf: path.write_bytes(b"video of a pair")
    )
    pairs = Gallery(folder, 9)
    for step in (4, 8):
        clips = [torch.zeros(2, 16, 16, 3, dtype=torch.uint8)] * 2
        records = [record_of(HOSTILE, n, {"VQ": 1.0 - n, "total": 2.0 - n}) for n in (0, 1)]
        pairs.write(step, clips, records, 8)
    return folder


def test_the_state_has_curves_verdict_phases_and_clips(run):
    watched = Watched([run])
    (state,) = watched.state()["runs"]
    json.dumps(state, allow_nan=False)
    assert (state["name"], state["problem"], state["iterations"]) == ("mine", "", 12)
    assert state["verdict"]

    curves = {curve["title"]: curve for curve in state["curves"]}
    for title in ("reward of rollouts", "reward of held-out prompts"):
        curve = curves[title]
        sizes = {len(curve[key]) for key in ("steps", "points", "means", "lows", "highs")}
        assert sizes == {12 if "rollouts" in title else 3}
        assert curve["lows"][-1] < curve["means"][-1] < curve["highs"][-1]
    assert {phase["name"] for phase in state["phases"]} >= {"rollout", "update"}

    assert [pair["step"] for pair in state["rollouts"]] == [8, 4]
    best, worst = state["rollouts"][0]["clips"]
    assert (best["title"], best["values"]) == ("best", {"VQ": 1.0, "total": 2.0})
    assert (worst["title"], worst["values"]) == ("worst", {"VQ": 0.0, "total": 1.0})
    assert watched.clips[best["number"]] == run / "rollouts" / "step-000008" / "best.mp4"
    assert state["validation"]["steps"] == [0, 12]
    assert all(len(row["clips"]) == 2 for row in state["validation"]["rows"])
    assert str(run.parent) not in json.dumps(state)


def test_a_run_that_grows_breaks_and_vanishes_is_followed(run):
    watched = Watched([run])
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"kind": "train", "step": 5' in line)
    metrics.write_text("".join(lines[:cut]))
    assert watched.state()["runs"][0]["iterations"] == 4

    metrics.write_text("".join(lines) + '{"kind": "train", "st')  # a line that is being written
    assert watched.state()["runs"][0]["iterations"] == 12

    metrics.write_text("{broken\n" + "".join(lines))
    (state,) = watched.state()["runs"]
    assert state["iterations"] == 12 and "line 1 is damaged" in state["problem"]
    assert str(run.parent) not in state["problem"]

    shutil.rmtree(run)
    (state,) = watched.state()["runs"]
    assert state["iterations"] == 12 and state["problem"] == "the run folder is gone"


def test_a_folder_that_is_no_run_yet_is_waited_for(tmp_path, run):
    watched = Watched([tmp_path / "later", run])
    later, mine = watched.state()["runs"]
    assert later["problem"] and "curves" not in later and mine["problem"] == ""
    shutil.copytree(run, tmp_path / "later")
    assert watched.state()["runs"][0]["iterations"] == 12


def test_rollouts_that_a_resume_made_void_are_not_shown(run, undrawn):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(run_line(4)) + "\n")
    (state,) = Watched([run]).state()["runs"]
    assert (state["iterations"], [pair["step"] for pair in state["rollouts"]]) == (4, [4])
    assert "iteration 8:" not in page(read_run(run))


@pytest.mark.parametrize("folder", ["rollouts", "validation"])
def test_a_folder_that_is_seen_before_its_listing_is_read_again(run, folder):
    newest = max(step_folders(run / folder).values())
    listing = (newest / "clips.json").rename(run / "clips.json")
    watched = Watched([run])
    (before,) = watched.state()["runs"]
    listing.rename(newest / "clips.json")
    (after,) = watched.state()["runs"]
    assert before[folder] != after[folder]


@pytest.mark.parametrize("place", ["name of the folder", "prompt"])
def test_half_a_character_leaves_the_page_alive(run, place):
    bad = run
    if place == "prompt":
        for listing in run.glob("validation/*/clips.json"):
            records = [record | {"prompt": "\ud800"} for record in json.loads(listing.read_text())]
            listing.write_text(json.dumps(records))
    else:
        bad = run.rename(run.with_name("half \udcff"))
    with served(build_page([bad])) as address:
        base, _, token = address.partition("/?token=")
        status, _, body = ask(f"{base}/state", Authorization=f"Bearer {token}")
    (state,) = json.loads(body)["runs"]
    assert status == 200
    assert ("clip 1 has '\\ud800'" in state["problem"]) == (place == "prompt")


def test_links_of_others_are_not_followed(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    watched = Watched([run])
    best = run / "rollouts" / "step-000008" / "best.mp4"
    best.unlink()
    best.symlink_to(secret)
    (state,) = watched.state()["runs"]
    assert "is a link" in state["problem"]
    assert secret not in watched.clips.values()


@contextmanager
def served(page):
    """The address of the page, while it is served."""
    server, listener, address = page.listen(0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()


def ask(url, **headers):
    """Status, headers and body."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_only_the_page_with_the_token_is_answered(run):
    with served(build_page([run])) as address:
        base, _, token = address.partition("/?token=")
        assert base.startswith("http://127.0.0.1:")
        mine = {"Authorization": f"Bearer {token}"}

        status, headers, html = ask(address)
        assert status == 200 and b"<script nonce=" in html
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"

        status, _, body = ask(f"{base}/state", **mine)
        (state,) = json.loads(body)["runs"]
        assert status == 200 and HOSTILE in state["rollouts"][0]["prompt"]
        clip = state["rollouts"][0]["clips"][0]["number"]
        assert ask(f"{base}/clips/{clip}", **mine)[2] == b"video of a pair"

        refused = [
            (f"{base}/", {}),
            (f"{base}/?token=wrong", {}),
            (f"{base}/state", {}),
            (f"{base}/state?token={token}", {}),  # in an address it would be in logs
            (f"{base}/clips/{clip}", {}),
            (f"{base}/state", mine | {"Host": "evil.example:80"}),
            (f"{base}/state", mine | {"Origin": "http://evil.example"}),
        ]
        for url, headers in refused:
            assert ask(url, **headers)[0] == 403
        for path in ("/clips/0", "/clips/..%2f..%2fmetrics.jsonl", "/metrics.jsonl"):
            assert ask(base + path, **mine)[0] == 404


@pytest.mark.parametrize("port", ["taken", 99999])
def test_a_port_that_cannot_be_used_is_one_sentence(run, port, capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port == "taken" else port
        assert exit_code(main, [str(run), "--port", str(port)]) == 2
    assert capfd.readouterr().err == f"port {port} cannot be used; give another --port\n"


def test_the_report_shows_the_same_pairs_as_text_and_video(run, undrawn):
    html = page(read_run(run))
    section = html.partition("best and worst of a group")[2]
    assert section.count("data:video/mp4;base64,") >= 4
    assert section.index("iteration 4:") < section.index("iteration 8:")
    assert HOSTILE not in html and "&lt;script&gt;alert" in section


def test_a_report_of_many_pairs_shows_the_first_the_last_and_some_between():
    steps = list(spread(dict.fromkeys(range(100), ())))
    assert (len(steps), steps[0], steps[-1]) == (8, 0, 99)
