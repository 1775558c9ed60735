"""Gathers the last stage's scores into results of mini-batches and of evaluation rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.messages import BatchResult
from ..protocol.schedule import Op
from .objective import Score

__all__ = ["EvaluationResult", "Scoreboard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What the last stage knows after a whole evaluation round.

    Attributes:
        round: number of the round: the epoch that it follows.
        samples: of the whole test set.
        loss: mean over the samples.
        metrics: the job's, each a mean over the samples.
    """

    round: int
    samples: int
    loss: float
    metrics: dict[str, float]


class Scoreboard:
    """Means over the micro-batches of a mini-batch, and over the batches of a round."""

    def __init__(
        self,
        *,
        round_batches: int,
        on_batch: Callable[[BatchResult], None],
        on_evaluation: Callable[[EvaluationResult], None],
    ) -> None:
        """Start with nothing scored.

        Args:
            round_batches: batches of one evaluation round.
            on_batch: called when a mini-batch is complete.
            on_evaluation: called when a round is complete.
        """
        self._round_batches = round_batches
        self._on_batch = on_batch
        self._on_evaluation = on_evaluation
        self._batch = _Mean()
        self._round = _Mean()

    def trained(self, score: Score, samples: int) -> None:
        """Take in one micro-batch; all of a mini-batch come before its ``updated``."""
        self._batch.add(score, samples)

    def updated(self, batch: int, lr: float) -> None:
        """Close mini-batch ``batch``, whose update used ``lr``."""
        mean = self._batch
        self._batch = _Mean()
        self._on_batch(
            BatchResult(
                batch=batch, samples=mean.samples, loss=mean.loss, metrics=mean.metrics, lr=lr
            )
        )

    def evaluated(self, op: Op, score: Score, samples: int) -> None:
        """Take in one batch of an evaluation round, which its last one closes."""
        self._round.add(score, samples)
        if op.micro == self._round_batches - 1:
            mean = self._round
            self._round = _Mean()
            self._on_evaluation(
                EvaluationResult(
                    round=op.batch, samples=mean.samples, loss=mean.loss, metrics=mean.metrics
                )
            )


class _Mean:
    """Mean weighted by samples; of one score, exactly that score."""

    def __init__(self) -> None:
        self.samples = 0
        self.loss = 0.0
        self.metrics: dict[str, float] = {}

    def add(self, score: Score, samples: int) -> None:
        self.samples += samples
        share = samples / self.samples
        self.loss += (score.loss - self.loss) * share
        for name, value in score.metrics.items():
            mean = self.metrics.get(name, 0.0)
            self.metrics[name] = mean + (value - mean) * share
