"""No code in this repository executes file contents or code that a setting names."""

import ast
from pathlib import Path

import pytest

from sage_grpo.models.registry import BACKBONES
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.worlds.registry import WORLDS
from tests.forbidden import PLUGINS, RANKS, TORCH_FILES, forbidden

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "sage_grpo",
    "scripts",
    "research",
    "tests/chaos",
)
FILES = sorted(ROOT.glob("*.py")) + sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_does_nothing_forbidden(path):
    assert not forbidden(path.read_text(), path.relative_to(ROOT).as_posix())


def test_all_code_is_looked_at_and_the_three_exceptions_are_needed():
    names = {path.relative_to(ROOT).as_posix() for path in FILES}
    assert {
        "post_train.py",
        "generate.py",
        "scripts/convert_weights.py",
        "sage_grpo/train/trainer.py",
    } <= names
    assert {
        "research/tiny/pretrain.py",
        "research/studies/ablate.py",
        "research/benchmarks/transformer.py",
        "tests/chaos/chaos.py",
    } <= names
    for file in (TORCH_FILES, RANKS, PLUGINS):
        assert forbidden((ROOT / file).read_text(), "elsewhere.py"), (
            f"{file} needs its exception no more"
        )


@pytest.mark.parametrize(
    "table", [BACKBONES, REWARDS, WORLDS], ids=["backbones", "rewards", "worlds"]
)
def test_a_table_names_code_of_the_repository_alone(table):
    assert table
    for row in table.values():
        module, _, attribute = row.partition(":")
        source = ROOT / f"{module.replace('.', '/')}.py"
        assert module.startswith("sage_grpo.")
        defined = [
            node.name for node in ast.parse(source.read_text()).body if hasattr(node, "name")
        ]
        assert attribute in defined, row


HOSTILE = """
import pickle
import pickle as p
from pickle import loads
import _pickle
import cPickle
import dill
import cloudpickle
from cloudpickle import load
import shelve
import marshal
import joblib
import importlib; importlib.import_module("pickle")
__import__("dill")
import torch; torch.load("x")
import torch; torch.load("x", weights_only=False)
import torch; torch.load("x", weights_only=flag)
import torch; torch.load("x", weights_only=1)
import torch; torch.load("x", **{"weights_only": False})
import torch; torch.load("x", **settings)
import torch as t; t.load("x")
from torch import load
from torch import load as read
import torch; getattr(torch, "load")("x")
import torch; getattr(torch, name)("x")
import torch; read = torch.load
import torch; t = torch; t.load("x")
import torch; map(torch.load, files)
import torch.serialization; torch.serialization.load("x", weights_only=True)
from torch import serialization as s; s.load("x")
import torch; torch.jit.load("x")
from torch import hub
import torch.package as p; p.PackageImporter("x")
from torch.distributed import rpc
from torch import *
import numpy as np; np.load("x", allow_pickle=True)
import numpy as np; np.load("x", allow_pickle=flag)
import numpy as np; np.load("x", None, True)
import numpy as np; np.load("x", **settings)
from numpy import load; load("x", allow_pickle=True)
import yaml; yaml.load("x", Loader=yaml.SafeLoader)
import yaml; yaml.unsafe_load("x")
import yaml; yaml.full_load("x")
import yaml; yaml.load_all("x", yaml.Loader)
from yaml import unsafe_load
from yaml import load as safe_load
import yaml as y; y.UnsafeLoader("x")
eval("1")
exec("1")
f = eval
compile("1", "x", "eval")
__builtins__["eval"]("1")
import builtins
import os; os.system("x")
from os import system
import os as o; o.popen("x")
import os; getattr(os, "system")("x")
import subprocess; subprocess.run("x", shell=True)
import subprocess; subprocess.run("x", shell=flag)
import subprocess as s; s.Popen("x", 0, None, None, None, None, None, True, True)
import subprocess; subprocess.run("x", **settings)
from subprocess import Popen; Popen("x", shell=True)
import subprocess; subprocess.getoutput("x")
import subprocess; subprocess.getstatusoutput("x")
import functools, subprocess; functools.partial(subprocess.run, shell=True)
settings = {"shell": True}
settings = dict(shell=True)
import asyncio; asyncio.create_subprocess_shell("x")
model.from_pretrained("x", trust_remote_code=True)
model.from_pretrained("x", trust_remote_code=flag)
settings = {"trust_remote_code": True}
import importlib; importlib.import_module(name)
import importlib; importlib.import_module("a." + name)
from importlib import import_module; import_module(name)
from importlib import import_module as get; map(get, names)
__import__(name)
from sage_grpo import plugins; plugins.load(table, name)
from sage_grpo import plugins; plugins.load({"a": text}, "a")
from sage_grpo import plugins; plugins.load(read_object(path), name)
from sage_grpo import plugins; get = plugins.load
from sage_grpo.plugins import load
import torch.distributed.checkpoint as dcp; dcp.load(state, checkpoint_id="x")
import torch.distributed.checkpoint as dcp; dcp.load(state, storage_reader=dcp.FileSystemReader("x"))
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint import FileSystemReader
import torch.distributed.checkpoint as dcp; dcp.load_state_dict(state, storage_reader=reader)
import torch.distributed as dist; dist.all_gather_object(found, mine)
from torch.distributed import broadcast_object_list
""".strip().splitlines()

PERMITTED = """
import json; json.load(file); json.loads("{}")
import numpy as np; np.load("x"); np.load("x", allow_pickle=False)
import yaml; yaml.safe_load("x"); yaml.safe_dump({})
import yaml as y; y.safe_load("x")
from yaml import safe_load; safe_load("x")
import ast; ast.literal_eval("1")
model.eval(); block.compile()
import re; re.compile("x")
import torch; torch.compile(model)
from safetensors.torch import load_file; load_file("x")
import subprocess; subprocess.run(["x"]); subprocess.Popen(["x"], shell=False, stdout=subprocess.PIPE)
import os; os.environ["x"]; os.replace("a", "b")
model.from_pretrained("x", trust_remote_code=False)
import importlib; importlib.import_module("json")
import torch; getattr(torch, "float32")
from sage_grpo import plugins; plugins.load(TABLE, name)
getattr(config, name)
class C: compile: bool = False
import torch.distributed.checkpoint as dcp; dcp.load(s, storage_reader=dcp.HuggingFaceStorageReader("x"))
import torch.distributed as dist; dist.all_gather(parts, mine)
""".strip().splitlines()


@pytest.mark.parametrize("line", HOSTILE)
@pytest.mark.parametrize("file", ["sage_grpo/x.py", TORCH_FILES])
def test_a_hostile_line_is_found(line, file):
    assert forbidden(line, file)


@pytest.mark.parametrize("line", PERMITTED)
def test_a_permitted_line_is_not(line):
    assert not forbidden(line, "sage_grpo/x.py")


@pytest.mark.parametrize("line, home", [
    ('import torch; torch.load("x", weights_only=True)', TORCH_FILES),
    ("import torch.distributed as dist; dist.all_gather_object(found, mine)", RANKS),
    ("from importlib import import_module; import_module(name)", PLUGINS),
])  # fmt: skip
def test_an_exception_holds_in_one_file(line, home):
    assert not forbidden(line, home)
    assert forbidden(line, "sage_grpo/x.py")
