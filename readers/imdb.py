"""Reads IMDb's movie reviews from the user's own copy, as word numbers of one length.

Shapes: N reviews, T words each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..protocol.errors import DataError
from .arrow import column, find_arrow, read_split
from .layout import Layout, folder, open_copy

__all__ = ["CLASSES", "PADDING", "UNKNOWN", "read_imdb", "words"]

CLASSES = 2  # 0: the review is negative, 1: it is positive
PADDING = 0
UNKNOWN = 1
_FIRST_WORD = 2

_TAG = re.compile(r"<[^<>]*>")
_WORD = re.compile(r"\w+(?:'\w+)*")

Split = tuple[list[str], list[int]]  # texts and labels


def read_imdb(
    path: str | Path, *, vocabulary: int = 10_000, length: int = 200
) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set of the copy of IMDb at ``path``.

    Args:
        path: a folder that holds the unpacked original, ``aclImdb``, or what Hugging Face's
            ``save_to_disk`` wrote.
        vocabulary: how many numbers there are for words, at least 3: one for padding, one for
            unknown words, and the most frequent words of the training texts.
        length: T. Longer reviews lose their end, shorter ones are padded at theirs.

    Returns:
        Two sets of samples ``(tokens, label)``: int64 ``[T]``, each at least 0 and below
        ``vocabulary``, and an int64 scalar, 0 or 1. The same files give the same numbers.

    Raises:
        DataError: there is no copy, or it is damaged.
    """
    train, test = open_copy("IMDb", path, _LAYOUTS)
    numbers = _numbers(train[0], vocabulary)
    return tuple(  # pyright: ignore[reportReturnType]
        TensorDataset(_tokens(texts, numbers, length), torch.tensor(labels))
        for texts, labels in (train, test)
    )


def words(text: str) -> list[str]:
    """Return the words of a review in lower case, without its line breaks in HTML."""
    return _WORD.findall(_TAG.sub(" ", text).lower())


def _numbers(texts: Iterable[str], vocabulary: int) -> dict[str, int]:
    """Number the most frequent words, the most frequent first, equally frequent ones by letter."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {
        word: _FIRST_WORD + rank for rank, word in enumerate(ranked[: vocabulary - _FIRST_WORD])
    }


def _tokens(texts: Sequence[str], numbers: dict[str, int], length: int) -> Tensor:
    tokens = torch.full((len(texts), length), PADDING)
    for row, text in zip(tokens, texts, strict=True):
        # A review without words is one unknown word, so that attention has something to look at.
        found = [numbers.get(word, UNKNOWN) for word in words(text)[:length]] or [UNKNOWN]
        row[: len(found)] = torch.tensor(found)
    return tokens


def _read_original(place: Path) -> tuple[Split, Split]:
    return _original_split(place, "train"), _original_split(place, "test")


def _original_split(place: Path, split: str) -> Split:
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted((place / split / name).glob("*.txt"))
        if not files:
            raise DataError(
                f"{place / split / name} holds no .txt files: the copy is not whole. Unpack it "
                f"again"
            )
        texts += [file.read_text(encoding="utf-8", errors="replace") for file in files]
        labels += [label] * len(files)
    return texts, labels


def _read_arrow(place: Path) -> tuple[Split, Split]:
    return _arrow_split(place, "train"), _arrow_split(place, "test")


def _arrow_split(place: Path, split: str) -> Split:
    where = f"the {split} split in {place}"
    columns = read_split(place, split)
    texts, labels = column(columns, ("text",), where), column(columns, ("label",), where)
    if wrong := [label for label in labels if label not in range(CLASSES)]:
        raise DataError(
            f"{where} has the label {wrong[0]!r}: IMDb has 0, negative, and 1, positive"
        )
    return texts, labels


_LAYOUTS = (
    Layout(
        "what Hugging Face's save_to_disk wrote, with dataset_dict.json, train/ and test/",
        find_arrow,
        _read_arrow,
    ),
    Layout(
        "a folder aclImdb with neg/*.txt and pos/*.txt in train/ and in test/",
        folder("aclImdb", "train/pos", "test/pos"),
        _read_original,
    ),
)
