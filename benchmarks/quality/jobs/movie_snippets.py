"""Sentences of film reviews with how good or bad people found them, for the jobs beside this file.

They lie in an archive in the source package of vaderSentiment; nothing is unpacked to disk.
"""

from __future__ import annotations

import collections
import io
import re
import tarfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

ARCHIVE = Path(__file__).resolve().parents[3] / "build" / "data" / "vaderSentiment-3.3.2.tar.gz"
PADDING, START, UNKNOWN = range(3)
VOCABULARY = 4000
"""Word numbers that there are; more frequent words have lower ones."""
LENGTH = 32
"""Words of a sentence that are read, with the start that each one has."""


def read_snippets(test_samples: int = 2000) -> tuple[TensorDataset, TensorDataset]:
    """Return word numbers ``[LENGTH]`` and 1 for good, 0 for bad, of training and test samples.

    Sentences that people found neither good nor bad are left out. The held out samples are the
    same in every run: there is no official split.
    """
    snippets = [(rating > 0, words) for rating, words in rated_sentences() if abs(rating) >= 0.5]
    order = torch.randperm(len(snippets), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = order[:test_samples], order[test_samples:]
    counts = collections.Counter(word for index in train for word in snippets[index][1])
    known = [word for word, _ in counts.most_common(VOCABULARY - 3)]
    numbers = {word: number for number, word in enumerate(known, start=3)}
    tokens = torch.tensor([encode(words, numbers) for _, words in snippets])
    labels = torch.tensor([int(is_good) for is_good, _ in snippets])
    return TensorDataset(tokens[train], labels[train]), TensorDataset(tokens[test], labels[test])


def encode(words: list[str], numbers: dict[str, int]) -> list[int]:
    known = [START, *(numbers.get(word, UNKNOWN) for word in words)][:LENGTH]
    return known + [PADDING] * (LENGTH - len(known))


def rated_sentences() -> list[tuple[float, list[str]]]:
    """Return mean rating, -4 to 4, and words of each sentence."""
    if not ARCHIVE.exists():
        raise FileNotFoundError(
            f"{ARCHIVE} is missing: pip download --no-deps --no-binary vaderSentiment "
            f"--dest {ARCHIVE.parent} vaderSentiment==3.3.2"
        )
    with tarfile.open(ARCHIVE) as outer:
        inner = member(outer, "hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        text = member(archive, "movieReviewSnippets_GroundTruth.txt").decode()
    rows = [line.split("\t") for line in text.splitlines()]
    return [
        (float(row[1]), re.findall(r"[a-z']+", row[2].lower())) for row in rows if len(row) >= 3
    ]


def member(archive: tarfile.TarFile, name: str) -> bytes:
    found = next(entry for entry in archive.getmembers() if entry.name.endswith(name))
    file = archive.extractfile(found)
    assert file is not None
    return file.read()
