"""README and docs stay true: links lead somewhere, and the map names every file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "assets" / "tiny" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_the_map_names_every_file():
    text = (ROOT / "README.md").read_text()
    files = [*(ROOT / "sage_grpo").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "docs").glob("*.md")]
    missing = [path.name for path in files if path.name != "__init__.py" and path.name not in text]
    assert not missing


def test_nothing_named_in_the_map_is_missing():
    block = re.search(r"## Map of the code\n+```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    names = re.findall(r"^\s*([\w./-]+\.\w+)\s{2,}", block, re.MULTILINE)
    here = {path.name for path in ROOT.rglob("*") if ".venv" not in path.parts} | {"README.md"}
    assert names and not [name for name in names if Path(name).name not in here]


def test_tests_that_the_pages_name_exist():
    named = {match for page in PAGES for match in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())}
    there = {file: (ROOT / file).read_text() if (ROOT / file).is_file() else "" for file, _ in named}
    missing = [f"{file}::{test}" for file, test in named if f"def {test}" not in there[file]]
    assert len(named) > 30 and not missing
