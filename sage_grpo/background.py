"""Calls that run in a thread, which ends with the process whatever it waits for."""

import threading
from collections.abc import Callable
from typing import Any

import torch


class Work:
    """A call in a thread. It is given `advance`, by which it tells its progress."""

    def __init__(self, call: Callable[[Callable[[], None]], Any]) -> None:
        self._call, self._moved, self._value, self._error = call, True, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call(self.advance)
        except BaseException as error:  # raised by `result`
            self._error = error

    def advance(self) -> None:
        self._moved = True

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def moved(self) -> bool:
        """Whether it made progress since this was last asked, or is done."""
        moved, self._moved = self._moved, False
        return moved or self.done

    def result(self, seconds: float | None = None) -> Any:
        """The call's result, or its error; TimeoutError if it takes longer than `seconds` from now on."""
        self._thread.join(seconds)
        if not self.done:
            raise TimeoutError(f"no answer within {seconds:g} s")
        if self._error:
            raise self._error
        return self._value


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call without gradients, or TimeoutError; a hanging call is abandoned in its thread."""
    return Work(lambda _: torch.no_grad()(call)(*arguments)).result(seconds)
