"""Waits for what other threads, processes or hosts do; the only place where tests poll."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *, what: str, timeout_s: float = 10.0, interval_s: float = 0.02
) -> T:
    """Return the first true result of ``condition``.

    Args:
        condition: asked again and again; must not block.
        what: the awaited thing, for the failure's text.
        timeout_s: how long to go on asking, at least once.
        interval_s: pause between two questions.

    Raises:
        TimeoutError: it stayed false; the text holds ``what`` and the last result.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; last seen: {result!r}")
        time.sleep(interval_s)
    return result
