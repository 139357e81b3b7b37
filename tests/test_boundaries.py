"""Every program answers a path that it cannot use with one sentence and exit code 2, before it does anything."""

import ast
from pathlib import Path

import pytest

import generate
import post_train
from sage_grpo.tools import diagnose, evaluate
from sage_grpo.tools.doctor import __main__ as doctor
from sage_grpo.tools.plan import __main__ as plan
from sage_grpo.tools.report import __main__ as report
from scripts import (
    audit_reward,
    convert_weights,
    encode_prompts,
    export_checkpoint,
    render_images,
)
from tests.programs import exit_code
from tests.tools.fake_run import make_run

ROOT = Path(__file__).parents[1]
# programs that run before anything is installed, and have a boundary of their own
FIRST = (
    "scripts/verify_weights.py",
    "scripts/prompt_template.py",
    "scripts/post_train/rendezvous_probe.py",
)

# FILE is a file where a folder is expected, FOLDER a folder where a file is, RUN a run
COMMANDS = {
    "config": (post_train, "--config FOLDER"),
    "prompts": (post_train, "--train_prompts FOLDER --output_dir FOLDER/run"),
    "clips": (generate, "--prompt x --output_path FILE"),
    "below a file": (generate, "--prompt x --output_path FILE/clips"),
    "prompt file": (generate, "--prompt_file FOLDER"),
    "a long name": (generate, "--prompt x --checkpoint_path LONG"),
    "doctor": (doctor, "--output FILE"),
    "evaluation": (evaluate, "--output FILE"),
    "plan": (plan, "--config FOLDER"),
    "page": (report, "RUN --output FOLDER"),
    "run": (diagnose, "FILE"),
    "audit": (audit_reward, "--output FILE"),
    "weights": (convert_weights, "FILE"),
    "cache": (encode_prompts, "--prompt_cache FILE"),
    "export": (export_checkpoint, "--checkpoint FOLDER --output FILE"),
    "no checkpoint": (export_checkpoint, "--checkpoint FILE --output FOLDER/out"),
    "images": (render_images, "FILE"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, capsys, undrawn, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("precious")
    (tmp_path / "FOLDER").mkdir()
    if name == "page":
        make_run(tmp_path / "RUN", iterations=2, every=2, prompts=3)
    program, words = COMMANDS[name]
    before = sorted(tmp_path.rglob("*"))

    words = [word.replace("LONG", "x" * 300) for word in words.split()]
    assert exit_code(program.main, words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "Errno" not in lines[0]
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "FILE").read_text() == "precious"


def test_every_program_has_the_one_boundary():
    """`answering` decorates each `main`; post_train.py, whose refusals torchrun hears, uses its parts."""
    without = []
    for file in sorted(
        [*ROOT.glob("*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("sage_grpo/tools/**/*.py")]
    ):
        name = file.relative_to(ROOT).as_posix()
        tree = ast.parse(file.read_text())
        mains = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
        ]
        decorators = {
            ast.unparse(decorator).partition("(")[0]
            for main in mains
            for decorator in main.decorator_list
        }
        is_program = "if __name__ == '__main__':" in ast.unparse(tree)
        if is_program and "answering" not in decorators and name not in FIRST:
            without.append(name)
    assert without == ["post_train.py"]
    assert "except USER_ERRORS as error:" in (ROOT / "post_train.py").read_text()
