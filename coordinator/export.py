"""Puts the final weights together: parts from all stages in, one ``model.safetensors`` out.

The file holds the clean weights under the model's own names, so ``model.load_state_dict`` of the
plain model takes it whatever the number of stages was. Nothing here talks to workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..protocol.codec import Buffer
from ..protocol.errors import ProtocolError
from ..protocol.messages import WeightsPart

__all__ = ["WeightsCollector", "weights_sha256", "write_model"]


class WeightsCollector:
    """Takes parts until every name of the model is there.

    Args:
        names: keys of the whole model's ``state_dict``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._incarnations: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def missing(self) -> list[str]:
        """Names that have not come yet, sorted."""
        return sorted(self._names - self._tensors.keys())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What has come, by name, in the order of the names; all of it once nothing is missing."""
        return {name: self._tensors[name] for name in sorted(self._tensors)}

    def add(self, part: WeightsPart, payload: Buffer) -> None:
        """Take one part; a restarted worker sends its parts again and the newer ones count.

        Args:
            part: which tensor it is.
            payload: its bytes, row-major, as they lie in the worker's memory.

        Raises:
            ProtocolError: the name is not one of the model's, has come already, or the payload
                does not fit the shape.
        """
        if part.name not in self._names:
            raise ProtocolError(
                f"stage {part.stage} sent weights called {part.name!r}, which is not a name of "
                f"this model"
            )
        if self._incarnations.get(part.name, -1) >= part.incarnation:
            raise ProtocolError(
                f"stage {part.stage} incarnation {part.incarnation} sent {part.name!r}, which "
                f"incarnation {self._incarnations[part.name]} has sent already"
            )
        self._tensors[part.name] = _tensor(part, payload)
        self._incarnations[part.name] = part.incarnation


def write_model(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` as one safetensors file, whole or not at all.

    Args:
        path: of the file; what lay there is replaced in one step.
        tensors: by the model's own names.
        metadata: goes into the file's header, e.g. version, seed, method, updates.
    """
    beside = path.with_name(f".{path.name}.new")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # "format" is what other readers of safetensors look for before they believe the names.
    save_file(contiguous, beside, metadata={"format": "pt", **metadata})
    beside.replace(path)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return one digest of all weights, as 64 hexadecimal digits.

    The hash runs over the names in sorted order; each name contributes its UTF-8 bytes and then
    its values, row-major and without shape: floating point as little-endian fp32, integers and
    booleans as little-endian int64, complex numbers as pairs of little-endian fp32.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_canonical_bytes(tensors[name]))
    return digest.hexdigest()


def _canonical_bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        return tensor.to(torch.float32).numpy().astype("<f4").tobytes()
    return tensor.to(torch.int64).numpy().astype("<i8").tobytes()


def _tensor(part: WeightsPart, payload: Buffer) -> Tensor:
    dtype = getattr(torch, part.spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{part.name!r} has the unknown type {part.spec.dtype!r}")
    expected_bytes = prod(part.spec.shape) * dtype.itemsize
    # One copy: the frame belongs to the socket, and torch wants memory that may be written.
    own = bytearray(payload)
    if len(own) != expected_bytes:
        raise ProtocolError(
            f"{part.name!r} came with {len(own)} bytes; {part.spec.dtype} of shape "
            f"{tuple(part.spec.shape)} takes {expected_bytes}"
        )
    if not own:
        return torch.empty(part.spec.shape, dtype=dtype)
    return torch.frombuffer(own, dtype=dtype).reshape(part.spec.shape)
