"""The page that follows runs in a real browser, while a real run trains."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_grpo.tools.watch.server import build_page
from tests.smallest_run import command_line, smallest_run
from tests.tools.test_watch import served

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ROOT = Path(__file__).parents[2]
HOSTILE = "a red circle <img src=x onerror=document.title='hacked'>"
SECONDS = 120  # at most, for what the page should show


@pytest.fixture
def browser():
    if not CHROMIUM or not DRIVER:
        pytest.skip("there is no Chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,2400"):
        options.add_argument(argument)
    for argument in ("--disable-dev-shm-usage", "--autoplay-policy=no-user-gesture-required"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def wait_for(browser, script):
    """What a script returns, once that is true."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        value = browser.execute_script(f"return {script}")
        if value:
            return value
        time.sleep(0.3)
    raise AssertionError(f"the page never had {script}: {browser.page_source[-2000:]}")


@pytest.mark.slow
# selenium leaves the pipes and sockets of its driver process to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_browser_follows_a_run_by_itself(browser, program_folder, tmp_path):
    """Beyond the tests of server and state: the script draws, loads clips under its policy, and updates while training
    goes on; text of a prompt stays text; a run that vanishes is said. SCREENSHOTS names a folder for pictures.
    """
    flags = smallest_run(
        program_folder,
        tmp_path,
        max_steps=6,
        rollout_videos=2,
        validation_videos=2,
        validate_at_step0=True,
        validation_interval=3,
        height=32,
        width=32,
    )
    screenshots = os.environ.get("SCREENSHOTS")

    def picture(name):
        if screenshots:
            browser.save_screenshot(str(Path(screenshots) / f"{name}.png"))

    with served(build_page([tmp_path / "run"])) as address:
        browser.get(address)
        wait_for(browser, "document.querySelector('.problem')")  # there is no run yet
        command = [sys.executable, "post_train.py", *command_line(flags)]
        training = subprocess.Popen(command, cwd=ROOT)
        wait_for(browser, "document.querySelectorAll('.curve').length > 1")
        early = wait_for(browser, "document.querySelector('section p').textContent")
        picture("early")
        assert training.wait() == 0
        wait_for(browser, "document.querySelector('section p').textContent.startsWith('6 of 6')")
        assert early != browser.execute_script(
            "return document.querySelector('section p').textContent"
        )

        # clips play under the page's policy
        wait_for(browser, "[...document.querySelectorAll('video')].some(v => v.readyState >= 2)")
        titles = browser.execute_script(
            "return [...document.querySelectorAll('.pair b')].map(b => b.textContent.split(':')[0])"
        )
        assert {"best", "worst", "iteration 0", "iteration 6"} <= set(titles)
        picture("done")

        # text stays text
        for listing in (tmp_path / "run").glob("rollouts/*/clips.json"):
            listing.write_text(listing.read_text().replace("a red", HOSTILE.replace('"', "'")))
        (tmp_path / "run" / "rollouts").touch()
        wait_for(browser, "document.body.textContent.includes('onerror')")
        assert browser.title != "hacked"
        assert not browser.find_elements("css selector", "h3 img")

        shutil.rmtree(tmp_path / "run")
        wait_for(browser, "document.body.textContent.includes('the run folder is gone')")
        picture("gone")
        refused = [line for line in browser.get_log("browser") if "Content Security" in str(line)]
        assert not refused
