"""Any file or command line is either read or rejected in one line, and nothing is written.

Cases are drawn by hypothesis from a fixed seed, so that failures are reproducible; `make test-all` draws more of them.
"""

import json
import math
import os
import signal
import string
import threading
from collections import Counter
from itertools import count

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.config.fields import FIELDS
from sage_grpo.config.parse import ALIASES, from_values, parse
from sage_grpo.config.rules import check
from sage_grpo.config.values import base_type
from sage_grpo.data.requests import read_requests
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.registry import BACKBONES
from sage_grpo.rewards.client import RemoteError
from sage_grpo.worlds.registry import world_of
from scripts.reward_server import unpack
from tests import fuzz as fuzz_module
from tests import fuzz_foreign, smallest_run
from tests.fuzz import SHARES, Bench, ended, set_timers
from tests.rewards.serving import TOKEN


def either(call, *arguments):
    """What the call gives; None where it refuses in one line that says something."""
    try:
        return call(*arguments)
    except (ValueError, FileNotFoundError) as error:
        assert str(error).strip() and len(str(error).splitlines()) == 1, repr(error)
        return None


TEXT = st.text(max_size=20) | st.text(st.characters(), max_size=6)
KEYS = st.sampled_from([*FIELDS, *ALIASES]) | TEXT
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 10**6, 10**400])
    | st.floats()
    | TEXT
    | st.dates()
)
LEAVES |= st.sampled_from(
    ["true", "1e-3", "none", "auto", "muon", "shapes", "0x" + "f" * 9000, "{}", "[" * 9999]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def fitting(name):
    """Values that the flag takes, most of the time."""
    kind, choices = base_type(name), FIELDS[name].metadata["choices"]
    if choices:
        return st.sampled_from(choices)
    return {bool: st.booleans(), int: st.integers(0, 100), float: st.floats(0, 10)}.get(
        kind, VALUES
    )


FITTING = st.sampled_from(list(FIELDS)).flatmap(
    lambda name: st.tuples(st.just(name), fitting(name))
)
MAPPINGS = st.lists(FITTING | st.tuples(KEYS, VALUES), max_size=5).map(dict)


def checked(*arguments):
    config = from_values(*arguments)
    either(check, config)
    return config


@given(MAPPINGS)
def test_values(values):
    config = either(checked, values)
    if config is not None:
        assert from_values(yaml.safe_load(config.to_yaml())) == config


YAML = st.builds(yaml.safe_dump, MAPPINGS) | st.builds(
    lambda a, b: a + b, st.builds(yaml.safe_dump, MAPPINGS), TEXT
)
TAGS = (
    "!!int",
    "!!float",
    "!!bool",
    "!!timestamp",
    "!!binary",
    "!!python/object/apply:os.getcwd",
    "&a [*a]",
    "<<: *a",
)
YAML |= st.builds(
    lambda name, tag, text: f"{name}: {tag} {text}\n", KEYS, st.sampled_from(TAGS), TEXT
)
YAML |= st.text(string.printable, max_size=60) | st.text("[]{}:,-&*!|>'\"%@ \n\ta1", max_size=60)


@given(
    st.one_of(YAML.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=60))
)
def test_yaml_files(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    either(lambda: check(parse(["--config", str(file)])))
    assert os.listdir(tmp_path) == ["config.yaml"]


WORDS = (
    st.sampled_from([f"--{name}" for name in (*FIELDS, *ALIASES, "config")])
    | TEXT
    | LEAVES.map(str)
)
WORDS |= st.builds(lambda name, value: f"--{name}={value}", KEYS, LEAVES)


@given(st.lists(WORDS.filter(lambda word: not word.startswith(("-h", "--help"))), max_size=6))
def test_command_lines(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    either(lambda: check(parse(words)))
    assert not os.listdir(tmp_path)


ROWS = st.dictionaries(st.sampled_from(["prompt", "index", "seed"]) | TEXT, VALUES, max_size=4)
PROMPTS = {
    ".txt": st.text(max_size=80),
    ".csv": st.text('prompt,index\n\r"seed1\0é', max_size=80).map(
        lambda text: "prompt,index,seed\n" + text
    ),
    ".jsonl": st.lists(ROWS | VALUES, max_size=3).map(
        lambda rows: "\n".join(json.dumps(r, default=str) for r in rows)
    ),
}


@pytest.mark.parametrize("suffix", PROMPTS)
@given(data=st.data())
def test_prompt_files(tmp_path, suffix, data):
    file = tmp_path / f"prompts{suffix}"
    text = PROMPTS[suffix].map(lambda text: text.encode(errors="surrogatepass"))
    file.write_bytes(data.draw(text | st.binary(max_size=80)))
    for prompt in either(read_requests, file) or ():
        assert (
            prompt.text.strip()
            and set(prompt.name) <= set("0123456789abcdef-")
            and len(prompt.name) < 40
        )
    assert os.listdir(tmp_path) == [file.name]


GOOD = {
    "sampling.json": {
        "frames": 9,
        "height": 32,
        "width": 32,
        "fps": 8,
        "shift": 5.0,
        "guidance": 6.0,
        "num_steps": 20,
    },
    "world.json": {"world": "shapes"},
    "guider/guider_config.json": {"guidance_scale": 6.0},
    "transformer/config.json": {"target_size": 640, "task_type": "t2v"},
    "transformer/x.safetensors.index.json": {"weight_map": {"a": "x.safetensors"}},
}


@pytest.fixture
def folder(tmp_path):
    for name, values in GOOD.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "transformer" / "x.safetensors").touch()
    (tmp_path / "sampling.json").unlink()  # with it, the rest would not be looked at
    return tmp_path


@pytest.mark.parametrize("name", GOOD)
@given(data=st.data())
def test_files_of_a_model_folder(folder, name, data):
    """Each of them changed in one place, or replaced by anything; the others are as they should be."""
    key = data.draw(st.sampled_from([*GOOD[name], "more"]))
    spoilt = VALUES.map(lambda value: GOOD[name] | {key: value}) | VALUES | st.just(GOOD[name])
    text = spoilt.map(lambda values: json.dumps(values, default=str).encode()) | st.binary(
        max_size=40
    )
    (folder / name).write_bytes(data.draw(text))
    either(world_of, folder)
    sampling = either(lambda: ModelFolder(folder).sampling())
    if sampling is not None:
        numbers = [value for value in vars(sampling).values() if value is not None]
        assert all(map(math.isfinite, numbers))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    before = {number: signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)}
    set_timers()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in (*smallest_run.QUICK, *fuzz_foreign.QUICK):
            patch.setattr(owner, name, value)
        patch.setitem(BACKBONES, smallest_run.PIPELINE, smallest_run.TRIVIAL)
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        yield Bench(tmp_path_factory.mktemp("bench"))
    for number, handler in before.items():
        signal.signal(number, handler)


# the others take longer
CASES = dict.fromkeys(("diagnose", "readers", "prompts", "judge", "remote", "hub", "adapter"), 20)


@pytest.mark.parametrize("kind", SHARES)
def test_damaged_folders(bench, kind):
    """The first cases of `python -m tests.fuzz`."""
    ends = Counter()
    for number in range(CASES.get(kind, 4)):
        end, said, did = bench.case(kind, number, seed=0)
        assert end in ("success", "refused"), f"{kind}:{number}, {did}: {said}"
        ends[end] += 1
    assert ends["refused"]


def raising(error):
    raise error


@pytest.mark.parametrize("call, end", [
    (lambda: None, "success"), (lambda: raising(ValueError("no")), "refused"),
    (lambda: raising(ValueError("two\nlines")), "traceback"), (lambda: raising(ValueError("")), "traceback"),
    (lambda: {}["key"], "traceback"), (lambda: raising(SystemExit(0)), "traceback"),
    (lambda: [0 for _ in count()], "hang"), (lambda: threading.Event().wait(60), "hang"),
])  # fmt: skip
def test_how_a_case_ended_is_noticed(monkeypatch, call, end):
    monkeypatch.setattr(fuzz_module, "LIMIT", 0.3)
    monkeypatch.setattr(fuzz_module, "PATIENCE", 1.5)
    before = {number: signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)}
    set_timers()
    assert ended(call)[0] == end
    for number, handler in before.items():
        signal.signal(number, handler)


@given(st.data())
def test_messages_to_a_reward_server(data):
    header = {"fps": 8, "prompts": ["a"], "shapes": [[1, 1, 1]]}
    spoilt = st.sampled_from(list(header)).flatmap(
        lambda key: VALUES.map(lambda value: header | {key: value})
    )
    body = spoilt.map(
        lambda values: json.dumps(values, default=str).encode() + b"\n123"
    ) | st.binary(max_size=80)
    try:
        clips, prompts, fps = unpack(bytearray(data.draw(body)), 4)
    except RemoteError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert (
            len(clips) == len(prompts)
            and math.isfinite(fps)
            and all(clip.shape[-1] == 3 for clip in clips)
        )
