"""CIFAR-10 is read from whatever form the user has it in, and a copy that cannot be is told why."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from imitated_data import (
    BATCHES,
    CIFAR_WRITERS,
    PIXELS,
    batches,
    picture_columns,
    png,
    python2_pickle,
    python3_pickle,
    write_arrow,
    write_binary,
    write_cifar_arrow,
    write_pickled,
)
from torch import nn

from spectrain.protocol.errors import DataError
from spectrain.readers import Images, read_cifar10


def expected(names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = [batches()[name] for name in names]
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in chosen]))
    labels = torch.tensor([label for _, labels in chosen for label in labels])
    return pixels.view(-1, 3, 32, 32), labels


def refused(path: Path) -> str:
    with pytest.raises(DataError) as refusal:
        read_cifar10(path)
    return str(refusal.value)


# -- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", CIFAR_WRITERS.values(), ids=CIFAR_WRITERS.keys())
def test_every_layout_holds_the_same_pictures(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    train, test = read_cifar10(write(tmp_path / "copy"))
    for images, names in ((train, BATCHES[:-1]), (test, BATCHES[-1:])):
        pixels, labels = expected(names)
        assert torch.equal(images.pixels, pixels)
        assert torch.equal(images.labels, labels)


def test_the_imitated_pickle_is_what_numpy_takes_for_a_python_2_batch() -> None:
    pixels, labels = batches()["test_batch"]
    batch = pickle.loads(python2_pickle(pixels, labels), encoding="latin1")
    assert np.array_equal(batch["data"], pixels)
    assert batch["labels"] == labels
    assert batch["batch_label"] == "training batch 1 of 5"


def test_the_folder_or_archive_itself_may_be_named(tmp_path: Path) -> None:
    folder = write_pickled(tmp_path / "a") / "cifar-10-batches-py"
    archive = CIFAR_WRITERS["binary archive"](tmp_path / "b") / "cifar-10-binary.tar.gz"
    renamed = folder.rename(tmp_path / "mine")
    for path in (renamed, archive):
        assert torch.equal(read_cifar10(path)[0].pixels, expected(BATCHES[:-1])[0])


def test_a_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path / "data")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_cifar10("~/data")[0]) == 10


def test_reading_imports_pyarrow_and_pillow_only_where_needed(tmp_path: Path) -> None:
    script = (
        "import sys; from spectrain.readers import read_cifar10; read_cifar10(sys.argv[1]); "
        "print('pyarrow' in sys.modules, 'PIL' in sys.modules)"
    )
    command = [sys.executable, "-c", script, write_binary(tmp_path / "copy")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["False", "False"]


# -- samples ------------------------------------------------------------------------------------


def test_a_sample_is_a_normalised_picture_and_its_class(tmp_path: Path) -> None:
    train, _ = read_cifar10(write_binary(tmp_path / "copy"))
    pixels, labels = expected(BATCHES[:-1])
    picture, label = train[3]
    assert picture.shape == (3, 32, 32)
    assert picture.dtype == torch.float32
    assert label == labels[3]
    value = pixels[3, 1, 5, 6].item() / 255
    assert picture[1, 5, 6].item() == pytest.approx((value - 0.4822) / 0.2435, rel=1e-5)


def test_augmentation_moves_by_up_to_four_pixels_and_mirrors() -> None:
    pixels, labels = expected(BATCHES[:1])
    windows = nn.functional.pad(pixels[0], (4, 4, 4, 4)).unfold(1, 32, 1).unfold(2, 32, 1)
    moved = windows.permute(1, 2, 0, 3, 4).reshape(9 * 9, 3, 32, 32)
    every = Images(torch.cat([moved, moved.flip(3)]), torch.zeros(2 * 9 * 9))
    augmented = Images(pixels, labels, augment=True)
    torch.manual_seed(0)
    drawn = {augmented[0][0].numpy().tobytes() for _ in range(2000)}
    assert drawn == {picture.numpy().tobytes() for picture, _ in every}


def test_augmentation_repeats_with_torchs_generator_and_spares_the_test_set(
    tmp_path: Path,
) -> None:
    train, test = read_cifar10(write_binary(tmp_path / "copy"), augment=True)
    torch.manual_seed(3)
    first = [train[0][0] for _ in range(4)]
    torch.manual_seed(3)
    again = [train[0][0] for _ in range(4)]
    assert all(map(torch.equal, first, again))
    assert not all(torch.equal(first[0], other) for other in first)
    assert all(torch.equal(test[0][0], test[0][0]) for _ in range(4))


# -- what is no copy ----------------------------------------------------------------------------


def test_without_a_folder_the_option_is_named() -> None:
    with pytest.raises(DataError, match=r"no copy of CIFAR-10 is named.*--set data=FOLDER"):
        read_cifar10("")


def test_a_folder_without_a_copy_is_told_what_was_looked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    for number in range(10):
        (tmp_path / f"notes{number}.txt").touch()
    text = refused(tmp_path)
    assert str(tmp_path) in text
    for name in ("batches-py", "python.tar.gz", "batches-bin", "binary.tar.gz"):
        assert f"cifar-10-{name}" in text
    assert "dataset_dict.json" in text
    assert "Found there: mnist/, notes0.txt," in text
    assert "and 3 more. Name the folder" in text


def test_an_empty_a_missing_and_a_wrong_place_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    assert "the folder is empty" in refused_in_new_folder(tmp_path)
    assert "there is no such folder" in refused(tmp_path / "nowhere")
    assert "a file of 3 bytes" in refused(tmp_path / "file")


def refused_in_new_folder(root: Path) -> str:
    (root / "empty").mkdir()
    return refused(root / "empty")


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_missing_batch_is_named(tmp_path: Path, name: str) -> None:
    folder = write_pickled(tmp_path / "copy") / "cifar-10-batches-py"
    (folder / name).unlink()
    assert refused(tmp_path / "copy") == (
        f"{folder} lacks {name}: the copy is not whole. Fetch or unpack it again"
    )


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    archive = CIFAR_WRITERS["archive of pickles"](tmp_path / "copy") / "cifar-10-python.tar.gz"
    content = archive.read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2]):
        archive.write_bytes(damaged)
        text = refused(tmp_path / "copy")
        assert text.startswith(str(archive))
        assert "is damaged" in text or "the copy is not whole" in text


# -- batches ------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def with_test_batch(root: Path, content: bytes) -> Path:
    (write_pickled(root) / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    return root


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, protocol: int
) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps({"data": Evil(mark), "labels": [0]}, protocol)
    text = refused(with_test_batch(tmp_path / "copy", content))
    assert "test_batch" in text
    assert "which has no place there and was not run" in text
    assert not mark.exists()
    pickle.loads(content)  # not for want of trying
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        python3_pickle(*batches()["test_batch"])[:-200],
        pickle.dumps([1, 2]),
        pickle.dumps({"data": b"", "labels": [0]}),
        python3_pickle(np.zeros((2, PIXELS), np.int16), [0, 1]),
        python3_pickle(np.asfortranarray(np.zeros((2, PIXELS), np.uint8)), [0, 1]),
        python3_pickle(np.zeros((2, PIXELS), np.uint8), (0, 1)),
        # BUILD on a stand-in that was made without one of its arguments
        b"\x80\x02cnumpy\ndtype\n)R.",
    ],
)
def test_what_is_no_batch_is_refused(tmp_path: Path, content: bytes) -> None:
    text = refused(with_test_batch(tmp_path / "copy", content))
    assert "is not a batch of CIFAR-10" in text


def test_pixels_and_labels_must_fit_together(tmp_path: Path) -> None:
    pixels, _ = batches()["test_batch"]
    for number, labels in enumerate(([], [1], [1, 2, 3])):
        text = refused(with_test_batch(tmp_path / str(number), python2_pickle(pixels, labels)))
        assert text.endswith(f"has 6144 bytes of pixels for {len(labels)} labels")


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    pixels, _ = batches()["test_batch"]
    text = refused(with_test_batch(tmp_path / "copy", python2_pickle(pixels, [9, 10])))
    assert text.endswith("has the label 10: CIFAR-10 has the classes 0 to 9")


@pytest.mark.parametrize("size", [0, 3072, 2 * 3073 - 1])
def test_a_binary_batch_has_whole_records(tmp_path: Path, size: int) -> None:
    folder = write_binary(tmp_path / "copy") / "cifar-10-batches-bin"
    (folder / "data_batch_2.bin").write_bytes(bytes(size))
    assert f"data_batch_2.bin in {folder} has {size} bytes" in refused(tmp_path / "copy")


# -- Hugging Face's files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "advice"),
    [("pyarrow", "pip install pyarrow pillow"), ("PIL", "pip install pillow")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, advice: str
) -> None:
    write_cifar_arrow(tmp_path / "copy")
    monkeypatch.setitem(sys.modules, package, None)
    assert advice in refused(tmp_path / "copy")


def test_a_missing_shard_or_split_is_named(tmp_path: Path) -> None:
    train = write_cifar_arrow(tmp_path / "copy") / "train"
    (train / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow is missing" in refused(tmp_path / "copy")
    (train / "state.json").unlink()
    assert "state.json is missing" in refused(tmp_path / "copy")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    train = write_cifar_arrow(tmp_path / "copy") / "train"
    shard = train / "data-00000-of-00002.arrow"
    for content in (b"", b"no arrow", shard.read_bytes()[:2000]):
        shard.write_bytes(content)
        assert f"{shard} cannot be read" in refused(tmp_path / "copy")
    for content in ("{}", "no json", json.dumps({"_data_files": ["a"]})):
        (train / "state.json").write_text(content)
        assert "state.json cannot be read" in refused(tmp_path / "copy")


def test_columns_and_pictures_must_be_those_of_cifar10(tmp_path: Path) -> None:
    train, test = picture_columns(BATCHES[:-1]), picture_columns(BATCHES[-1:])
    big = png(np.zeros(3 * 64 * 64, np.uint8), 64)
    wrong = {
        "has no column img or image, but text": {"text": ["a"]},
        "has no column label or labels, but img": {"img": test["img"]},
        "cannot be decoded": {**test, "img": [{"bytes": b"no png", "path": None}] * 2},
        "has a picture of 12288 bytes": {**test, "img": [{"bytes": big, "path": None}] * 2},
        "has the label 12": {**test, "label": [1, 12]},
    }
    for number, (text, columns) in enumerate(wrong.items()):
        root = write_arrow(tmp_path / str(number), {"train": train, "test": columns})
        assert text in refused(root)
