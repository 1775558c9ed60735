"""The stream ends of two and three stages, all in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from links import CPU
from waiting import wait_until
from worker_birth import worker_birth

from spectrain.protocol.errors import DeadlineError, LinkError
from spectrain.protocol.messages import Connect, Peer, WorkerReady
from spectrain.protocol.schedule import Op, Work
from spectrain.protocol.settings import Settings
from spectrain.worker.boundary import Parcel
from spectrain.worker.neighbours import Neighbours

WORK = Work(train_batches=100, epoch_batches=10)
LONG_S = 20.0

Open = Callable[..., Neighbours]


@pytest.fixture
def lost() -> list[tuple[str, str]]:
    """Collect the links that are told to be lost."""
    return []


@pytest.fixture
def open_stage(tmp_path: Path, lost: list[tuple[str, str]]) -> Iterator[Open]:
    """Open the ends of one stage; they close with the test."""
    opened: list[Neighbours] = []
    with zmq.Context() as context:

        def open_one(stage: int, stages: int = 2, **changes: Any) -> Neighbours:
            values = {"wait_timeout_s": LONG_S, "start_timeout_s": LONG_S, **changes}
            settings = Settings(job="job.py", run_dir="", stages=stages, **values)
            neighbours = Neighbours(
                worker_birth(stage=stage, ipc_dir=str(tmp_path)),
                context,
                None,
                settings,
                work=WORK,
                device=CPU,
                is_wanted=lambda _: True,
                on_link_lost=lambda name, reason: lost.append((name, reason)),
            )
            opened.append(neighbours)
            return neighbours

        yield open_one
        for neighbours in opened:
            close(neighbours)


def close(neighbours: Neighbours) -> None:
    for end in neighbours._ends():
        end.close()


def peer(ready: WorkerReady, *, gradients: bool) -> Peer:
    endpoint = ready.gradients_endpoint if gradients else ready.activations_endpoint
    return Peer(stage=ready.stage, incarnation=ready.incarnation, endpoint=endpoint, public_key="")


def join(above: Neighbours, below: Neighbours, generation: int = 1) -> None:
    """Do what the coordinator does: tell each where the other listens."""
    down = peer(below.ready(0), gradients=False)
    up = peer(above.ready(0), gradients=True)
    above.connect(Connect(generation=generation, upstream=None, downstream=down))
    below.connect(Connect(generation=generation, upstream=up, downstream=None))


def parcel(text: str) -> Parcel:
    op = Op.parse(text)
    return Parcel(op, torch.full((2, 3), float(op.batch)), 2, 2)


@pytest.mark.parametrize(
    ("stage", "has_upstream", "has_downstream"),
    [(0, False, True), (1, True, True), (2, True, False)],
)
def test_a_stage_has_the_ends_that_its_place_asks_for(
    open_stage: Open, stage: int, *, has_upstream: bool, has_downstream: bool
) -> None:
    ends = open_stage(stage, 3)
    assert [end is not None for end in (ends.activations_in, ends.gradients_out)] == [
        has_upstream
    ] * 2
    assert [end is not None for end in (ends.activations_out, ends.gradients_in)] == [
        has_downstream
    ] * 2


def test_a_stage_tells_where_its_neighbours_may_connect(open_stage: Open) -> None:
    first, middle, last = (open_stage(stage, 3).ready(7) for stage in range(3))
    assert (middle.stage, middle.incarnation, middle.parameters) == (1, 0, 7)
    assert first.activations_endpoint == last.gradients_endpoint == ""
    endpoints = {
        first.gradients_endpoint, middle.activations_endpoint, middle.gradients_endpoint,
        last.activations_endpoint,
    }  # fmt: skip
    assert len(endpoints) == 4
    assert all(endpoint.startswith("ipc://") for endpoint in endpoints)


def test_parcels_go_down_and_gradients_come_up(open_stage: Open) -> None:
    above, below = open_stage(0), open_stage(1)
    join(above, below)
    above.wait_connected()
    below.wait_connected()
    assert above.activations_out is not None
    assert above.gradients_in is not None
    assert below.activations_in is not None
    assert below.gradients_out is not None
    above.activations_out.put(parcel("F3"))
    taken = below.activations_in.take(Op.parse("F3"))
    assert taken is not None
    assert torch.equal(taken.value, torch.full((2, 3), 3.0))
    below.gradients_out.put(parcel("B3"))
    assert above.gradients_in.take(Op.parse("B3")) is not None
    above.flush()
    below.flush()


def test_only_the_side_that_is_named_is_built(open_stage: Open) -> None:
    above, middle, below = (open_stage(stage, 3, start_timeout_s=0.05) for stage in range(3))
    join(above, middle)
    above.activations_out.wait_connected(LONG_S)
    above.gradients_in.wait_connected(LONG_S)
    above.wait_connected()
    with pytest.raises(DeadlineError):
        middle.wait_connected()
    join(middle, below, generation=2)
    middle.activations_out.wait_connected(LONG_S)
    middle.gradients_in.wait_connected(LONG_S)
    middle.wait_connected()


def test_a_stage_has_sent_once_a_neighbour_has_anything_of_it(open_stage: Open) -> None:
    above, below = open_stage(0), open_stage(1)
    join(above, below)
    assert not above.has_sent
    above.activations_out.put(parcel("F0"))
    above.flush()
    assert above.has_sent
    assert not below.has_sent
    assert (above.suppressed, below.suppressed) == (0, 0)


def test_a_stage_alone_has_nobody_to_tell_it_by(open_stage: Open) -> None:
    alone = open_stage(0, 1)
    assert alone.has_sent
    assert alone.suppressed == 0
    alone.wait_connected()
    alone.flush()
    alone.trim(3)
    alone.stop_before(3)


def test_what_is_committed_is_trimmed_from_the_logs(open_stage: Open) -> None:
    above, below = open_stage(0), open_stage(1)
    join(above, below)
    for number in range(3):
        above.activations_out.put(parcel(f"F{number}"))
        below.activations_in.take(Op.parse(f"F{number}"))
    above.flush()
    kept_bytes = above.activations_out.log_bytes_used
    above.trim(2)
    assert above.activations_out.log_bytes_used * 3 == kept_bytes
    assert above.peak_log_bytes == {"peak_activations_log_bytes": kept_bytes}
    assert below.peak_log_bytes == {"peak_gradients_log_bytes": 0}


def test_after_a_stop_nobody_waits_for_activations_that_will_not_come(open_stage: Open) -> None:
    above, below = open_stage(0), open_stage(1)
    join(above, below)
    below.wait_connected()
    below.stop_before(5)
    assert below.activations_in.take(Op.parse("F5")) is None


def test_a_lost_link_is_told_by_its_stream(open_stage: Open, lost: list[tuple[str, str]]) -> None:
    above, below = open_stage(0), open_stage(1)
    join(above, below)
    above.wait_connected()
    below.wait_connected()
    close(below)
    above.activations_out.put(parcel("F0"))
    wait_until(lambda: {name for name, _ in lost} == {"activations", "gradients"}, what="word")


def test_what_ends_one_stream_is_heard_wherever_the_stage_waits(open_stage: Open) -> None:
    above = open_stage(0)
    above._fail(LinkError("it is over"))
    with pytest.raises(LinkError, match="it is over"):
        above.gradients_in.take(Op.parse("B0"))
    with pytest.raises(LinkError, match="it is over"):
        above.activations_out.put(parcel("F0"))
