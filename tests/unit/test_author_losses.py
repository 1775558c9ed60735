"""Losses of the authors' own code on the same work, and what makes ours differ from them.

``benchmarks/quality/author_curves.json`` has the losses that the public code of PipeDream (weight
stashing), SpecTrain (vanilla, version 1, version 2) and PipeOptim gave. Where it does not do what
its paper says, ``author_methods.py`` beside it does as the code does: then the losses are the same,
so nothing else can be the reason.

Only the first losses are compared here: rounding draws the rest apart, as docs/results.md shows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
BATCHES = {(4, 0.02): 24, (4, 0.05): 16, (8, 0.02): 16, (8, 0.05): 16}
"""How many, by stages and learning rate: as long as one bit of each of the initial weights moves no
loss by more than 1e-4."""
TOLERANCE = 2e-4  # with the file's five digits
PLAIN_TOLERANCE = 5e-3  # with 8 stages that bit moves the losses of a plain loop by 3e-3

work = pytest.mark.parametrize(("stages", "lr"), BATCHES)


@pytest.fixture
def author_work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(QUALITY)
    return importlib.import_module("author_work")


Losses = Callable[..., tuple[list[float], list[float]]]


@pytest.fixture
def losses(author_work: ModuleType) -> Losses:
    """Theirs and ours."""

    def both(
        stages: int, lr: float, method: str, *, as_coded: bool = False
    ) -> tuple[list[float], list[float]]:
        case = author_work.Case(stages, lr, method)
        batches = BATCHES[stages, lr]
        theirs = author_work.author_losses()[case][:batches]
        return theirs, author_work.losses(case, batches=batches, as_coded=as_coded)

    return both


@work
def test_sync_has_the_losses_of_a_plain_loop(losses: Losses, stages: int, lr: float) -> None:
    theirs, ours = losses(stages, lr, "sync")
    assert ours == pytest.approx(theirs, abs=PLAIN_TOLERANCE)


@work
@pytest.mark.parametrize("method", ["vanilla", "stash"])
def test_methods_that_predict_nothing_have_the_losses_of_the_authors_code(
    losses: Losses, method: str, stages: int, lr: float
) -> None:
    theirs, ours = losses(stages, lr, method)
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


@work
@pytest.mark.parametrize("method", ["spectrain", "spectrain-v2", "pipeoptim"])
def test_methods_that_predict_by_the_paper_have_others(
    losses: Losses, method: str, stages: int, lr: float
) -> None:
    theirs, ours = losses(stages, lr, method)
    assert ours != pytest.approx(theirs, abs=10 * TOLERANCE)


@work
@pytest.mark.parametrize("method", ["spectrain", "spectrain-v2", "pipeoptim"])
def test_they_differ_by_what_the_authors_code_does_otherwise(
    losses: Losses, method: str, stages: int, lr: float
) -> None:
    theirs, ours = losses(stages, lr, method, as_coded=True)
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_curves_part_at_the_first_loss_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(QUALITY.parent)
    monkeypatch.syspath_prepend(QUALITY)
    apart_from = importlib.import_module("author_curves").apart_from
    assert apart_from([1.0, 2.0], [1.0005, 2.0]) is None
    assert apart_from([1.0, 2.0, 3.0], [1.0, 2.1, 3.0]) == 1
    assert apart_from([1.0, math.nan], [1.0, 2.0]) == 1
