"""The architecture as a rule: imports go one way, and the maths depends on torch alone."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sage_grpo"
LAYERS = [{"algo", "parallel"}, {"models", "rewards", "worlds", "data"}, {"train"}, {"tools"}]


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by absolute name"
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def layer(name: str) -> int | None:
    return next((depth for depth, names in enumerate(LAYERS) if name in names), None)


@pytest.mark.parametrize("path", sorted((PACKAGE / "algo").glob("*.py")), ids=lambda path: path.name)
def test_algo_imports_only_torch_and_the_standard_library(path):
    allowed = sys.stdlib_module_names | {"torch"}
    foreign = {
        m for m in imported_modules(path) if m.split(".")[0] not in allowed and not m.startswith("sage_grpo.algo")
    }
    assert not foreign


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        home = layer(path.relative_to(PACKAGE).parts[0])
        for module in imported_modules(path):
            parts = module.split(".")
            target = layer(parts[1]) if parts[0] == "sage_grpo" and len(parts) > 1 else None
            if home is not None and target is not None and target > home:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_rewards_never_see_the_gold_metric():
    gold = {f"sage_grpo.worlds.{name}" for name in ("oracle", "search", "fit", "quality")}
    wrong = [str(path) for path in (PACKAGE / "rewards").glob("*.py") if imported_modules(path) & gold]
    assert not wrong
