"""A method of one's own: a class and one entry in each table, and it trains and is restarted."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from pipelines import ListFeed, assert_same_bits, make_job, regression, sgd, train
from replay import Pipeline, cut, noisy_model, random_kills

from spectrain.protocol.methods import METHODS as SPECS
from spectrain.protocol.methods import PREDICTORS, MethodSpec
from spectrain.protocol.schedule import Op
from spectrain.protocol.staleness import behind
from spectrain.worker.methods import METHODS, Method, Place
from spectrain.worker.reading import Ahead, Kept, Reading


class Halfway(Method):
    """Forwards look half as far ahead as they are behind; backwards read the same again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.predicts = self.keeps = True

    def forward(self, op: Op, version: int) -> Reading:
        return Ahead(behind(op, version) // 2, keep=(op.batch, op.micro))

    def backward(self, op: Op, version: int) -> Reading:
        del version
        return Kept((op.batch, op.micro))


@pytest.fixture(autouse=True)
def halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MethodSpec(
        summary="half of the way",
        weight_copies=lambda stage, stages, _: 2 + stages - stage,
        predictors=tuple(PREDICTORS),
    )
    monkeypatch.setitem(SPECS, "halfway", spec)
    monkeypatch.setitem(METHODS, "halfway", Halfway)


def test_it_trains() -> None:
    job = make_job(noisy_model, optimizer=sgd(lr=0.02, momentum=0.9))
    outcome = train(job, ListFeed(regression(1) * 40), cut(4), "halfway")
    assert outcome.batches[-1].loss < 0.8 * outcome.batches[0].loss


def test_its_stages_are_restarted_to_the_same_bits(tmp_path: Path) -> None:
    job = make_job(noisy_model, optimizer=sgd(lr=0.05, momentum=0.9))
    feed, random = ListFeed(regression(14)), Random(0)
    pipeline = Pipeline(
        job=job, feed=feed, layer_counts=cut(4), directory=tmp_path, method="halfway", every=3
    )
    pipeline.run(random, random_kills(random, 4))
    assert pipeline.kills > 0
    assert_same_bits(pipeline.state(), train(job, feed, cut(4), "halfway").state)
