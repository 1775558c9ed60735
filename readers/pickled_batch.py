"""Reads one batch of CIFAR-10, a Python 2 pickle, without running anything that it names.

A pickle may name any function of any module and have it called. In a batch only those five names
have a place that make numpy arrays, and here each stands for something of ours that keeps what it
is given: numpy itself never sees the file.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, cast

from ..protocol.errors import DataError

__all__ = ["read_batch"]


def read_batch(content: bytes, where: str) -> tuple[bytes, list[int]]:
    """Return the pixels of a batch, 3,072 bytes an image, and the label of each image.

    Args:
        content: of the file.
        where: names the file in messages.

    Raises:
        DataError: it is no such pickle, or names anything that a batch has no use for.
    """
    try:
        # As bytes, for as text Python would decode all pixels, and numpy encode them again.
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a pickle that is none can fail in any way
        raise DataError(f"{where} is not a batch of CIFAR-10: {error}") from error
    pixels, labels = _entry(batch, "data"), _entry(batch, "labels")
    if not isinstance(pixels, _Array) or not pixels.is_of_bytes or not isinstance(labels, list):
        raise DataError(
            f"{where} is not a batch of CIFAR-10: that is a dictionary with an array of bytes "
            f"called 'data' and a list called 'labels'"
        )
    return pixels.content, cast("list[int]", labels)


class _Type:
    """A numpy type as a pickle describes it."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Forget byte order and alignment: single bytes have none."""


class _Array:
    """A numpy array as a pickle describes it."""

    def __init__(self, *_: object) -> None:
        self.content = b""
        self.is_of_bytes = False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Keep what numpy's ``__reduce__`` wrote: version, shape, type, column order, content."""
        _, _, kind, column_order, content = state
        unsigned_bytes = isinstance(kind, _Type) and kind.code in ("u1", b"u1")
        self.is_of_bytes = unsigned_bytes and not column_order and isinstance(content, bytes)
        self.content = content


def _encode(text: str, _: object) -> bytes:
    """Stand for the way in which Python 3 writes bytes into a pickle for Python 2."""
    return text.encode("latin-1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _STAND_INS[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which has no place there and was not run"
            ) from None


def _entry(batch: Any, name: str) -> Any:
    """Return an entry whose key Python 2 wrote as bytes, Python 3 as text."""
    return batch.get(name.encode(), batch.get(name)) if isinstance(batch, dict) else None
