"""Every block of README.md runs, in its order, in a fresh folder: what one leaves behind, the next can use."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.smallest_run import DEMO, write_smaller_demo

ROOT = Path(__file__).parents[1]
# what needs the network, eight GPUs or this suite is only shown; anything else runs as it stands in the page
DRY = {
    "bash download_weights.sh": "--dry_run",
    "bash run_post_train.sh": "--dry_run",
    "NUM_GPUS=1 CONFIG=configs/hunyuan15_1gpu_lora.yaml bash run_post_train.sh": "--dry_run",
    "make test": "--dry-run",
}
# of the demo, so that it takes seconds; its last checkpoint gets the number that the page says as a second name
LAST_STEP = 2


@dataclass(frozen=True)
class Block:
    """A fenced block of Python, to run or to save, or an indented one of commands."""

    language: str
    text: str
    file: str = ""  # to save it as

    def commands(self) -> list[str]:
        """One per line, without comments; a line may go on after a backslash."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


def blocks(page: str) -> list[Block]:
    """All blocks that run, in order; a block without a language is a picture of something."""
    found = []
    fence = r"^```(\w*)\n(.*?)^```$"
    indentation = r"^((?: {4}[^\n]*\n)+)"
    for match in re.finditer(f"{fence}|{indentation}", page, re.DOTALL | re.MULTILINE):
        language, fenced, indented = match.groups()
        if indented:
            found.append(Block("bash", re.sub("^ {4}", "", indented, flags=re.MULTILINE)))
        elif language:
            saved = re.search(r"Save this as `([\w.]+)`:\s*$", page[: match.start()])
            found.append(Block(language, fenced, saved[1] if saved else ""))
    return found


def shell_script(block: Block) -> str:
    """The commands of a block, for a shell that stops at the first that fails."""
    lines = ["set -euo pipefail"]
    for command in block.commands():
        flags = [flag for start, flag in DRY.items() if command.startswith(start)]
        lines.append(" ".join([command, *flags]))
    return "\n".join(lines)


def test_the_page_is_read_as_a_reader_does():
    page = (ROOT / "README.md").read_text()
    found = blocks(page)
    assert [block.language for block in found].count("python") == page.count("```python")
    assert found[0].commands() == ["make demo"]
    scripts = "\n".join(shell_script(block) for block in found if block.language == "bash")
    for command, flag in DRY.items():
        lines = [line for line in scripts.splitlines() if line.startswith(command)]
        assert lines and all(line.endswith(f" {flag}") for line in lines)
    assert "generate.py" in scripts
    assert "my_reward.py" in [block.file for block in found]
    demo = yaml.safe_load(DEMO.read_text())
    assert re.findall(r"step-\d+", page) == [f"step-{demo['max_steps']:06d}"]


@pytest.fixture
def fresh(tmp_path):
    """The repository as it is cloned, with an environment in place and a demo of small batches."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git repository")
    folder = tmp_path / "clone"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "research/", "docs/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    prompts = (folder / "assets/tiny/prompts_train.txt").read_text().splitlines()[:4]
    (folder / "few_prompts.txt").write_text("\n".join(prompts) + "\n")
    recipe = folder / "configs" / DEMO.name
    write_smaller_demo(recipe, max_steps=LAST_STEP, train_prompts=["few_prompts.txt"])

    environment = folder / ".venv"
    environment.mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".installed":
            (environment / part.name).symlink_to(part)
    (environment / ".installed").touch()  # what make does last
    return folder


@pytest.mark.slow
def test_every_block_runs_in_order(fresh):
    """Adds the run to what check_commands reads: programs, snippets, and what they leave to each other."""
    environment = os.environ | {"PYTHONPATH": str(fresh), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.prefix) / 'bin'}:{environment['PATH']}"
    page = (fresh / "README.md").read_text()
    for number, block in enumerate(blocks(page)):
        if block.file:
            (fresh / block.file).write_text(block.text)
            continue
        program = [sys.executable, "-c", block.text]
        if block.language == "bash":
            program = ["bash", "-c", shell_script(block)]
        ended = subprocess.run(
            program,
            cwd=fresh,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, (
            f"{block.text}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )
        if number == 0:  # the demo is done
            (name,) = re.findall(r"step-\d+", page)
            (fresh / "outputs/tiny_cpu/checkpoints" / name).symlink_to(f"step-{LAST_STEP:06d}")
    assert (fresh / "outputs/tiny_cpu/report.html").is_file()
    assert len(list((fresh / "outputs/generated").glob("*.mp4"))) == 4
    assert (fresh / "outputs/calm/report.html").is_file()
