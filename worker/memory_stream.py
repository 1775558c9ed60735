"""A stream inside one process: the loop-back twin of ``stream.py``. No threads, no waiting."""

from __future__ import annotations

from dataclasses import replace

from ..protocol.schedule import Op
from .boundary import Inbox, Outbox, Parcel, copied

__all__ = ["memory_pair"]


def memory_pair() -> tuple[Outbox, Inbox]:
    """Return the two ends of a stream that holds any number of parcels."""
    stream = _MemoryStream()
    return stream, stream


class _MemoryStream:
    """Both ends in one object; values are copied, as they would be on a wire."""

    def __init__(self) -> None:
        self._parcels: dict[Op, Parcel] = {}
        self.number = 0

    def put(self, parcel: Parcel, number: int | None = None) -> None:
        assert parcel.op not in self._parcels, f"{parcel.op} was sent twice"
        if number is None:
            number = self.number
            self.number += 1
        self._parcels[parcel.op] = replace(copied(parcel), number=number)

    def take(self, op: Op) -> Parcel:
        # Nobody else runs meanwhile, so waiting would be for ever.
        assert op in self._parcels, f"{op} is not there; here are {sorted(map(str, self._parcels))}"
        return self._parcels.pop(op)

    def ready(self, op: Op) -> bool:
        return op in self._parcels
