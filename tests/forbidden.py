"""Finds forbidden code in this repository's syntax trees: executing file contents, or code that a setting names.

It catches slips and hasty changes, not deliberate obfuscation: an alias is followed, a riddle is not.
"""

import ast

TORCH_FILES = (
    "sage_grpo/files/torch_files.py"  # the one place where published torch files are opened
)
RANKS = "sage_grpo/parallel/ranks.py"  # the one place where ranks, which trust each other, exchange Python objects
PLUGINS = "sage_grpo/plugins.py"  # the one place where a module is imported by name, out of a table in the code

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "joblib",
    "builtins",
}
NAMES = {
    "eval",
    "exec",
    "compile",
    "__builtins__",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
}
NAMES |= {
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "torch.hub",
    "torch.package",
    "torch.distributed.rpc",
}
YAML = {
    "safe_load",
    "CSafeLoader",
    "safe_dump",
    "YAMLError",
    # gives these events and makes nothing of them
    "parse",
    "AliasEvent",
    "NodeEvent",
    "ScalarEvent",
    "MappingStartEvent",
    "CollectionStartEvent",
    "CollectionEndEvent",
}
ARGUMENTS = {
    "weights_only": True,
    "allow_pickle": False,
    "shell": False,
    "trust_remote_code": False,
}
DCP = "torch.distributed.checkpoint"
LOAD = "sage_grpo.plugins.load"


def forbidden(source: str, file: str = "") -> list[str]:
    """One sentence for each thing that the source of `file` must not do."""
    tree = ast.parse(source)
    names = _Names(tree)
    nodes = list(ast.walk(tree))
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    found = []
    for node in nodes:
        complaints = [_name(name, calls.get(id(node)), file, names) for name in names.used(node)]
        complaints += [_pair(key, value) for key, value in _pairs(node)]
        if isinstance(node, ast.Call):
            complaints.append(_call(node, names))
        found += [f"{file}:{node.lineno}: {text}" for text in complaints if text]
    return found


def _name(name: str, call: ast.Call | None, file: str, names: "_Names") -> str | None:
    """What is wrong with a name by itself, or unless it is called in the one permitted way."""
    root, _, last = name.split(".")[0], *name.rpartition(".")[1:]
    literal = call is not None and bool(call.args) and isinstance(call.args[0], ast.Constant)
    if root in MODULES or any(name == bad or name.startswith(f"{bad}.") for bad in NAMES):
        return f"{name} runs what it is given"
    if name.endswith(".*"):
        return f"{name} hides which names there are"
    if root == "yaml" and name != "yaml" and name.split(".")[1] not in YAML:
        return f"{name} makes objects of any class; use yaml.safe_load"
    if name in ("importlib.import_module", "__import__") and not literal and file != PLUGINS:
        return f"{name} needs the name of the module in place"
    if name == LOAD and call is None:
        return f"{name} must be called where it is named, with its table"
    if name.startswith(DCP):
        reader = call and next((k.value for k in call.keywords if k.arg == "storage_reader"), None)
        safe = isinstance(reader, ast.Call) and (names.of(reader.func) or "").endswith(
            ".HuggingFaceStorageReader"
        )
        if last in ("FileSystemReader", "FsspecReader") or (
            last in ("load", "load_state_dict") and not safe
        ):
            return f"{name} unpickles its metadata; read safetensors"
        return None
    if root == "torch" and last == "load":
        safe = call is not None and any(
            k.arg == "weights_only" for k in call.keywords
        )  # _pair looks at its value
        if name != "torch.load" or not safe or file != TORCH_FILES:
            return f"{name} is for {TORCH_FILES} alone, with weights_only=True"
    if root == "torch" and last.endswith(("_object", "_object_list")) and file != RANKS:
        return f"{name} unpickles what it receives; it is for {RANKS} alone"
    return None


def _pair(key: str, value: ast.expr) -> str | None:
    """What is wrong with an argument, or with an entry of a dictionary that may become one."""
    if key in ARGUMENTS and not (isinstance(value, ast.Constant) and value.value is ARGUMENTS[key]):
        return f"{key} must be {ARGUMENTS[key]}"
    return None


def _call(call: ast.Call, names: "_Names") -> str | None:
    """What is wrong with a call because it does not show all that it hands over, or which name it looks up."""
    name = names.of(call.func) or ""
    most = {"subprocess": 1, "numpy": 2}.get(name.split(".")[0])
    hidden = any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(a, ast.Starred) for a in call.args
    )
    if (name == "numpy.load" or name.startswith("subprocess.")) and (
        hidden or len(call.args) > most
    ):
        return f"{name} must show its arguments by name"
    if name == LOAD and not (
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id.isupper()
    ):
        return f"{name} takes a table of the code, named by a constant"
    if (
        name == "getattr"
        and not isinstance(call.args[1], ast.Constant)
        and names.is_imported(call.args[0])
    ):
        return "getattr on a module needs the name in place"
    return None


def _pairs(node: ast.AST) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.Call):
        return [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(key.value, value) for key, value in pairs if isinstance(key, ast.Constant)]
    return []


class _Names:
    """Full names of what a module uses, through the aliases of imports and of plain assignments."""

    def __init__(self, tree: ast.Module) -> None:
        self.aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.aliases |= {a.asname: a.name for a in node.names if a.asname}
                self.aliases |= {
                    root: root
                    for root in (a.name.split(".")[0] for a in node.names if not a.asname)
                }
            elif isinstance(node, ast.ImportFrom):
                self.aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self._imported = set(self.aliases)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = self.of(node.value)
                if name and name.split(".")[0] in {
                    alias.split(".")[0] for alias in self.aliases.values()
                }:
                    self.aliases[node.targets[0].id] = name

    def of(self, node: ast.AST) -> str | None:
        """The full name of an expression that is one."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.of(node.value)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.Call) and all(
            isinstance(argument, ast.Constant) for argument in node.args[-1:]
        ):
            called = self.of(node.func)
            if called == "getattr" and len(node.args) == 2:
                owner = self.of(node.args[0])
                return f"{owner}.{node.args[1].value}" if owner else None
            if called in ("importlib.import_module", "__import__") and node.args:
                return str(node.args[0].value)
        return None

    def is_imported(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self._imported

    def used(self, node: ast.AST) -> list[str]:
        """The names that a node imports or reads."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            return [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(getattr(node, "ctx", None), ast.Store):
            return []
        name = self.of(node)
        return [name] if name else []
