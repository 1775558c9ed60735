"""Scores become results of mini-batches and evaluation rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from spectrain.protocol.messages import BatchResult
from spectrain.protocol.schedule import Op
from spectrain.worker.objective import Score
from spectrain.worker.scoreboard import EvaluationResult, Scoreboard


@dataclass
class Results:
    batches: list[BatchResult] = field(default_factory=list[BatchResult])
    rounds: list[EvaluationResult] = field(default_factory=list[EvaluationResult])

    def board(self, round_batches: int = 2) -> Scoreboard:
        return Scoreboard(
            round_batches=round_batches,
            on_batch=self.batches.append,
            on_evaluation=self.rounds.append,
        )


def test_one_score_is_passed_on_to_the_last_bit() -> None:
    results = Results()
    board = results.board()
    loss = 0.1 + 0.2  # times 3, divided by 3, is another number
    board.trained(Score(loss, {"accuracy": 0.7}), 3)
    board.updated(5, 0.01)
    assert results.batches == [
        BatchResult(batch=5, samples=3, loss=loss, metrics={"accuracy": 0.7}, lr=0.01)
    ]


def test_micro_batches_count_by_their_samples() -> None:
    results = Results()
    board = results.board()
    board.trained(Score(1.0, {"accuracy": 0.5}), 1)
    board.trained(Score(4.0, {"accuracy": 1.0}), 3)
    board.updated(0, 0.1)
    assert results.batches[0].samples == 4
    assert results.batches[0].loss == pytest.approx(13 / 4)
    assert results.batches[0].metrics == pytest.approx({"accuracy": 3.5 / 4})


def test_each_mini_batch_starts_afresh() -> None:
    results = Results()
    board = results.board()
    for batch, loss in enumerate((1.0, 2.0)):
        board.trained(Score(loss), 2)
        board.updated(batch, 0.1)
    assert [(r.batch, r.samples, r.loss) for r in results.batches] == [(0, 2, 1.0), (1, 2, 2.0)]


def test_a_round_is_reported_once_with_its_last_batch() -> None:
    results = Results()
    board = results.board(round_batches=2)
    board.evaluated(Op.parse("E3.0"), Score(1.0, {"accuracy": 0.0}), 3)
    assert results.rounds == []
    board.evaluated(Op.parse("E3.1"), Score(5.0, {"accuracy": 1.0}), 1)
    assert results.rounds == [
        EvaluationResult(round=3, samples=4, loss=2.0, metrics={"accuracy": 0.25})
    ]


def test_an_evaluation_between_micro_batches_does_not_mix_in() -> None:
    results = Results()
    board = results.board(round_batches=1)
    board.trained(Score(1.0), 1)
    board.evaluated(Op.parse("E0.0"), Score(9.0), 1)
    board.updated(0, 0.1)
    assert results.batches[0].loss == 1
    assert results.rounds[0].loss == 9
