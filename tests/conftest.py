"""How the suite runs: the processes, what they have in common, and the last line."""

import gc
import os
import signal
from collections import Counter

# before torch: as in `make test`, since last bits depend on the number of threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
# spinning threads slow a busy machine down tenfold
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# before imageio: to shield ffmpeg from Ctrl-C it would fork a process of gigabytes for each video it reads
os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")

import pytest

# what is started in the background ignores Ctrl-C, or with nohup a hangup, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MAX_PROCESSES = 16


def pytest_configure(config):
    config.left_to_test_all = 0
    if not hands_out_tests(config):
        gc.disable()  # until all tests are collected: imports leave much, but no garbage
        config.pluginmanager.import_plugin("tests.shared_fixtures")
        choose_examples(quick="not slow" in config.option.markexpr)


def hands_out_tests(config):
    """Whether this process runs no test itself: xdist has others do it, and all of them wait until it has started."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def choose_examples(quick):
    """`make test` draws fewer examples than `make test-all`, always the same ones."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "suite",
        max_examples=50 if quick else 100,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Processes that run tests: one more than processors, since a test waits a quarter of its time for others.

    Each takes 13 seconds to start and up to 3 GB of memory.
    """
    processors = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(processors + 1, memory // (3 * 1024**3), MAX_PROCESSES))


def pytest_collection_finish():
    """Leave out of every later garbage collection what lives until the end: the packages and thousands of tests."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_deselected(items):
    """Count the tests that `-m "not slow"` leaves out."""
    for item in items:
        item.config.left_to_test_all += item.get_closest_marker("slow") is not None


def pytest_sessionfinish(session):
    """A process of xdist tells the first one how many it left out; all of them collect the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_to_test_all"] = session.config.left_to_test_all


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    left = getattr(node, "workeroutput", {}).get("left_to_test_all", 0)
    node.config.left_to_test_all = max(node.config.left_to_test_all, left)


def pytest_unconfigure(config):
    """The last line of a run: how many tests it left to `make test-all`, how many it skipped, and for want of what."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    skipped = reporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    wanting = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    reporter.write_line(
        f"{config.left_to_test_all} tests left to make test-all; "
        f"{len(skipped)} skipped{wanting and f': {wanting}'}"
    )
