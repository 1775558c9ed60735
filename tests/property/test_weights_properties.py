"""Laws of prediction and restoring that hold for any model, optimizer and sequence of calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from pipelines import (
    ListFeed,
    assert_same_bits,
    least_microbatches,
    make_job,
    mlp,
    nadam,
    regression,
    train,
)
from torch import Tensor, nn

from spectrain.protocol.methods import METHODS
from spectrain.protocol.staleness import predicted
from spectrain.worker.segment import Segment
from spectrain.worker.weights import Weights

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


class Bag(nn.Module):
    """Parameters of any shapes, whose loss is a sum of squares."""

    def __init__(self, sizes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.values = nn.ParameterList(
            [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        )

    def loss(self) -> Tensor:
        return torch.stack([value.float().pow(2).sum() for value in self.values]).sum()


@st.composite
def optimizers(draw: st.DrawFn) -> Any:
    lr = draw(st.floats(1e-4, 0.5))
    decay = draw(st.sampled_from([0.0, 0.01]))
    kind = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    groups = draw(st.integers(1, 3))

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        parts = [params[start::groups] for start in range(groups)]
        given_groups = [{"params": part, "lr": lr * (i + 1)} for i, part in enumerate(parts)]
        if kind == "sgd":
            return torch.optim.SGD(given_groups, lr=lr, momentum=0.9, weight_decay=decay)
        family = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return family(given_groups, lr=lr, weight_decay=decay)

    return build


def make(bag: Bag, optimizer: Any, dtype: torch.dtype) -> Weights:
    return Weights([("0", bag)], optimizer, live_dtype=dtype, predicts=True)


dtypes = st.sampled_from([torch.float32, torch.bfloat16])
sizes = st.lists(shapes, min_size=1, max_size=5)


@given(sizes=sizes, optimizer=optimizers(), dtype=dtypes, calls=st.lists(st.integers(0, 9)))
def test_live_equals_clean_after_any_predictions_and_updates(
    sizes: list[tuple[int, ...]], optimizer: Any, dtype: torch.dtype, calls: list[int]
) -> None:
    bag = Bag(sizes, 0)
    weights = make(bag, optimizer, dtype)
    for horizon in calls:
        weights.predict(horizon)
        bag.loss().backward()
        weights.predict(0)
        weights.collect_gradients()
        if horizon % 2:
            weights.step()
        weights.predict(0)
        clean = weights.clean_state()
        for name, live in bag.state_dict().items():
            assert torch.equal(live, clean[f"0.{name}"].to(dtype))
    assert weights.version == sum(horizon % 2 for horizon in calls)


@given(sizes=sizes, optimizer=optimizers(), calls=st.lists(st.integers(0, 9), max_size=6))
def test_predictions_do_not_change_what_the_optimizer_does(
    sizes: list[tuple[int, ...]], optimizer: Any, calls: list[int]
) -> None:
    bag, plain = Bag(sizes, 1), Bag(sizes, 1)
    weights = make(bag, optimizer, torch.float32)
    plain_optimizer = optimizer(list(plain.parameters()))
    for horizon in calls:
        weights.predict(horizon)
        weights.predict(0)
        for model in (bag, plain):
            model.loss().backward()
        weights.collect_gradients()
        weights.step()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    weights.predict(0)
    assert_same_bits(bag.state_dict(), plain.state_dict())


@given(sizes=sizes, optimizer=optimizers(), horizon=st.integers(0, 20), dtype=dtypes)
def test_a_prediction_never_writes_to_clean_weights_or_state(
    sizes: list[tuple[int, ...]], optimizer: Any, horizon: int, dtype: torch.dtype
) -> None:
    bag = Bag(sizes, 2)
    weights = make(bag, optimizer, dtype)
    bag.loss().backward()
    weights.collect_gradients()
    weights.step()
    clean = {name: tensor.clone() for name, tensor in weights.clean_state().items()}
    states = [
        {key: torch.as_tensor(value).clone() for key, value in state.items()}
        for state in weights.optimizer.state.values()
    ]
    weights.predict(horizon)
    assert_same_bits(weights.clean_state(), clean)
    for state, before in zip(weights.optimizer.state.values(), states, strict=True):
        assert_same_bits({k: torch.as_tensor(v) for k, v in state.items()}, before)


@given(sizes=sizes, horizon=st.integers(1, 16))
def test_momentum_prediction_is_last_delta_extrapolation(
    sizes: list[tuple[int, ...]], horizon: int
) -> None:
    bag = Bag(sizes, 3)
    weights = make(bag, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.float32)
    for _ in range(3):
        previous = {name: tensor.clone() for name, tensor in bag.state_dict().items()}
        bag.loss().backward()
        weights.collect_gradients()
        weights.step()
        weights.predict(0)
    current = {name: tensor.clone() for name, tensor in bag.state_dict().items()}
    weights.predict(horizon)
    for name, live in bag.state_dict().items():
        expected = current[name] + horizon * (current[name] - previous[name])
        torch.testing.assert_close(live, expected, rtol=1e-4, atol=1e-4)


@given(sizes=sizes, shared=st.booleans())
def test_a_segment_keeps_every_value_in_aligned_places(
    sizes: list[tuple[int, ...]], *, shared: bool
) -> None:
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    values = [param.detach().clone() for param in params]
    segment = Segment({}, params, live_dtype=torch.float32, shared=shared)
    for param, live, value in zip(params, segment.views(segment.live), values, strict=True):
        assert torch.equal(param, value)
        assert torch.equal(live, value)
        assert live.storage_offset() % 32 == 0
    assert segment.clean.count_nonzero() == sum(int(v.count_nonzero()) for v in values)
    assert (segment.live is segment.clean) is shared


@given(
    cuts=st.sets(st.integers(1, 6)),
    batches=st.integers(1, 6),
    method=st.sampled_from([*METHODS]),
)
def test_any_cut_and_length_runs_to_its_end(cuts: set[int], batches: int, method: str) -> None:
    edges = [0, *sorted(cuts), 7]
    counts = [right - left for left, right in pairwise(edges)]
    microbatches = least_microbatches(method, len(counts))
    feed = ListFeed(
        regression(batches), test=regression(1), epoch_batches=2, microbatches=microbatches
    )
    job = make_job(mlp, optimizer=nadam if method == "nesterov" else None)
    outcome = train(job, feed, counts, method)
    assert [result.batch for result in outcome.batches] == list(range(batches))
    assert len(outcome.evaluations) == -(-batches // 2)
    assert set(outcome.state) == set(mlp().state_dict())
    assert outcome.staleness == [
        predicted(METHODS[method].schedule, k, len(counts), feed.work) for k in range(len(counts))
    ]
