"""What reruns studies and benchmarks is left to `make test-all`: no promise of the package depends on it.

The tables of README and docs are compared with the planner in `make test` as well.
"""

from pathlib import Path

import pytest

FAST = ("test_recipe_tables.py",)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.name not in FAST:
            item.add_marker(pytest.mark.slow)
