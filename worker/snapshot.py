"""What a snapshot of one stage holds, and its form as a file. When to take one is not known here.

A snapshot is the state *after update u*: after the u-th update, before any op that follows. It
holds what cannot be computed anew, and for every micro-batch in flight the live weights and the
buffers that its forward began with. Neither graphs nor inputs are in it: a restored stage runs
these forwards again on what its neighbour sends again.

The file is in the safetensors format. Tensors are flat or as the layers have them; all else is
JSON in the header, for nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from ..protocol.errors import SnapshotError
from ..protocol.schedule import Op, Schedule, Work, stage_ops
from ..protocol.staleness import Tallies
from .nested_state import assemble

__all__ = [
    "InFlight",
    "Origin",
    "Position",
    "Snapshot",
    "header_of",
    "read_snapshot",
    "tensors_of_forward",
    "tensors_of_state",
    "write_snapshot",
]

_HEADER = "spectrain"
_FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose snapshot it is."""

    run_id: str
    stage: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a loop is, right after an update.

    Attributes:
        update: updates done, u, at least 1.
        staleness: counted so far.
        next_activation: number of the next parcel to the next stage; 0 on the last stage.
        next_gradient: number of the next parcel to the previous stage; 0 on the first stage.
        needed_activation: all parcels that are still needed from the previous stage, inputs of
            micro-batches in flight among them, have at least this number.
        needed_gradient: the same for the next stage's gradients.
        in_flight: forward of each micro-batch in flight, in order, and the number of the parcel
            that its output was in.
    """

    update: int
    staleness: Tallies
    next_activation: int
    next_gradient: int
    needed_activation: int
    needed_gradient: int
    in_flight: tuple[tuple[Op, int], ...] = ()

    def remaining(self, schedule: Schedule, stage: int, stages: int, work: Work) -> Iterator[Op]:
        """Yield the ops to do from here: forwards to run again, then the rest of ``stage_ops``."""
        rest = stage_ops(schedule, stage, stages, work, updates=self.update)
        return chain((op for op, _ in self.in_flight), rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A micro-batch in flight: what its forward needs, besides inputs, to run again.

    Attributes:
        op: the forward.
        number: of the parcel with its output.
        live: weights that the forward read, one flat tensor per segment.
        buffers: as the forward found them, by full name.
    """

    op: Op
    number: int
    live: list[Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one stage after an update. It holds memory of its size: let it go after use.

    Attributes:
        position: of the loop.
        clean: clean weights, one flat tensor per segment.
        buffers: of the layers, by full name.
        optimizer: its ``state_dict``.
        memory: what else the weights remember, by name; see ``Weights.memory``.
        in_flight: micro-batches between forward and backward, in the order of their forwards.
    """

    position: Position
    clean: list[Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]
    memory: dict[str, Tensor]
    in_flight: tuple[InFlight, ...]


# -- names of tensors in the file ---------------------------------------------------------------


def tensors_of_state(
    clean: Iterable[Tensor], buffers: Mapping[str, Tensor], memory: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a stage, except the optimizer's, under their names in the file."""
    return {
        **_listed("clean", clean),
        **_prefixed("buffer", buffers),
        **_prefixed("memory", memory),
    }


def tensors_of_forward(
    op: Op, live: Iterable[Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch in flight under their names in the file."""
    return {**_listed(f"{op}.live", live), **_prefixed(f"{op}.buffer", buffers)}


def _listed(prefix: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{index}": tensor for index, tensor in enumerate(tensors)}


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _list(prefix: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    indices = (name.removeprefix(f"{prefix}.") for name in tensors if name.startswith(f"{prefix}."))
    return [tensors[f"{prefix}.{index}"] for index in sorted(indices, key=int)]


def _mapping(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }


# -- the file -----------------------------------------------------------------------------------


def header_of(origin: Origin, position: Position, optimizer: object) -> str:
    """Return all that is no tensor as one line of JSON.

    Args:
        origin: whose snapshot it is.
        position: of the loop.
        optimizer: what ``dismantle`` made of its state.
    """
    in_flight = [(str(op), number) for op, number in position.in_flight]
    return json.dumps(
        {
            "format": _FORMAT,
            "origin": asdict(origin),
            "position": {**asdict(position), "in_flight": in_flight},
            "optimizer": optimizer,
        }
    )


def write_snapshot(path: Path, header: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Write a file that appears under its name only when it is complete.

    Args:
        path: its name; a file of that name is replaced.
        header: of ``header_of``.
        tensors: contiguous, in host memory, none a view of another.

    Returns:
        Size in bytes, and the digest to ask for when reading: xxh3_128, hexadecimal.

    Raises:
        OSError, SafetensorError: it could not be written; nothing is left behind.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        safetensors.torch.save_file(tensors, partial, metadata={_HEADER: header})
        size_bytes, digest = partial.stat().st_size, _digest(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size_bytes, digest


def read_snapshot(path: Path, digest: str, origin: Origin) -> Snapshot:
    """Read a file that ``write_snapshot`` wrote.

    Raises:
        SnapshotError: it cannot be read, is not the one with ``digest``, or not of ``origin``.
    """
    try:
        found = _digest(path)
    except OSError as error:
        raise SnapshotError(f"snapshot {path} cannot be read: {error.strerror}") from error
    if found != digest:
        size_bytes = path.stat().st_size
        raise SnapshotError(
            f"snapshot {path} is damaged: its {size_bytes} bytes have digest {found}, "
            f"expected {digest}"
        )
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[_HEADER])
    tensors = safetensors.torch.load_file(path)
    if header["format"] != _FORMAT:
        raise SnapshotError(
            f"snapshot {path} has format {header['format']}, expected {_FORMAT}: it was written by "
            "another version of spectrain; install that one to go on from it"
        )
    if header["origin"] != asdict(origin):
        raise SnapshotError(f"snapshot {path} is of {header['origin']}, expected {asdict(origin)}")
    position = _position_of(header["position"])
    return Snapshot(
        position=position,
        clean=_list("clean", tensors),
        buffers=_mapping("buffer", tensors),
        optimizer=assemble(header["optimizer"], tensors),
        memory=_mapping("memory", tensors),
        in_flight=tuple(
            InFlight(
                op=op,
                number=number,
                live=_list(f"{op}.live", tensors),
                buffers=_mapping(f"{op}.buffer", tensors),
            )
            for op, number in position.in_flight
        ),
    )


def _position_of(values: dict[str, Any]) -> Position:
    forward, backward = values.pop("staleness")
    in_flight = tuple((Op.parse(op), number) for op, number in values.pop("in_flight"))
    return Position(**values, staleness=(tuple(forward), tuple(backward)), in_flight=in_flight)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
