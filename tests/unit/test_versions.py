"""Weights that are read again: kept ones bit for bit, older versions, and how much memory it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import mlp, sgd
from torch import Tensor, nn

from spectrain.worker.reading import NEWEST, Ahead, Kept, Version, ahead
from spectrain.worker.segment import Segment
from spectrain.worker.weights import Weights


class Rig:
    """A model whose gradient is one everywhere."""

    def __init__(self, **options: Any) -> None:
        self.model = mlp()
        self.weights = Weights(list(self.model.named_children()), sgd(), **options)

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.weights.collect_gradients()
        self.weights.step()

    @property
    def clean(self) -> Tensor:
        return self.weights.clean[0].clone()

    @property
    def live(self) -> Tensor:
        return self.weights.live[0].clone()


def test_what_was_kept_is_read_again_bit_for_bit_after_updates() -> None:
    rig = Rig(keeps=True, predicts=True)
    rig.step()
    rig.weights.read(Ahead(2, keep=(5, 0)))
    kept = rig.live
    for _ in range(3):
        rig.step()
        rig.weights.read(NEWEST)
    assert not torch.equal(rig.live, kept)
    rig.weights.read(Kept((5, 0)))
    assert torch.equal(rig.live, kept)
    rig.weights.read(NEWEST)
    assert torch.equal(rig.live, rig.clean)


def test_bf16_is_kept_as_it_was_read() -> None:
    rig = Rig(keeps=True, predicts=True, live_dtype=torch.bfloat16)
    rig.step()
    rig.weights.read(Ahead(1, keep=(9, 0)))
    kept = rig.live
    rig.step()
    rig.weights.read(Kept((9, 0)))
    assert rig.live.dtype == torch.bfloat16
    assert torch.equal(rig.live, kept)


def test_what_was_kept_is_dropped_with_the_update_of_its_batch() -> None:
    rig = Rig(keeps=True)
    rig.weights.read(Ahead(0, keep=(0, 0)))
    rig.weights.read(Ahead(0, keep=(1, 0)))
    rig.step()
    rig.weights.read(Kept((1, 0)))
    with pytest.raises(AssertionError, match=r"nothing is kept for \(0, 0\), only for \[\(1, 0\)"):
        rig.weights.read(Kept((0, 0)))


def test_equal_weights_in_a_row_are_kept_once() -> None:
    rig = Rig(keeps=True)
    for batch in range(3):
        rig.weights.read(Ahead(0, keep=(batch, 0)))
    assert rig.weights.copies == 3  # clean, live, kept
    rig.step()
    rig.weights.read(Ahead(0, keep=(3, 0)))
    assert rig.weights.copies == 4
    rig.weights.read(Kept((1, 0)))
    rig.weights.read(Ahead(0, keep=(4, 0)))
    assert rig.weights.copies == 5  # others were read in between


def test_a_copy_may_be_kept_on_under_another_key() -> None:
    rig = Rig(keeps=True)
    rig.weights.read(Ahead(0, keep=(0, 0)))
    rig.weights.read(Ahead(0, keep=(7, 0)))
    kept = rig.live
    rig.step()  # drops the first
    rig.weights.read(Ahead(0, keep=(8, 0)))
    rig.weights.read(Kept((7, 0)))
    assert torch.equal(rig.live, kept)


def test_memory_is_used_again() -> None:
    rig = Rig(keeps=True)
    for batch in range(9):
        rig.weights.read(Ahead(0, keep=(batch + 1, 0)))
        rig.step()
        rig.weights.read(Kept((batch + 1, 0)))
    assert rig.weights.copies == 2 + 2


def test_reading_what_is_there_already_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(keeps=True, older=1)
    rig.step()
    rig.weights.read(Ahead(0, keep=(4, 0)))
    rig.weights.read(Kept((4, 0)))
    monkeypatch.setattr(Weights, "_copy_in", None)
    rig.weights.read(Kept((4, 0)))
    monkeypatch.undo()
    rig.weights.read(Version(0))
    monkeypatch.setattr(Weights, "_copy_in", None)
    rig.weights.read(Version(0))


def test_older_versions_are_those_that_were_clean_then() -> None:
    rig = Rig(older=3)
    versions: list[Tensor] = []
    for version in range(8):
        versions.append(rig.clean)
        for back in range(min(3, version) + 1):
            rig.weights.read(Version(version - back))
            assert torch.equal(rig.live, versions[version - back])
        rig.step()
    assert rig.weights.copies == 2 + 3


def test_a_version_out_of_reach_is_our_mistake() -> None:
    rig = Rig(older=2)
    for _ in range(4):
        rig.step()
    with pytest.raises(AssertionError, match=r"version 1 is not among \[2, 3\]"):
        rig.weights.read(Version(1))


def test_older_versions_survive_a_restart() -> None:
    rig, other = Rig(older=2), Rig(older=2)
    for _ in range(5):
        rig.step()
    state = rig.weights.optimizer.state_dict()
    memory = {name: tensor.clone() for name, tensor in rig.weights.memory().items()}
    assert sorted(memory) == ["version.3.0", "version.4.0"]
    other.weights.resume(5, [rig.clean], state, memory)
    for version in (3, 4, 5):
        for each in (rig, other):
            each.weights.read(Version(version))
        assert torch.equal(rig.live, other.live)


def test_weights_of_a_forward_in_flight_are_kept_again_when_they_are_shown() -> None:
    rig = Rig(keeps=True)
    clean, state = [rig.clean], rig.weights.optimizer.state_dict()
    for batch in (3, 4):
        rig.weights.show([torch.full_like(clean[0], batch)], keep=(batch, 0))
    rig.weights.resume(3, clean, state, {})
    rig.weights.read(NEWEST)
    for batch in (4, 3):
        rig.weights.read(Kept((batch, 0)))
        assert rig.live.unique().tolist() == [batch]


def test_keeping_without_having_said_so_is_our_mistake() -> None:
    rig = Rig()
    with pytest.raises(AssertionError, match="newest only"):
        rig.weights.read(Ahead(0, keep=(0, 0)))


def test_a_stage_without_weights_keeps_nothing_of_nothing() -> None:
    weights = Weights([("0", nn.ReLU())], sgd(), keeps=True, older=1, predicts=True)
    weights.read(Ahead(1, keep=(3, 0)))
    weights.step()
    weights.read(Kept((3, 0)))
    weights.read(Version(0))


def test_an_equal_look_ahead_is_the_same_object() -> None:
    assert ahead(3) is ahead(3) == Ahead(3)
    assert ahead(0) is NEWEST


def test_padding_is_kept_too() -> None:
    param = nn.Parameter(torch.ones(3))
    segment = Segment({}, [param], live_dtype=torch.float32, shared=False)
    assert segment.live.numel() == 32
