"""Commands in the docs: all of them are correct, and wrong ones are detected."""

import pytest

from tests import check_commands as script


@pytest.mark.filterwarnings(
    "ignore:.*found in sys.modules:RuntimeWarning"
)  # tools that were imported before
def test_the_commands_of_all_pages_name_what_exists(capsys):
    assert script.main([]) == 0, capsys.readouterr().out
    count = int(capsys.readouterr().out.split()[0])
    assert count > 40


@pytest.mark.parametrize("command, words", [
    ("make coffee", "the Makefile has no coffee"),
    ("python post_tain.py --eta 1", "there is no post_tain.py"),
    ("python post_train.py --config configs/none.yaml", "there is no configs/none.yaml"),
    (".venv/bin/python post_train.py --etta 0.5", "post_train.py has no --etta"),
    ("OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 post_train.py --eta=0.5 --etta=1", "post_train.py has no --etta"),
    ("python -m sage_grpo.tools.plan --gpus 8 --eta 0.5 --speed 9", "sage_grpo.tools.plan has no --speed"),
    ("python -m studies.nothing --list", "there is no module studies.nothing"),
    (".venv/bin/python -m studys.ablate --list", "there is no module studys.ablate"),
    ("python -m sage_grpo.tools --help", "there is no module sage_grpo.tools"),
    ("python -m research.studies.ablate --list --lost", "research.studies.ablate has no --lost"),
    ("python -m research.studies.ablate --recipe research/studies/none.yaml", "there is no research/studies/none.yaml"),
    ("python -m research.benchmarks.iteration --iterations 3 --output research/benchmarks/DATE-a.md", ""),
    ("python -m pytest tests/none", "there is no tests/none"),
    ("python -m pytest tests/train -q --strange", ""),
    ("python generate.py --prompt 'a --strange one'", ""),
    ("bash download_weights.sh --dry_run", ""),
    ("bash download_weights.sh --dry", "download_weights.sh has no --dry"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_what_is_wrong_with_a_command_is_said(command, words):
    assert script.problem(command) == words


def test_commands_are_found_in_blocks_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "python in_text.py\n\n    python a.py --x 1 \\\n        --y 2     # why\n    make demo\n\n"
        "```\n$ bash b.sh\nnot a command\n```\n```python\npython = 3\n```\n    torchrun c.py     (two of them)\n"
    )
    assert list(script.commands(page)) == [
        "python a.py --x 1 --y 2",
        "make demo",
        "bash b.sh",
        "torchrun c.py",
    ]
