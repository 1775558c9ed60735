"""A finished stage's weights on their way to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from worker_birth import RUN_ID, worker_birth
from zmq.utils.garbage import gc as zmq_collector

from spectrain.protocol.codec import MAX_PAYLOAD_BYTES
from spectrain.protocol.messages import TensorSpec, WeightsPart
from spectrain.protocol.sockets import Server
from spectrain.worker.delivery import deliver_weights

LONG_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _collector_of_uncopied_frames() -> Iterator[None]:
    """Start pyzmq's own thread here, so that it is nobody's leak, and end it."""
    zmq.Frame(bytes(1 << 17), copy=False)
    yield
    zmq_collector.stop()


def delivered(folder: Path, state: dict[str, torch.Tensor]) -> list[tuple[Any, WeightsPart, bytes]]:
    """Return who sent what, and the bytes of it."""
    with zmq.Context() as context:
        server = Server(
            context,
            run_id=bytes.fromhex(RUN_ID),
            ipc=folder / "d",
            max_frame_bytes=MAX_PAYLOAD_BYTES,
        )
        birth = worker_birth(stage=2, incarnation=1, data=server.ipc_endpoint)
        client = deliver_weights(birth, context, state)
        parts: list[tuple[Any, WeightsPart, bytes]] = []
        for _ in state:
            received = server.receive(LONG_S)
            assert received is not None
            assert isinstance(received.message, WeightsPart)
            (frame,) = received.payload
            parts.append((received.identity, received.message, bytes(frame)))
        client.close()
        server.close()
    return parts


def test_every_tensor_is_sent_under_its_name_with_its_form(tmp_path: Path) -> None:
    state = {
        "0.weight": torch.randn(3, 4),
        "0.bias": torch.zeros(0),
        "1.count": torch.tensor(7),
        "1.half": torch.ones(5, dtype=torch.bfloat16),
    }
    parts = delivered(tmp_path, state)
    assert [(who, part.name) for who, part, _ in parts] == [
        ("worker/2/1/weights", name) for name in state
    ]
    for (_, part, payload), tensor in zip(parts, state.values(), strict=True):
        assert (part.stage, part.incarnation) == (2, 1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert part.spec == TensorSpec(dtype=dtype, shape=tuple(tensor.shape))
        assert payload == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_are_sent_in_row_major_order_and_without_their_graph(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    ((_, part, payload),) = delivered(tmp_path, {"w": weight.t()})
    assert part.spec.shape == (4, 3)
    assert payload == weight.detach().t().contiguous().numpy().tobytes()


def test_a_tensor_that_no_copy_is_made_of_arrives_whole(tmp_path: Path) -> None:
    large = torch.arange(1 << 20, dtype=torch.int32)
    ((_, _, payload),) = delivered(tmp_path, {"large": large})
    assert payload == large.numpy().tobytes()
