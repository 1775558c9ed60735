"""The fault matrix names tests that exist, and leaves out none that names a row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "fault_matrix.md").read_text()
SHOWS = re.compile(r'^def (test_\w+)\([^"]*?"""Rows? (.*?)[:."]', re.MULTILINE)
ROWS = dict(re.findall(r"^\| (\d+) \|(.*)\|$", TABLE, re.MULTILINE))


def test_every_row_is_there_once_and_in_order() -> None:
    assert list(map(int, re.findall(r"^\| (\d+) \|", TABLE, re.MULTILINE))) == list(range(1, 37))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 36
    for file, test in named:
        assert f"\ndef {test}(" in (TESTS / file).read_text(), f"{file}::{test}"


def test_a_test_that_says_which_rows_it_shows_stands_in_these_rows() -> None:
    shown = [
        (test, row)
        for path in TESTS.rglob("test_*.py")
        for test, rows in SHOWS.findall(path.read_text())
        for row in numbers(rows)
    ]
    assert len(shown) > 30
    for test, row in shown:
        assert test in ROWS[row], f"{test} says that it shows row {row}"


def numbers(text: str) -> list[str]:
    """Read "1 and 11", "2 to 4"."""
    found = list(map(int, re.findall(r"\d+", text)))
    if " to " in text:
        found = list(range(found[0], found[1] + 1))
    return list(map(str, found))
