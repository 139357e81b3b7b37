"""Pages without figures, except for tests that ask for `drawn`."""

import pytest


@pytest.fixture
def drawn():
    """For tests that look at figures."""


@pytest.fixture(autouse=True)
def figures(request):
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("undrawn")
