"""What may cross a stage boundary, its form as data, and back again. No sockets, no threads.

A boundary value is one tensor, a tuple of tensors and Nones, or a flat dict of them. On its way
it is only a list of tensors and a ``Boundary`` that says how they fit together. Values arrive as
leaves of the receiver's own graph, in memory of their own, contiguous, and with the sender's
``requires_grad``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ..protocol.errors import JobError, ProtocolError
from ..protocol.messages import Boundary, TensorSpec
from ..protocol.schedule import Kind, Op

__all__ = [
    "MAX_PARCEL_BYTES",
    "Inbox",
    "Outbox",
    "Parcel",
    "Value",
    "allocate",
    "assemble",
    "check_value",
    "copied",
    "describe",
    "gradients_of",
    "map_tensors",
    "payload_bytes",
    "settled",
    "tensors_of",
]

Value: TypeAlias = Tensor | tuple[Tensor | None, ...] | dict[str, Tensor | None]
"""What one stage may hand to the next."""

MAX_PARCEL_BYTES = 64 * 2**30
"""A larger announcement is taken for nonsense, not for data."""

_RULE = (
    "a stage boundary carries one tensor, a tuple of tensors and Nones, "
    "or a dict from str to tensors and Nones, not nested"
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels on a stream: a value and the op that will consume it.

    Attributes:
        op: ``F12`` or ``E0.3`` for activations and the feed, ``B12`` for gradients.
        value: the tensors. Only the gradient of a lone tensor that has none may be None.
        samples: samples in this micro-batch, at least 1.
        batch_samples: samples in the whole mini-batch, at least ``samples``.
        number: its place in its stream, counted from 0 over the whole run, once it has travelled
            on one; -1 before, and for what the feed brings.
    """

    op: Op
    value: Value | None
    samples: int
    batch_samples: int
    number: int = -1

    def __post_init__(self) -> None:
        assert self.value is not None or self.op.kind is Kind.BACKWARD, f"{self.op} has no value"


class Inbox(Protocol):
    """The end of a stream that a stage takes its parcels from, in the order it wants them."""

    def take(self, op: Op) -> Parcel:
        """Return the parcel for ``op``, waiting for it if need be; it is then gone from here."""
        ...

    def ready(self, op: Op) -> bool:
        """Tell whether ``take(op)`` would return at once."""
        ...


class Outbox(Protocol):
    """The end of a stream that a stage puts its parcels into, in the order it makes them."""

    @property
    def number(self) -> int:
        """Number that the next parcel will have; the first of a run has 0."""
        ...

    def put(self, parcel: Parcel, number: int | None = None) -> None:
        """Send ``parcel``; its value is settled when this returns (see ``settled``).

        Args:
            parcel: what the neighbour will take.
            number: that it had before, if it is made again; ``self.number`` stays as it is.
        """
        ...


def check_value(value: object, source: str) -> Value:
    """Return ``value`` if it may cross a stage boundary.

    Args:
        value: what the last layer of a stage returned.
        source: who made it, for the error, such as "layer 'blocks.3'".

    Raises:
        JobError: it is nested, or holds something that is neither a dense tensor nor None.
    """
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        bad_key = next((key for key in items if not isinstance(key, str)), None)
        if bad_key is not None:
            raise JobError(f"{source} returned a dict with key {bad_key!r}: {_RULE}")
        named = [(f"[{key!r}]", item) for key, item in items.items()]
    elif isinstance(value, tuple):
        parts = cast("tuple[object, ...]", value)
        named = [(f"[{index}]", item) for index, item in enumerate(parts)]
    else:
        named = [("", value)]
    for place, item in named:
        if item is None and place:
            continue
        if not isinstance(item, Tensor):
            raise JobError(f"{source} returned{_at(place)} a {type(item).__name__}: {_RULE}")
        if item.layout is not torch.strided or item.is_quantized or item.is_meta:
            kind = "meta" if item.is_meta else "quantized" if item.is_quantized else item.layout
            raise JobError(
                f"{source} returned{_at(place)} a {kind} tensor: only dense tensors with data "
                "may cross a stage boundary; convert it in the layer"
            )
    return cast("Value", value)


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def describe(value: Value | None) -> Boundary:
    """Return the form of ``value``, enough to allocate and assemble it elsewhere.

    Raises:
        JobError: it cannot cross a stage boundary.
    """
    if value is None:
        return Boundary(form="tensor", tensors=(None,))
    check_value(value, "a stage")
    if isinstance(value, Tensor):
        return Boundary(form="tensor", tensors=(_spec(value),))
    if isinstance(value, tuple):
        return Boundary(form="tuple", tensors=tuple(map(_spec, value)))
    return Boundary(form="dict", keys=tuple(value), tensors=tuple(map(_spec, value.values())))


def _spec(tensor: Tensor | None) -> TensorSpec | None:
    if tensor is None:
        return None
    # torch lets only floating and complex tensors require a gradient.
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        needs_grad=tensor.requires_grad,
    )


def tensors_of(value: Value | None) -> list[Tensor]:
    """Return the tensors of ``value`` in order, without the Nones."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value or ()
    return [tensor for tensor in parts if tensor is not None]


def assemble(boundary: Boundary, tensors: Iterable[Tensor]) -> Value | None:
    """Put tensors together again: the inverse of ``describe`` and ``tensors_of``.

    Args:
        boundary: the form.
        tensors: one per tensor of the form, in order, as leaves; each gets the form's
            ``requires_grad``.

    Raises:
        ProtocolError: the form contradicts itself.
    """
    rest = iter(tensors)
    parts = tuple(
        None if spec is None else next(rest).requires_grad_(spec.needs_grad)
        for spec in boundary.tensors
    )
    if boundary.form == "tensor" and len(parts) == 1:
        return parts[0]
    if boundary.form == "tuple":
        return parts
    if boundary.form == "dict" and len(boundary.keys) == len(parts):
        return dict(zip(boundary.keys, parts, strict=True))
    raise ProtocolError(f"a {boundary.form!r} of {len(parts)} tensors and keys {boundary.keys}")


def payload_bytes(boundary: Boundary) -> int:
    """Return how many bytes the tensors of ``boundary`` have together.

    Raises:
        ProtocolError: a data type is unknown, or a shape negative.
    """
    return sum(
        math.prod(spec.shape) * _dtype(spec).itemsize
        for spec in boundary.tensors
        if spec is not None
    )


def allocate(boundary: Boundary, device: torch.device) -> list[Tensor]:
    """Return empty contiguous tensors that the payload of ``boundary`` fits exactly.

    They are fresh each time: autograd may hold on to what arrives in them.

    Raises:
        ProtocolError: a data type is unknown, a shape is negative, or all is more than
            ``MAX_PARCEL_BYTES``.
    """
    size_bytes = payload_bytes(boundary)
    if size_bytes > MAX_PARCEL_BYTES:
        raise ProtocolError(f"a parcel of {size_bytes} bytes: at most {MAX_PARCEL_BYTES}")
    return [
        torch.empty(spec.shape, dtype=_dtype(spec), device=device)
        for spec in boundary.tensors
        if spec is not None
    ]


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or min(spec.shape, default=0) < 0:
        raise ProtocolError(f"no such tensor: {spec.dtype!r} {list(spec.shape)}")
    return dtype


def map_tensors(value: Value, function: Callable[[Tensor], Tensor | None]) -> Value | None:
    """Return a value of the same form and keys, ``function`` applied to each tensor.

    A lone tensor that becomes None makes the whole value None.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(None if part is None else function(part) for part in value)
    return {key: None if part is None else function(part) for key, part in value.items()}


def gradients_of(value: Value) -> Value | None:
    """Return what goes back for a received ``value`` after backward: its leaves' gradients.

    Same form and keys; None where a leaf needs no gradient or autograd gave it none.
    """
    return map_tensors(value, lambda leaf: leaf.grad if leaf.requires_grad else None)


def settled(parcel: Parcel) -> Parcel:
    """Return ``parcel`` cut from its graph, in memory that the sender will not write to again.

    A stage may hand on a parameter, a buffer or a view of one (``return x, self.positions``),
    and its next update would change what still waits to be sent. Results of ops are in fresh
    memory and travel as they are; only leaves and views are copied. Gradients are always fresh.
    """
    fresh = parcel.op.kind is Kind.BACKWARD

    def settle(tensor: Tensor) -> Tensor:
        shared = not fresh and (tensor.grad_fn is None or _is_view(tensor))
        return _own_copy(tensor) if shared else _leaf(tensor)

    return _with_tensors(parcel, settle)


def copied(parcel: Parcel) -> Parcel:
    """Return ``parcel`` as the other end of a stream would see it: own memory, own leaves."""
    return _with_tensors(parcel, _own_copy)


def _with_tensors(parcel: Parcel, function: Callable[[Tensor], Tensor]) -> Parcel:
    if parcel.value is None:
        return parcel
    return replace(parcel, value=map_tensors(parcel.value, function))


def _leaf(tensor: Tensor) -> Tensor:
    # Conjugation and negation may be pending, which raw bytes would not show.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.requires_grad_(tensor.requires_grad)


def _own_copy(tensor: Tensor) -> Tensor:
    copy = _leaf(tensor).detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(tensor.requires_grad)


def _is_view(tensor: Tensor) -> bool:
    return tensor._base is not None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # no public way to ask
