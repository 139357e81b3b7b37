"""Architecture rules: imports go one way, without cycles, and what should start fast does."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from subprocess import run

import pytest

from tests.smallest_run import slow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sage_grpo"
LAYERS = [  # folders and modules of the package; each imports from its own layer and from those before it
    {"algo", "background", "environment", "escape", "exit_codes", "files", "installed", "intervals"}
    | {"parallel", "plugins", "rng"},
    {"data", "models", "rewards", "worlds"},
    {"config"},
    {"runs"},
    {"train"},
    {"tools"},
]
OUTSIDE = {"research", "scripts", "tests", "post_train", "generate"}
REGISTRY = "sage_grpo.rewards.registry"  # names the world's reward as well
GOLD = {f"sage_grpo.worlds.shapes.{name}" for name in ("judge", "oracle", "search", "fit", "world")}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def is_for_a_type_checker(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    test = getattr(node, "test", None)
    return isinstance(node, ast.If) and "TYPE_CHECKING" in (
        getattr(test, "id", None),
        getattr(test, "attr", None),
    )


def import_statements(node: ast.AST, in_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those that run; what only a type checker sees is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif is_for_a_type_checker(child):
            for other in child.orelse:
                yield from import_statements(ast.Module([other], []), in_functions)
        elif in_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from import_statements(child, in_functions)


def imported_modules(path: Path, in_functions: bool = True) -> set[str]:
    """Every name that a file imports, `a.b` and `a.b.c` for `from a.b import c`, which may be a module or not."""
    modules = set()
    for node in import_statements(parsed(path.read_text()), in_functions):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        else:
            assert node.level == 0 and node.module, f"{path}: import by absolute name"
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def named_modules(path: Path) -> set[str]:
    """Modules that a file names in a string: rows of tables (`module:attribute`), programs that it starts."""
    strings = (
        node.value
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    matches = (re.fullmatch(r"(sage_grpo(?:\.\w+)+)(?::\w+)?", text) for text in strings)
    return {match[1] for match in matches if match}


def module_files(package: Path) -> dict[str, Path]:
    """The modules of a package by name."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def import_graph(*packages: Path, in_functions: bool) -> dict[str, set[str]]:
    """For each module of some packages, the modules of these packages that it imports or names in a string."""
    files = {name: path for package in packages for name, path in module_files(package).items()}
    return {
        name: (imported_modules(path, in_functions) | named_modules(path)) & files.keys()
        for name, path in files.items()
    }


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """All that a module imports, directly or through others."""
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def layer(module: str) -> int | None:
    """The layer of a module of the package; None for the package itself."""
    _, *parts = module.split(".")
    if not parts:
        return None
    depths = [depth for depth, names in enumerate(LAYERS) if parts[0] in names]
    assert len(depths) == 1, f"{parts[0]} has no place in LAYERS; give it one"
    return depths[0]


def upward_imports(graph: Mapping[str, set[str]]) -> list[str]:
    places = {module: layer(module) for module in graph}
    pairs = [
        (home, target)
        for home in graph
        for target in graph[home]
        if None not in (places[home], places[target])
    ]
    return [f"{home} imports {target}" for home, target in pairs if places[target] > places[home]]


def import_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_go_one_way():
    graph = import_graph(PACKAGE, in_functions=True)
    assert {
        "sage_grpo.config",
        "sage_grpo.train.trainer",
        "sage_grpo.models.hunyuan15.text",
    } <= graph.keys()
    assert not upward_imports(graph)


def test_no_modules_import_each_other():
    graph = import_graph(PACKAGE, in_functions=False)
    assert sum(map(len, graph.values())) > 100
    assert not import_cycle(graph)


def test_every_layer_exists():
    there = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set().union(*LAYERS) <= there


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "algo").glob("*.py")), ids=lambda path: path.name
)
def test_algo_imports_only_torch_and_the_standard_library(path):
    allowed = sys.stdlib_module_names | {"torch"}
    foreign = {
        m
        for m in imported_modules(path)
        if m.split(".")[0] not in allowed and not m.startswith("sage_grpo.algo")
    }
    assert not foreign


def test_the_package_imports_nothing_that_is_built_on_it():
    assert all((ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file() for name in OUTSIDE)
    wrong = {
        f"{name} imports {module}"
        for name, path in module_files(PACKAGE).items()
        for module in imported_modules(path)
        if module.split(".")[0] in OUTSIDE
    }
    assert not wrong


def test_rewards_never_see_the_gold_metric():
    """Neither directly nor through another module."""
    graph = import_graph(PACKAGE, in_functions=True)
    assert graph.keys() >= GOLD
    rewards = [name for name in graph if name.startswith("sage_grpo.rewards.") and name != REGISTRY]
    rewards.append("sage_grpo.worlds.shapes.reward")
    assert len(rewards) > 5
    assert not {
        f"{name} reaches {gold}" for name in rewards for gold in reached(graph, name) & GOLD
    }


@pytest.mark.parametrize(
    "modules, unwanted",
    [
        (
            "sage_grpo.config, sage_grpo.config.parse",
            {"torch", "numpy", "diffusers", "transformers"},
        ),
        slow("post_train, sage_grpo.train.build", {"matplotlib"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(modules, unwanted):
    code = f"import sys, {modules}; print(*sorted({unwanted!r} & sys.modules.keys()))"
    process = run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []


# the rules themselves, on packages that break them


@pytest.fixture
def package(tmp_path):
    """package(module=source, ...) writes a package named sage_grpo; `__` in a name is a dot."""

    def write(**sources):
        for name, source in {"__init__": "", **sources}.items():
            path = (
                tmp_path
                / "sage_grpo"
                / f"{name if name == '__init__' else name.replace('__', '/')}.py"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path / "sage_grpo"

    return write


@pytest.mark.parametrize("source", [
    "import sage_grpo.train.trainer",
    "from sage_grpo.train.trainer import Trainer",
    "from sage_grpo.train import trainer",
    "def build():\n    from sage_grpo.train import trainer",
    "class Late:\n    def build(self):\n        import sage_grpo.train.trainer",
    "if True:\n    import sage_grpo.train.trainer",
    "try:\n    import sage_grpo.train.trainer\nexcept ImportError:\n    pass",
    "TABLE = {'a': 'sage_grpo.train.trainer:Trainer'}",
    "command = ['python', '-m', 'sage_grpo.train.trainer']",
    "if TYPE_CHECKING:\n    pass\nelse:\n    import sage_grpo.train.trainer",
])  # fmt: skip
@pytest.mark.parametrize("home", ["rng", "models__lora", "config__fields"])
def test_an_upward_import_is_found(package, home, source):
    graph = import_graph(package(train__trainer="", **{home: source}), in_functions=True)
    assert upward_imports(graph) == [
        f"sage_grpo.{home.replace('__', '.')} imports sage_grpo.train.trainer"
    ]


@pytest.mark.parametrize("home, source", [
    ("tools__report", "import sage_grpo.train.trainer"),
    ("train__update", "import sage_grpo.train.trainer"),
    ("rng", "if TYPE_CHECKING:\n    from sage_grpo.train.trainer import Trainer"),
    ("rng", "if typing.TYPE_CHECKING:\n    from sage_grpo.train.trainer import Trainer"),
])  # fmt: skip
def test_other_imports_are_not_upward(package, home, source):
    assert not upward_imports(
        import_graph(package(train__trainer="", **{home: source}), in_functions=True)
    )


def test_a_module_without_a_layer_is_pointed_out(package):
    with pytest.raises(AssertionError, match="novelty has no place in LAYERS"):
        upward_imports(import_graph(package(novelty="import torch"), in_functions=True))


def test_a_circle_is_found_unless_a_function_or_a_type_checker_closes_it(package):
    steps = {"train__a": "import sage_grpo.train.b", "train__b": "from sage_grpo.train.c import c"}
    for closing, found in {
        "from sage_grpo.train import a": True,
        "class C:\n    import sage_grpo.train.a": True,
        "def f():\n    import sage_grpo.train.a": False,
        "if TYPE_CHECKING:\n    import sage_grpo.train.a": False,
    }.items():
        cycle = import_cycle(import_graph(package(**steps, train__c=closing), in_functions=False))
        assert set(cycle) == ({f"sage_grpo.train.{name}" for name in "abc"} if found else set())
