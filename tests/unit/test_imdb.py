"""IMDb's reviews become word numbers of one length, the same from whatever form the user has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from imitated_data import IMDB_WRITERS, review_columns, write_arrow, write_imdb

from spectrain.protocol.errors import DataError
from spectrain.readers import read_imdb
from spectrain.readers.imdb import PADDING, UNKNOWN, words

# In the training texts: good 4 times, bad 3, a, film and plot 2, fun, isn't and it 1.
RANKED = ["good", "bad", "a", "film", "plot", "fun", "isn't", "it"]
NUMBERS = {word: number for number, word in enumerate(RANKED, start=2)}


def numbers(*found: str, length: int) -> list[int]:
    known = [NUMBERS.get(word, UNKNOWN) for word in found]
    return known + [PADDING] * (length - len(known))


@pytest.mark.parametrize("write", IMDB_WRITERS.values(), ids=IMDB_WRITERS.keys())
def test_every_layout_holds_the_same_reviews(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    train, test = read_imdb(write(tmp_path / "copy"), length=7)
    tokens, labels = train.tensors
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.tolist() == [
        numbers("bad", "bad", "film", "it", "isn't", "good", length=7),
        numbers("a", "bad", "plot", length=7),
        numbers("a", "good", "film", "good", "plot", "good", "fun", length=7),
    ]
    assert labels.tolist() == [0, 0, 1]
    assert test.tensors[1].tolist() == [0, 1, 1]


def test_words_come_in_lower_case_without_marks_and_tags() -> None:
    assert words("It's <br /><br />NOT 'bad': 9/10 -- Amélie<i>!</i>") == [
        "it's", "not", "bad", "9", "10", "amélie",
    ]  # fmt: skip


def test_numbers_come_from_the_training_texts_alone(tmp_path: Path) -> None:
    _, test = read_imdb(write_imdb(tmp_path / "copy"), length=3)
    assert test.tensors[0].tolist()[:2] == [
        [UNKNOWN, NUMBERS["bad"], PADDING],
        [NUMBERS["good"], NUMBERS["fun"], PADDING],
    ]


def test_a_review_without_words_is_one_unknown_word(tmp_path: Path) -> None:
    _, test = read_imdb(write_imdb(tmp_path / "copy"), length=3)
    assert test.tensors[0].tolist()[2] == [UNKNOWN, PADDING, PADDING]


def test_rare_words_fall_out_of_a_small_vocabulary(tmp_path: Path) -> None:
    train, _ = read_imdb(write_imdb(tmp_path / "copy"), vocabulary=4, length=3)
    assert train.tensors[0].tolist() == [[3, 3, 1], [1, 3, 1], [1, 2, 1]]
    assert max(token for row in train.tensors[0].tolist() for token in row) < 4


def test_the_folder_itself_may_be_named(tmp_path: Path) -> None:
    folder = write_imdb(tmp_path / "copy") / "aclImdb"
    assert len(read_imdb(folder)[0]) == 3
    assert read_imdb(folder)[0].tensors[0].shape == (3, 200)


def test_without_a_folder_the_option_is_named() -> None:
    with pytest.raises(DataError, match=r"no copy of IMDb is named.*--set data=FOLDER"):
        read_imdb("")


def test_a_folder_without_a_copy_is_told_what_was_looked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "aclImdb_v1.tar.gz").touch()
    with pytest.raises(DataError) as refusal:
        read_imdb(tmp_path)
    for text in (str(tmp_path), "dataset_dict.json", "folder aclImdb", "there: aclImdb_v1.tar.gz"):
        assert text in str(refusal.value)


def test_a_folder_without_reviews_is_named(tmp_path: Path) -> None:
    (folder,) = write_imdb(tmp_path / "copy").glob("aclImdb/test/neg")
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"test/neg holds no \.txt files: the copy is not whole"):
        read_imdb(tmp_path / "copy")


def test_columns_must_be_those_of_imdb(tmp_path: Path) -> None:
    train, test = review_columns("train"), review_columns("test")
    wrong = {
        "has no column text, but label": {"label": [0]},
        "has the label -1: IMDb has 0, negative": {**test, "label": [0, 1, -1]},
    }
    for number, (text, columns) in enumerate(wrong.items()):
        root = write_arrow(tmp_path / str(number), {"train": train, "test": columns})
        with pytest.raises(DataError, match=text):
            read_imdb(root)
