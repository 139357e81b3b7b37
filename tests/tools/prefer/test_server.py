"""The labeling page over HTTP: answers, raters, security, and that nothing a browser receives breaks the blinding."""

import json
import re
from dataclasses import replace
from urllib.parse import quote

import pytest

from sage_grpo.tools.gate import HEADERS
from sage_grpo.tools.prefer.answers import read_answers
from sage_grpo.tools.prefer.pairs import trials
from sage_grpo.tools.prefer.server import MAX_BYTES
from sage_grpo.tools.prefer.study import StudyError, clip_path
from tests.tools.prefer.studies import PROMPTS, SYSTEMS, Browser, blinded, new_study, serving


@pytest.fixture
def answers(tmp_path):
    file = new_study(tmp_path / "prefs.jsonl")
    yield file
    file.close()


@pytest.fixture
def ann(answers):
    with serving(answers) as addresses:
        yield Browser(addresses["ann"])


# answers


def test_answers_are_on_disk_before_the_next_pair_and_undo_goes_back(answers, ann):
    state = ann.state()
    assert (state["done"], state["total"], state["can_undo"]) == (0, 3, False)
    state = ann.answer(0, overall="left").json()
    assert (state["done"], state["trial"], state["can_undo"]) == (1, 1, True)
    assert [answer.choices for answer in read_answers(answers.path)[1]] == [{"overall": "left"}]

    state = ann.answer(1, overall="bad").json()
    assert state["trial"] == 2
    state = ann.post("/undo").json()
    assert (state["trial"], state["done"]) == (1, 1)
    ann.answer(1, overall="tie")
    state = ann.answer(2, overall="right").json()
    assert (state["done"], "trial" in state, "clips" in state) == (3, False, False)
    choices = [answer.choices["overall"] for answer in read_answers(answers.path)[1]]
    assert choices == ["left", "tie", "right"]


def test_an_undo_names_what_it_takes_back(answers, ann):
    """A second try, whose first one arrived, takes back nothing more."""
    assert ann.state()["last_trial"] is None
    ann.answer(0, overall="left")
    assert ann.answer(1, overall="left").json()["last_trial"] == 1
    for _ in range(2):
        state = ann.post("/undo", {"trial": 1}).json()
        assert (state["done"], state["last_trial"]) == (1, 0)
    assert ann.http.post("/undo").json()["done"] == 0  # without a name: the last one
    assert read_answers(answers.path)[1] == []


@pytest.mark.parametrize("damage", ["missing", "linked", "a folder"])
def test_a_clip_that_cannot_be_read_is_gone(answers, ann, tmp_path, damage):
    (tmp_path / "secret").write_text("secret")
    for clip in answers.study.clips:
        path = clip_path(answers.path, clip)
        path.unlink()
        if damage == "linked":
            path.symlink_to(tmp_path / "secret")
        elif damage == "a folder":
            path.mkdir()
    response = ann.http.get(f"/clips/{ann.state()['clips'][0]}")
    assert (response.status_code, response.json()) == (404, {"error": "the clip is gone"})


def test_half_a_character_in_a_prompt_leaves_the_page_alive(tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl")
    clips = tuple(replace(clip, prompt="half \ud800") for clip in answers.study.clips)
    answers.study = replace(answers.study, clips=clips)
    with serving(answers) as addresses:
        assert Browser(addresses["ann"]).state()["prompt"] == "half ?"
    answers.close()


def test_an_answer_from_an_old_tab_changes_nothing(answers, ann):
    ann.answer(0, overall="left")
    assert ann.answer(0, overall="right").status_code == 409
    assert ann.answer(2, overall="right").status_code == 409
    assert [answer.choices["overall"] for answer in read_answers(answers.path)[1]] == ["left"]


def test_two_raters_at_once_have_orders_of_their_own(tmp_path):
    prompts = [f"a red circle number {i}" for i in range(8)]
    answers = new_study(tmp_path / "prefs.jsonl", prompts=prompts)
    with serving(answers, ("ann", "bob")) as addresses:
        browsers = {name: Browser(address) for name, address in addresses.items()}
        shown = {name: [] for name in browsers}
        for trial in range(8):
            for name, browser in browsers.items():
                shown[name].append(browser.state()["prompt"])
                browser.answer(trial, overall="left" if name == "ann" else "right")
    answers.close()
    _, given = read_answers(answers.path)
    assert sorted(shown["ann"]) == sorted(shown["bob"]) == sorted(prompts)
    assert shown["ann"] != shown["bob"]
    assert [answer.rater for answer in given] == ["ann", "bob"] * 8
    assert {answer.choices["overall"] for answer in given if answer.rater == "bob"} == {"right"}


def test_a_restarted_server_goes_on_where_it_was(answers, ann):
    ann.answer(0, overall="left")
    answers.close()  # as if killed
    again = type(answers)(answers.path)
    with serving(again) as addresses:
        state = Browser(addresses["ann"]).state()
    again.close()
    assert (state["trial"], state["done"]) == (1, 1)


def test_three_questions_are_answered_together(tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl", questions=("vq", "mq", "ta"))
    with serving(answers) as addresses:
        ann = Browser(addresses["ann"])
        assert ann.answer(0, vq="left", mq="tie").status_code == 400
        assert ann.answer(0, vq="left", mq="tie", ta="right").status_code == 200
    answers.close()


# security


@pytest.mark.parametrize("path", ["/", "/state", "/answer", "/undo", "/clips/0", "/nothing"])
@pytest.mark.parametrize("token", [None, "wrong", "0"])
def test_nothing_is_served_without_the_token(ann, path, token):
    method = "GET" if path in ("/", "/clips/0") else "POST"
    del ann.http.headers["Authorization"]
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    query = "" if token is None else f"?token={token}"
    response = ann.http.request(method, path + query, headers=headers)
    assert response.status_code == 403
    assert set(response.json()) == {"error"}


def test_a_token_in_the_address_opens_the_page_alone(ann):
    token = ann.address.partition("token=")[2]
    del ann.http.headers["Authorization"]
    assert ann.http.get(f"/?token={token}").status_code == 200
    assert ann.http.post(f"/state?token={token}", json={}).status_code == 403


@pytest.mark.parametrize("headers, status", [
    ({}, 200),
    ({"Origin": "SELF"}, 200),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "evil.example"}, 403),  # DNS rebinding
    ({"Host": "127.0.0.1.evil.example:80"}, 403),
    ({"Host": "localhost:9000"}, 200),  # an SSH tunnel
    ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),
    ({"Host": "localhost:9000", "Origin": "http://localhost:9001"}, 403),
])  # fmt: skip
def test_only_the_own_page_may_ask(ann, headers, status):
    base = str(ann.http.base_url).rstrip("/")
    headers = {name: value.replace("SELF", base) for name, value in headers.items()}
    assert ann.post("/state", **headers).status_code == status


def test_another_host_can_be_allowed(answers):
    with serving(answers, hosts=["tunnel.example"]) as addresses:
        browser = Browser(addresses["ann"])
        assert browser.post("/state", Host="tunnel.example").status_code == 200
        assert browser.post("/state", Host="other.example").status_code == 403


@pytest.mark.parametrize("path", [
    "/clips/../prefs.jsonl", "/clips/%2e%2e%2fprefs.jsonl", "/clips/..%2f..%2fetc%2fpasswd", "/clips/", "/clips",
    "/clips/0.mp4", "/clips/0", "/prefs.jsonl", "/clips/" + "a" * 5000,
])  # fmt: skip
def test_clips_have_numbers_and_nothing_else_is_served(ann, path):
    response = ann.http.get(path)
    assert response.status_code == 404
    assert b"study" not in response.content


def test_answers_have_a_limited_size_and_one_form(answers, ann):
    form = {"trial": 0, "answers": {"overall": "left"}, "seconds": 1}
    bad = [
        {"trial": 0, "answers": {"overall": "best"}},
        {"trial": 0, "answers": {"overall": ["left"]}},
        {"trial": 0, "answers": {"vq": "left"}},
        {"trial": True, "answers": {"overall": "left"}},
        form | {"seconds": "1"},
        form | {"seconds": -1},
        {},
    ]
    for body in bad:
        assert ann.post("/answer", body).status_code == 400, body
    padded = form | {"more": "x" * MAX_BYTES}
    assert ann.post("/answer", padded).status_code == 413
    assert ann.http.post("/answer", content=json.dumps(form)).status_code == 415
    json_header = {"Content-Type": "application/json"}
    for content in (b"[" * 4000, b"{", b"[]", b"\xff"):
        response = ann.http.post("/answer", content=content, headers=json_header)
        assert response.status_code == 400
    assert read_answers(answers.path)[1] == []


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\u202e\'"&{{7*7}}'


def test_a_hostile_prompt_and_rater_stay_text(tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl", prompts=(HOSTILE, "b"))
    rater = "<img src=x onerror=alert(3)>{{7*7}}"
    with serving(answers, (rater,)) as addresses:
        browser = Browser(addresses[rater])
        page = browser.http.get(browser.address).text
        prompts = []
        for trial in range(2):
            prompts.append(browser.state()["prompt"])
            browser.answer(trial, overall="left")
    answers.close()
    assert sorted(prompts) == sorted([HOSTILE, "b"])  # the script puts it into textContent
    assert "<img" not in page
    assert "49" not in page.partition("</header>")[0].partition("<header>")[2]
    assert "&lt;img src=x onerror=alert(3)&gt;" in page
    assert HOSTILE not in page
    assert {answer.rater for answer in read_answers(answers.path)[1]} == {rater}


@pytest.mark.parametrize("rater", ["", "  ", "a\nb", "a\0b", "\x1b[2J", "x" * 65])
def test_a_name_that_cannot_be_shown_is_refused(answers, rater):
    with pytest.raises(StudyError, match="a rater is called"), serving(answers, (rater,)):
        pass


def test_the_page_needs_no_network_and_runs_no_foreign_script(ann):
    response = ann.http.get(ann.address)
    policy = response.headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)[1]
    assert "default-src 'none'" in policy
    assert f'<script nonce="{nonce}">' in response.text
    assert not re.search(r"https?://", response.text)
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", response.text)
    again = ann.http.get(ann.address)
    assert nonce not in again.text
    for name, value in HEADERS.items():
        assert response.headers[name] == value
        assert ann.post("/state").headers[name] == value
    assert "server" not in response.headers


# blindness


def test_nothing_that_the_browser_receives_tells_which_side_is_which(tmp_path):
    """Reads all of it: the page, every state, every clip with its headers, over several pairs."""
    prompts = [f"prompt {i}" for i in range(6)]
    answers = new_study(tmp_path / "prefs.jsonl", prompts=prompts, repeat=0.5)
    sources = {blinded(system, number)[0] for system in (0, 1) for number in range(6)}
    assert len(sources) > 6, "sizes of the files differ"
    sizes = {0: [], 1: []}
    with serving(answers) as addresses:
        ann = Browser(addresses["ann"])
        schedule = trials(answers.study, "ann")
        received = [ann.http.get(ann.address).text]
        numbers = []
        sides = []
        for trial in schedule:
            state = ann.state()
            numbers += state["clips"]
            responses = [ann.http.get(f"/clips/{number}") for number in state["clips"]]
            received.append(json.dumps(state))
            left, right = ({k: v for k, v in r.headers.items() if k != "date"} for r in responses)
            assert left == right
            assert len(responses[0].content) == len(responses[1].content)
            pair = answers.study.pairs[trial.pair]
            shown = pair[::-1] if trial.swapped else pair
            sides.append(answers.study.clips[shown[0]].system)
            for index, response in zip(shown, responses, strict=True):
                received += [str(response.headers), response.content.decode("latin-1")]
                sizes[answers.study.clips[index].system].append(len(response.content))
            ann.answer(state["trial"], overall="tie")
    answers.close()

    text = "\n".join(received)
    traces = [
        *SYSTEMS,
        "system-0",
        "system-1",
        "step-",
        "x264",
        "Lavf",
        "Lavc",
        str(tmp_path),
        "prefs",
    ]
    traces += [clip.file for clip in answers.study.clips] + ["swapped", 'repeat"', "score"]
    assert [trace for trace in traces if trace in text] == []
    assert len(set(numbers)) == len(numbers), "a number that returns would link two trials"
    assert sorted(sizes[0]) == sorted(sizes[1])
    assert set(sides) == {0, 1}


def test_clips_are_those_of_the_trial_and_of_the_next_alone(tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl")
    with serving(answers, ("ann", "bob")) as addresses:
        ann, bob = Browser(addresses["ann"]), Browser(addresses["bob"])
        state = ann.state()
        current, following = state["clips"], state["next_clips"]
        assert all(
            ann.http.get(f"/clips/{number}").status_code == 200 for number in current + following
        )
        assert bob.http.get(f"/clips/{current[0]}").status_code == 404
        ann.answer(0, overall="left")
        assert ann.http.get(f"/clips/{current[0]}").status_code == 404
        assert ann.state()["clips"] == following
    answers.close()


def test_the_prompt_is_that_of_the_clips(answers, ann):
    for trial in trials(answers.study, "ann"):
        state = ann.state()
        assert state["prompt"] == answers.study.prompt(trial.pair)
        assert state["prompt"] in PROMPTS
        assert quote(state["prompt"]) not in "".join(state["clips"])
        ann.answer(state["trial"], overall="left")
