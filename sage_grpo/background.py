"""Calls in daemon threads: a call that hangs cannot keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch


class Work(Future):
    """A call in a daemon thread (executors have none). The call is given `advance`, to report its progress."""

    def __init__(self, call: Callable[[Callable[[], None]], Any]) -> None:
        super().__init__()
        self._moved = True
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[Callable[[], None]], Any]) -> None:
        try:
            self.set_result(call(self.advance))
        except BaseException as error:  # raised by `result`
            self.set_exception(error)

    def advance(self) -> None:
        """Report progress."""
        self._moved = True

    def moved(self) -> bool:
        """Whether the call is done or has made progress since the last time this was asked."""
        moved = self._moved
        self._moved = False
        return moved or self.done()


class TooSlow(TimeoutError):
    """A call took longer than it may; what a call itself raises is another TimeoutError."""


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, made without gradients; TooSlow if it takes longer, its thread is then abandoned.

    A call cannot end the program: its own SystemExit or KeyboardInterrupt becomes a RuntimeError. Ctrl-C still does,
    because it arrives in the thread that waits.
    """
    work = Work(lambda _: torch.no_grad()(call)(*arguments))
    if not wait([work], seconds).done:
        raise TooSlow(f"no answer within {seconds:g} s")
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"it tried to end the program ({error!r})") from error
    return work.result()
