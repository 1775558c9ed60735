"""Writes tiny copies of CIFAR-10 and IMDb in every layout that users have them in.

The real sets are not ours to ship. What is imitated is their form: the real batches of CIFAR-10 are
Python 2 pickles, which are written here opcode by opcode as Python 2 wrote them.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PIXELS = 3 * 32 * 32
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
IMAGES_PER_BATCH = 2

Batch = tuple[np.ndarray[Any, np.dtype[np.uint8]], list[int]]


def batches() -> dict[str, Batch]:
    """Return the contents of every copy: pixels uint8 ``[2, 3072]`` and two labels a batch."""
    draws = np.random.default_rng(7)
    return {
        name: (
            draws.integers(0, 256, (IMAGES_PER_BATCH, PIXELS), dtype=np.uint8),
            draws.integers(0, 10, IMAGES_PER_BATCH).tolist(),
        )
        for name in BATCHES
    }


# -- CIFAR-10 -----------------------------------------------------------------------------------


def python2_pickle(pixels: Any, labels: list[int]) -> bytes:
    """Return what Python 2's ``cPickle.dump(batch, file, 2)`` wrote, byte strings and all."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\x00tb\x89"
        + b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes()
        + b"tb"
    )  # fmt: skip
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}(U\x0bbatch_labelU\x15training batch 1 of 5U\x06labels](" + numbers
        + b"eU\x04data" + array
        + b"U\x09filenames](" + b"".join(b"U\x05a.png" for _ in labels) + b"eu."
    )  # fmt: skip


def python3_pickle(pixels: Any, labels: list[int]) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels}, protocol=2)


def write_pickled(root: Path, write: Callable[[Any, list[int]], bytes] = python2_pickle) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches().items():
        (folder / name).write_bytes(write(pixels, labels))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["airplane"]}, 2))
    return root


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches().items():
        records = [
            bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True)
        ]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return root


def packed(write: Callable[[Path], Path], name: str) -> Callable[[Path], Path]:
    """Return a writer of the archive ``name``, which holds what ``write`` writes."""

    def write_archive(root: Path) -> Path:
        root.mkdir()
        with tarfile.open(root / name, "w:gz") as tar:
            (folder,) = write(root.with_name("unpacked")).iterdir()
            tar.add(folder, folder.name)
        return root

    return write_archive


def png(row: Any, side: int = 32) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(row.reshape(3, side, side).transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def picture_columns(names: tuple[str, ...]) -> dict[str, list[Any]]:
    chosen = [batches()[name] for name in names]
    pictures = [{"bytes": png(row), "path": None} for pixels, _ in chosen for row in pixels]
    return {"img": pictures, "label": [label for _, labels in chosen for label in labels]}


def write_cifar_arrow(root: Path) -> Path:
    splits = {"train": picture_columns(BATCHES[:-1]), "test": picture_columns(BATCHES[-1:])}
    return write_arrow(root, splits)


CIFAR_WRITERS: dict[str, Callable[[Path], Path]] = {
    "folder of Python 2 pickles": write_pickled,
    "folder of Python 3 pickles": lambda root: write_pickled(root, python3_pickle),
    "archive of pickles": packed(write_pickled, "cifar-10-python.tar.gz"),
    "binary folder": write_binary,
    "binary archive": packed(write_binary, "cifar-10-binary.tar.gz"),
    "save_to_disk": write_cifar_arrow,
}


# -- IMDb ---------------------------------------------------------------------------------------

REVIEWS: Mapping[str, Mapping[str, list[str]]] = {
    "train": {
        "neg": ["Bad, bad film.<br /><br />It isn't good.", "A BAD plot"],
        "pos": ["A good film; good plot, good fun!"],
    },
    "test": {"neg": ["unseen, bad"], "pos": ["good fun", ""]},
}


def write_imdb(root: Path) -> Path:
    for split, by_label in REVIEWS.items():
        for label, texts in by_label.items():
            folder = root / "aclImdb" / split / label
            folder.mkdir(parents=True)
            for number, text in enumerate(texts):
                (folder / f"{number}_7.txt").write_text(text, encoding="utf-8")
    (root / "aclImdb" / "imdb.vocab").write_text("the\n")
    return root


def review_columns(split: str) -> dict[str, list[Any]]:
    rows = [
        (text, label) for label, name in enumerate(("neg", "pos")) for text in REVIEWS[split][name]
    ]
    return {"text": [text for text, _ in rows], "label": [label for _, label in rows]}


def write_imdb_arrow(root: Path) -> Path:
    return write_arrow(root, {split: review_columns(split) for split in REVIEWS})


IMDB_WRITERS: dict[str, Callable[[Path], Path]] = {
    "aclImdb": write_imdb,
    "save_to_disk": write_imdb_arrow,
}


# -- Hugging Face's save_to_disk ----------------------------------------------------------------


def write_arrow(root: Path, splits: Mapping[str, Mapping[str, list[Any]]]) -> Path:
    """Write a ``DatasetDict``, each split in two files."""
    import pyarrow as pa

    root.mkdir()
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, columns in splits.items():
        (root / split).mkdir()
        table = pa.table(dict(columns))
        half = len(table) // 2
        shards = {f"data-{i:05}-of-00002.arrow": i for i in range(2)}
        for name, index in shards.items():
            rows = table.slice(half) if index else table.slice(0, half)
            with pa.ipc.new_stream(root / split / name, table.schema) as writer:
                writer.write_table(rows)
        state = {"_data_files": [{"filename": name} for name in shards], "_split": split}
        (root / split / "state.json").write_text(json.dumps(state))
        (root / split / "dataset_info.json").write_text("{}")
    return root
