"""Benchmarks answer SIGTERM in their own way; other tests of the same process must not inherit that."""

import signal

import pytest


@pytest.fixture(autouse=True)
def restored_signal():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
