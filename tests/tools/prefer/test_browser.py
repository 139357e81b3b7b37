"""The labeling page in a real Chromium, driven by key presses and clicks as a rater would.

With SCREENSHOTS=docs/figures in the environment, the pictures of docs/people.md are written again.
"""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is missing; requirements-dev.txt has it")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from sage_grpo.tools.prefer.__main__ import main
from sage_grpo.tools.prefer.answers import read_answers
from tests.tools.prefer.studies import PREFERS, PROMPTS, answer_all, new_study, serving

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="no Chromium here: apt-get install chromium chromium-driver",
    ),
    # selenium leaves the pipes and sockets of its driver process to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WIDE = (1280, 860)
PHONE = (390, 844)
SECONDS = 60  # on a busy machine


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument("--autoplay-policy=no-user-gesture-required")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page of a rater, opened in the browser."""

    def __init__(self, browser, address, size=WIDE):
        self.browser = browser
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(address)

    def wait(self, ready):
        """Until the page shows a trial that can be answered, or "finished"."""
        waiting = WebDriverWait(self.browser, SECONDS, 0.05)
        waiting.until(
            lambda driver: self.script("return document.body.dataset.ready") == str(ready)
        )

    def script(self, code):
        return self.browser.execute_script(code)

    def press(self, *keys):
        body = self.browser.find_element(By.TAG_NAME, "body")
        for key in keys:
            body.send_keys(key)

    def click(self, selector):
        self.browser.find_element(By.CSS_SELECTOR, selector).click()

    def text(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector).text

    def screenshot(self, name):
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(str(Path(folder) / f"people_{name}.png"))


def choices(answers):
    return [dict(answer.choices) for answer in read_answers(answers.path)[1]]


def test_a_rater_labels_undoes_reloads_and_finishes_by_keys(browser, tmp_path):
    """All over HTTP is in test_server.py; here the script, the keys and the two players are real."""
    answers = new_study(tmp_path / "prefs.jsonl")
    with serving(answers) as addresses:
        page = Page(browser, addresses["ann"])
        page.wait(0)
        assert page.text("#prompt") in PROMPTS
        assert page.text("#count") == "0 of 3"
        sizes = page.script(
            "return [left.videoWidth, right.videoWidth, left.readyState, right.readyState]"
        )
        assert sizes[0] == sizes[1] > 0
        assert min(sizes[2:]) >= 2
        page.screenshot("wide")

        # label
        page.press(Keys.ARROW_LEFT)
        page.wait(1)
        assert choices(answers) == [{"overall": "left"}]

        # undo, and another answer
        page.press("u")
        page.wait(0)
        assert choices(answers) == []
        page.press(Keys.ARROW_RIGHT)
        page.wait(1)
        assert page.text("#count") == "1 of 3"

        # reload: it goes on where it was
        page.browser.refresh()
        page.wait(1)
        assert page.text("#count") == "1 of 3"

        # both bad; slower and replay answer nothing
        page.press("s", "r")
        assert page.script("return [left.playbackRate, right.playbackRate]") == [0.5, 0.5]
        assert "0.5" in page.text("#slower")
        page.press("b")
        page.wait(2)

        # equal, and finished
        page.press(Keys.ARROW_DOWN)
        page.wait("finished")
        assert "Thank you" in page.text("#finished")
        assert choices(answers) == [{"overall": "right"}, {"overall": "bad"}, {"overall": "tie"}]
        page.screenshot("finished")
        page.press("u")
        page.wait(2)
        assert len(choices(answers)) == 2

        errors = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        assert errors == []
    answers.close()


def test_the_two_clips_loop_in_step(browser, tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl")
    with serving(answers) as addresses:
        page = Page(browser, addresses["ann"])
        page.wait(0)
        page.script(
            "window.starts = [0, 0]; [left, right].forEach((video, side) => "
            "video.addEventListener('play', () => window.starts[side]++))"
        )
        waiting = WebDriverWait(browser, SECONDS, 0.05)
        waiting.until(lambda driver: min(page.script("return window.starts")) >= 2)
        starts = page.script("return window.starts")
        assert abs(starts[0] - starts[1]) <= 1
    answers.close()


def test_three_questions_on_a_phone_by_taps(browser, tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl", questions=("vq", "mq", "ta"))
    with serving(answers) as addresses:
        page = Page(browser, addresses["ann"], PHONE)
        page.wait(0)
        assert page.script("return document.documentElement.scrollWidth") <= PHONE[0]
        page.screenshot("phone")
        page.click("[data-question=vq] [data-choice=left]")
        page.click("[data-question=ta] [data-choice=bad]")
        page.click("#undo")  # takes back the last question alone
        assert choices(answers) == []
        page.click("[data-question=ta] [data-choice=right]")
        page.click("[data-question=mq] [data-choice=tie]")
        page.wait(1)
        assert choices(answers) == [{"vq": "left", "mq": "tie", "ta": "right"}]
    answers.close()


def test_a_hostile_prompt_and_name_stay_text(browser, tmp_path):
    hostile = (
        "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
    )
    answers = new_study(tmp_path / "prefs.jsonl", prompts=(hostile, "b"))
    rater = "<b onclick=x>rater</b>"
    with serving(answers, (rater,)) as addresses:
        page = Page(browser, addresses[rater])
        seen = []
        for trial in range(2):
            page.wait(trial)
            seen.append(page.text("#prompt"))
            page.press("1")
        page.wait("finished")
        assert sorted(seen) == sorted([hostile, "b"])
        assert page.text("#rater") == rater
        assert page.script("return document.title") != "hacked"
        assert page.script("return document.querySelectorAll('#prompt *, #rater *').length") == 0
    answers.close()


def test_an_answer_that_is_not_stored_is_reported(browser, tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl")
    with serving(answers) as addresses:
        page = Page(browser, addresses["ann"])
        page.wait(0)
    page.press("1")  # the server is gone
    waiting = WebDriverWait(browser, SECONDS, 0.05)
    waiting.until(lambda driver: page.text("#problem").startswith("Not stored"))
    assert choices(answers) == []
    answers.close()


def test_a_clip_that_cannot_be_shown_does_not_pass_for_an_answer_that_is_lost(browser, tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl")
    with serving(answers) as addresses:
        page = Page(browser, addresses["ann"])
        page.wait(0)
        page.script("load = () => Promise.reject(new Error('no codec'))")
        page.press("1")
        waiting = WebDriverWait(browser, SECONDS, 0.05)
        waiting.until(lambda driver: page.text("#problem").startswith("Your answers are stored"))
        assert len(choices(answers)) == 1
    answers.close()


def test_the_result_page_plays_its_clips(browser, tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl", prompts=[*PROMPTS, *"abcdefg"], repeat=0.3)
    answer_all(answers, "ann", lambda pair, left: PREFERS[left == 0])
    answer_all(answers, "bob", lambda pair, left: PREFERS[(left == 0) == (pair % 3 > 0)])
    answers.close()
    assert main(["result", str(answers.path)]) == 0
    address = (tmp_path / "prefs.html").as_uri()
    for name, size in {"result": WIDE, "result_phone": PHONE}.items():
        page = Page(browser, address, size)
        waiting = WebDriverWait(browser, SECONDS, 0.05)
        states = "return [...document.querySelectorAll('video')].map((video) => video.readyState)"
        waiting.until(lambda driver: min(page.script(states), default=0) >= 2)  # noqa: B023
        assert page.script("return document.documentElement.scrollWidth") <= size[0]
        page.screenshot(name)
