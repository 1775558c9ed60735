"""Reads CIFAR-10 from the user's own copy.

Shapes: N samples, 3 colours, 32 rows, 32 columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..protocol.errors import DataError
from .arrow import column, find_arrow, read_split
from .layout import Layout, archive, folder, open_copy, read_files
from .pickled_batch import read_batch

__all__ = ["CLASSES", "Images", "read_cifar10"]

CLASSES = 10
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32  # bytes of one image
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
"""Of the training pixels, by colour, scaled to 0..1."""

_SHIFT = 4  # pixels

Split = tuple[Tensor, Tensor]  # uint8 [N, 3, 32, 32] and int64 [N]


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and their classes.

    A sample is a float32 picture ``[3, 32, 32]`` of mean 0 and deviation 1, and its class, an
    int64 scalar. Held in memory are bytes, a quarter of that.

    Attributes:
        pixels: uint8 ``[N, 3, 32, 32]``.
        labels: int64 ``[N]``, 0 to 9.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, *, augment: bool = False) -> None:
        """Take a split.

        Args:
            pixels: uint8 ``[N, 3, 32, 32]``.
            labels: int64 ``[N]``.
            augment: whether each picture comes shifted by up to 4 pixels, black where nothing
                is, and mirrored half of the time, as draws from torch's generator say.
        """
        self.pixels = pixels
        self.labels = labels
        self._augment = augment

    def __len__(self) -> int:
        """Return N."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one picture and its class."""
        pixels = self.pixels[index]
        if self._augment:
            pixels = _augmented(pixels)
        return (pixels / 255 - MEAN) / STD, self.labels[index]


def read_cifar10(path: str | Path, *, augment: bool = False) -> tuple[Images, Images]:
    """Return the training and the test set of the copy of CIFAR-10 at ``path``.

    Args:
        path: a folder that holds the original in one of its two forms, unpacked or as the
            archive that it comes as, or what Hugging Face's ``save_to_disk`` wrote.
        augment: whether training pictures are shifted and mirrored at random.

    Raises:
        DataError: there is no copy, or it is damaged.
    """
    train, test = open_copy("CIFAR-10", path, _LAYOUTS)
    return Images(*train, augment=augment), Images(*test)


def _augmented(pixels: Tensor) -> Tensor:
    top, left = torch.randint(2 * _SHIFT + 1, (2,)).tolist()
    padded = nn.functional.pad(pixels, (_SHIFT,) * 4)
    shifted = padded[:, top : top + 32, left : left + 32]
    return shifted.flip(2) if torch.rand(()) < 1 / 2 else shifted


def _read_original(
    place: Path, *, suffix: str, parse: Callable[[bytes, str], Split]
) -> tuple[Split, Split]:
    files = read_files(place, [name + suffix for name in (*_TRAIN, _TEST)])
    *train, test = [parse(content, f"{name} in {place}") for name, content in files.items()]
    pixels, labels = zip(*train, strict=True)
    return (torch.cat(pixels), torch.cat(labels)), test


def _parse_pickled(content: bytes, where: str) -> Split:
    pixels, labels = read_batch(content, where)
    if not labels or len(pixels) != len(labels) * _PIXELS:
        raise DataError(f"{where} has {len(pixels)} bytes of pixels for {len(labels)} labels")
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return images.view(-1, *_SHAPE), _labels(labels, where)


def _parse_binary(content: bytes, where: str) -> Split:
    if not content or len(content) % (1 + _PIXELS):
        raise DataError(
            f"{where} has {len(content)} bytes, which is no multiple of {1 + _PIXELS}: a label and "
            f"the pixels of an image. The copy is not whole"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + _PIXELS)
    return records[:, 1:].reshape(-1, *_SHAPE), _labels(records[:, 0].tolist(), where)


def _read_arrow(place: Path) -> tuple[Split, Split]:
    return _arrow_split(place, "train"), _arrow_split(place, "test")


def _arrow_split(place: Path, split: str) -> Split:
    where = f"the {split} split in {place}"
    columns = read_split(place, split)
    pictures = column(columns, ("img", "image"), where)
    labels = column(columns, ("label", "labels"), where)
    return torch.stack([_decoded(picture, where) for picture in pictures]), _labels(labels, where)


def _decoded(picture: Any, where: str) -> Tensor:
    """Decode the bytes of a PNG."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError(f"{where} holds compressed pictures: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(picture["bytes"])) as image:
            pixels = image.convert("RGB").tobytes()
    except (OSError, TypeError, KeyError) as error:
        raise DataError(f"{where} has a picture that cannot be decoded: {error}") from error
    if len(pixels) != _PIXELS:
        raise DataError(f"{where} has a picture of {len(pixels)} bytes, not 32 x 32 of 3 colours")
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)


def _labels(labels: Sequence[int], where: str) -> Tensor:
    if wrong := [label for label in labels if label not in range(CLASSES)]:
        raise DataError(f"{where} has the label {wrong[0]!r}: CIFAR-10 has the classes 0 to 9")
    return torch.tensor(labels, dtype=torch.int64)


_read_python = partial(_read_original, suffix="", parse=_parse_pickled)
_read_binary = partial(_read_original, suffix=".bin", parse=_parse_binary)
_LAYOUTS = (
    Layout(
        "a folder cifar-10-batches-py with data_batch_1 to 5 and test_batch, as torchvision's",
        folder("cifar-10-batches-py", *_TRAIN, _TEST),
        _read_python,
    ),
    Layout("cifar-10-python.tar.gz", archive("cifar-10-python.tar.gz"), _read_python),
    Layout(
        "a folder cifar-10-batches-bin with data_batch_1.bin to 5 and test_batch.bin",
        folder("cifar-10-batches-bin", *(f"{name}.bin" for name in (*_TRAIN, _TEST))),
        _read_binary,
    ),
    Layout("cifar-10-binary.tar.gz", archive("cifar-10-binary.tar.gz"), _read_binary),
    Layout(
        "what Hugging Face's save_to_disk wrote, with dataset_dict.json, train/ and test/",
        find_arrow,
        _read_arrow,
    ),
)
