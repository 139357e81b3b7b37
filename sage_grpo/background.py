"""Calls that run in a thread, which ends with the process whatever it waits for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch


class Work(Future):
    """A call in a daemon thread, which an executor does not have. It is given `advance`, to tell its progress."""

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
        self._moved = True

    def moved(self) -> bool:
        """Whether it made progress since this was last asked, or is done."""
        moved, self._moved = self._moved, False
        return moved or self.done()


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call without gradients, or TimeoutError; a hanging call is abandoned in its thread."""
    work = Work(lambda _: torch.no_grad()(call)(*arguments))
    if not wait([work], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return work.result()
