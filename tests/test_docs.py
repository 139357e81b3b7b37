"""The docs stay accurate: links resolve, and the files, modules and tests they name exist."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.check_commands import PAGES as PATTERNS
from tests.check_commands import is_module

ROOT = Path(__file__).parents[1]
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
FOLDERS = "sage_grpo|scripts|configs|assets|tests|docs|research"
PACKAGE_FOLDERS = "algo|config|files|models|rewards|train|tools|parallel|data|worlds|runs"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_all_pages_are_checked():
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    expected = {
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "assets/tiny/README.md",
        "docs/method.md",
        "research/log.md",
        "research/benchmarks/scaling.md",
        "research/studies/results.md",
    }
    assert expected <= names


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    pages = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
    assert not [page for page in pages if f"({page}" not in text]


def test_the_readme_names_every_folder():
    text = (ROOT / "README.md").read_text()
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git repository")
    folders = {
        file.split("/")[0]
        for file in listed.stdout.splitlines()
        if "/" in file and not file.startswith(".")
    }
    assert {"sage_grpo", "research", "tests"} <= folders
    assert not [
        folder for folder in sorted(folders) if not re.search(rf"(?<![\w/]){folder}/", text)
    ]


def anchors(page: Path) -> set[str]:
    """What can follow # in a link to a page: its headings in lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist; addresses on the web are not followed."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        if "://" in target:
            continue
        if not linked.exists() or (heading and heading not in anchors(linked)):
            broken.append(target)
    return broken


@every_page
def test_links_lead_somewhere(page):
    assert not broken_links(page)


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One, and `two`\n[a](#one-and-two) [b](page.md#one-and-two) [c](https://x.y/none#z)\n"
        "[d](#one) [e](none.md) [f](page.md#three)\n```\n# three\n```\n"
    )
    assert broken_links(page) == ["#one", "none.md", "page.md#three"]


def test_tests_that_the_pages_name_exist():
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    }
    there = {
        file: (ROOT / file).read_text() if (ROOT / file).is_file() else "" for file, _ in named
    }
    missing = [f"{file}::{test}" for file, test in named if f"def {test}" not in there[file]]
    assert len(named) > 30 and not missing


def missing_files(text: str) -> list[str]:
    """Names in backticks that begin in a folder of ours; `RUN/...`, `outputs/...` and patterns are somebody else's."""
    names = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)", text)
    packaged = re.findall(rf"`((?:{PACKAGE_FOLDERS})/[\w/]+\.py)\b", text)
    missing = [
        name for name in names if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))
    ]
    return missing + [name for name in packaged if not (ROOT / "sage_grpo" / name).exists()]


def missing_modules(text: str) -> list[str]:
    """Modules after `python -m`; capital letters stand for a name."""
    return [
        name
        for name in re.findall(r"python -m\s+([\w.]+\w)", text)
        if name.islower() and not is_module(name)
    ]


@every_page
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text()
    assert not missing_files(text) + missing_modules(text)


def test_what_is_missing_is_noticed():
    wrong = [
        "research/studies/none.py",
        "research/tiny/none.py",
        "research/benchmarks/none.py",
        "sage_grpo/none",
        "runs/none.py",
    ]
    wrong += ["models/hunyuan15/none.py"]
    right = [
        "research/studies/records/first.jsonl",
        "research/tiny/tiny.py",
        "research/benchmarks/results/2026-",
        "sage_grpo/config/fields.py",
        "runs/folder.py",
    ]
    right += ["models/hunyuan15/text.py", "outputs/none.py", "RUN/none.json"]
    text = "".join(f"`{name}` and " for name in (*wrong, *right))
    assert missing_files(text) == wrong
    text = "`python -m research.studies.none` and `python -m\nresearch.studies.ablate`"
    text += " and python -m sage_grpo.tools.NAME"
    assert missing_modules(text) == ["research.studies.none"]
