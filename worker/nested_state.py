"""Nested state, such as an optimizer's, as plain JSON values and named tensors. Reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..protocol.errors import SnapshotError

__all__ = ["assemble", "dismantle"]


def dismantle(state: object, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``state`` as plain JSON values and move its tensors to ``tensors``.

    Args:
        state: dicts, lists and tuples of numbers, texts, None and tensors.
        name: of this state; its tensors get names that begin with it.
        tensors: is added to.

    Raises:
        SnapshotError: something else is in it.
    """
    if isinstance(state, Tensor):
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        items = [(key, dismantle(value, f"{name}.{key}", tensors)) for key, value in state.items()]
        return {"dict": items}
    if isinstance(state, (list, tuple)):
        parts = [dismantle(value, f"{name}.{index}", tensors) for index, value in enumerate(state)]
        return {type(state).__name__: parts}
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise SnapshotError(
        f"{name} is a {type(state).__name__}: a snapshot can hold numbers, texts and tensors. Use "
        "an optimizer whose state_dict() has only these, or --snapshot-every 0"
    )


def assemble(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that ``dismantle`` took apart, with copies of its tensors.

    Args:
        plain: what it returned.
        tensors: what it added, by name, among others.
    """
    if not isinstance(plain, dict):
        return plain
    ((form, content),) = plain.items()
    if form == "tensor":
        # Where it lies in the file decides its alignment, and that the rounding of kernels.
        return tensors[content].clone()
    if form == "dict":
        return {key: assemble(value, tensors) for key, value in content}
    parts = [assemble(value, tensors) for value in content]
    return tuple(parts) if form == "tuple" else parts
