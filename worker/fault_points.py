"""Where faults can be planted in a worker: the functions of each named phase. Plants none.

A point is a function of the running code that gets a wrapper, so that the code itself knows
nothing of faults. What is wrapped is public to its callers, and has the op among its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import safetensors.torch

from ..protocol.schedule import Kind, Op
from . import snapshotter, stream_end
from .feed_inbox import FeedInbox
from .link import Link
from .loop import Loop
from .neighbours import Neighbours
from .receiving_stream import ReceivingStream
from .restore import Rebuild
from .sending_stream import SendingStream
from .snapshot import Position
from .stage import Stage
from .weights import Weights

__all__ = ["POINTS", "Point", "Reach"]

Reach = Callable[[str, str], None]
"""Told that a phase is reached, and with which op; empty where the phase belongs to none."""


@dataclass(frozen=True, slots=True)
class Point:
    """A function that is wrapped.

    Attributes:
        owner: its class or module.
        name: its name there.
        wrap: makes the wrapped one out of what to tell, the phase and the function.
    """

    owner: Any
    name: str
    wrap: Callable[[Reach, str, Callable[..., Any]], Callable[..., Any]]


def _before(owner: Any, name: str, op_of: Callable[..., object]) -> Point:
    def wrap(reach: Reach, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            reach(phase, str(op_of(*args, **kwargs)))
            return function(*args, **kwargs)

        return wrapped

    return Point(owner, name, wrap)


def _after(owner: Any, name: str, op_of: Callable[..., object]) -> Point:
    def wrap(reach: Reach, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            reach(phase, str(op_of(*args, **kwargs)))
            return result

        return wrapped

    return Point(owner, name, wrap)


def _around_exchange(*, after: bool) -> Point:
    """Between the two halves of building a link: our address is told, the peer's comes back."""

    def wrap(reach: Reach, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, exchange: Callable[[bytes], bytes], **kwargs: Any) -> Any:
            def exchanged(own: bytes) -> bytes:
                if not after:
                    reach(phase, "")
                theirs = exchange(own)
                if after:
                    reach(phase, "")
                return theirs

            return function(*args, exchange=exchanged, **kwargs)

        return wrapped

    return Point(stream_end, "open_link", wrap)


def _second(_: object, op: Op, *__: Any) -> Op:
    return op


def _of_parcel(_: object, parcel: Any, *__: Any) -> Op:
    return parcel.op


def _of_transfer(*_: Any, what: str, **__: Any) -> str:
    return what


def _next_update(weights: Weights) -> Op:
    return Op(Kind.UPDATE, weights.version)


def _last_update(weights: Weights) -> Op:
    return Op(Kind.UPDATE, weights.version - 1)


def _of_snapshot(path: Path, *_: Any) -> Op:
    """Return the update that a snapshot follows, by the name of its file."""
    return Op(Kind.UPDATE, int(path.name.split(".")[1].removeprefix("update-")) - 1)


def _of_unfinished(_: object, path: Path, **__: Any) -> Op:
    return _of_snapshot(path)


def _of_commit(_: object, update: int) -> Op:
    return Op(Kind.UPDATE, update - 1)


def _of_rebuild(rebuild: Rebuild) -> Op:
    assert rebuild.next is not None, "there is one to show"
    return rebuild.next.op


def _of_position(_: object, position: Position, *__: Any) -> Op:
    return Op(Kind.UPDATE, position.update - 1)


def _none(*_: Any) -> str:
    return ""


POINTS: dict[str, tuple[Point, ...]] = {
    # In the training loop. An update is the op U; a snapshot is named by the op it follows.
    "take": (_before(ReceivingStream, "take", _second), _before(FeedInbox, "take", _second)),
    "forward": (_before(Stage, "forward", _second),),
    "backward": (_before(Stage, "backward", _second),),
    "send": (_before(SendingStream, "put", _of_parcel),),
    "sent": (_after(SendingStream, "put", _of_parcel),),
    "update": (_before(Weights, "step", _next_update),),
    "updated": (_after(Weights, "step", _last_update),),
    # In the streams' threads: the parcel is announced, and no byte of it has moved.
    "transmit": (_before(Link, "send", _of_transfer),),
    "receive": (_before(Link, "receive", _of_transfer),),
    "link": (_around_exchange(after=False),),
    "linked": (_around_exchange(after=True),),
    # Of snapshots: before the copy; the file is there but for its name; it has its name, and
    # nobody knows; the coordinator says that the round is committed.
    "snapshot-capture": (_before(snapshotter, "header_of", _of_position),),
    "snapshot-write": (_after(safetensors.torch, "save_file", _of_unfinished),),
    "snapshot-written": (_after(snapshotter, "write_snapshot", _of_snapshot),),
    "commit": (_before(Neighbours, "trim", _of_commit),),
    # Of a restarted worker: the snapshot is read; a forward that was in flight runs again.
    "restore": (_before(Loop, "resume", _none),),
    "replay": (_before(Rebuild, "show", _of_rebuild),),
}
"""The points of each phase, in the order of a worker's life within each group."""
