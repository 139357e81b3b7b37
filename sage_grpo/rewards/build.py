"""Builds rewards from their names: rows of the registry, or `FILE.py:NAME` from a command line."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo import plugins
from sage_grpo.files.fingerprints import files_fingerprint
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.registry import ALIASES, REWARDS

# names of parameters of a reward, and what these are given
ARGUMENTS = {"clips": "clips", "prompts": "prompts", "requests": "prompts", "fps": "fps"}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build_rewards(names: Sequence[str], setup: Setup) -> dict[str, Reward]:
    """Build the named rewards, with aliases resolved. Weights are loaded here and nowhere else."""
    unique_names = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    labels = [plugins.label(name) for name in unique_names]
    duplicates = [label for label in labels if labels.count(label) > 1]
    if duplicates:
        raise ValueError(f"two rewards are called {duplicates[0]}; rename one of them")
    return {
        label: build_reward(name, setup) for label, name in zip(labels, unique_names, strict=True)
    }


def build_reward(name: str, setup: Setup) -> Reward:
    """Call what the registry names with the setup, or make a reward of what a file defines."""
    if plugins.in_file(name):
        return FileReward(name, setup)
    if name not in REWARDS:
        raise ValueError(
            f"the reward is {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME"
        )
    return plugins.load(REWARDS, name)(setup)


class FileReward:
    """A reward from `FILE.py:NAME`: a function of clips and perhaps prompts and fps; a class; or a `build(setup)`.

    If its second parameter is called `requests`, it is given requests instead of prompts. Only a parameter called
    `fps` is given that; others besides clips and prompts must have a default.
    A class may take the setup, and may leave out `check`. With a single score it may also leave out `names`, which is
    then NAME, and return plain values. In `files` it may list the files and folders that its scores depend on.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        plugin = plugins.resolved(name)
        with plugins.contained(f"the reward {name} cannot be built", passes=()):
            reward = _instantiated(plugin, setup)
            self._score = getattr(reward, "score", reward)
            self._signature = inspect.signature(self._score)
            names = getattr(reward, "names", [plugins.label(name)])
            self.names = tuple(names)
            self.check = getattr(reward, "check", lambda prompts: None)
            self.code = Path(name.rpartition(":")[0])
            self.files = [Path(file) for file in getattr(reward, "files", ())]
        if isinstance(names, str):
            raise ValueError(
                f"the reward {name} gives its names as the text {names!r}; write names = ({names!r},)"
            )
        self._given = _arguments(name, self._signature)
        missing = [str(file) for file in self.files if not file.exists()]
        if missing:
            raise ValueError(
                f"the reward {name} lists {missing[0]} in `files`, which does not exist"
            )
        self.sees_requests = "requests" in self._signature.parameters

    def fingerprint(self) -> dict[str, str]:
        return {
            "code": files_fingerprint([self.code]),
            "files": files_fingerprint(self.files) if self.files else "none",
        }

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Any]:
        arguments = {"clips": clips, "prompts": prompts, "fps": fps}
        given = {parameter: arguments[argument] for parameter, argument in self._given.items()}
        call = inspect.BoundArguments(self._signature, OrderedDict(given))
        scores = self._score(*call.args, **call.kwargs)
        if isinstance(scores, Mapping):
            return dict(scores)
        if scores is None:
            raise ValueError("it returned None; return a number for each clip")
        if len(self.names) > 1:
            raise ValueError(f"it returned no dictionary of its scores {', '.join(self.names)}")
        return {self.names[0]: scores}


def _arguments(name: str, signature: inspect.Signature) -> dict[str, str]:
    """Which of clips, prompts and fps each parameter is given, by its name; the first two also by their place."""
    parameters = signature.parameters
    given = {parameter: ARGUMENTS[parameter] for parameter in parameters if parameter in ARGUMENTS}
    left = [argument for argument in ("clips", "prompts") if argument not in given.values()]
    for parameter in parameters.values():
        is_required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        if parameter.name in given or not is_required:
            continue
        if not left or parameter.kind is parameter.KEYWORD_ONLY:
            raise ValueError(
                f"the reward {name} needs {parameter.name}, but it is given clips, prompts and fps only; "
                f"give {parameter.name} a default"
            )
        given[parameter.name] = left.pop(0)
    if "clips" not in given.values():
        raise ValueError(
            f"the reward {name} has no parameter for the clips; write (clips, prompts), "
            "and functools.wraps in a decorator"
        )
    return given


def _instantiated(plugin: Any, setup: Setup) -> Any:
    """A class or a `build` is called, with the setup if it takes a parameter; a score function stays as it is."""
    parameters = inspect.signature(plugin).parameters
    scores_clips = len(parameters) >= 2 or "clips" in parameters
    if not isinstance(plugin, type) and scores_clips:
        return plugin
    return plugin(setup) if parameters else plugin()
