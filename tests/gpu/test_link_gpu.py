"""Links and streams of tensors on GPUs; both ends live in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq
from links import (
    exchanges,
    in_background,
    link_pair,
    receiving_peer,
    receiving_stream,
    sending_peer,
    sending_stream,
)

from spectrain.protocol.errors import LinkError
from spectrain.protocol.schedule import Op
from spectrain.worker.boundary import Parcel
from spectrain.worker.link import RECEIVER, SENDER, Link, open_link

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
KINDS = [
    lambda device: torch.randn(1000, 300, device=device),
    lambda device: torch.tensor([True, False], device=device),
    lambda device: torch.randn(5, device=device).bfloat16(),
    lambda device: torch.randn(3, dtype=torch.complex64, device=device),
    lambda device: torch.empty(0, device=device),
]


def carry(
    sender: Link, receiver: Link, tensors: Sequence[torch.Tensor], device: str
) -> list[torch.Tensor]:
    room = [torch.empty_like(tensor, device=device) for tensor in tensors]
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(sender.send, tensors, what="F0", timeout_s=60)
        receiver.receive(room, what="F0", timeout_s=60)
        sent.result(60)
    return room


def test_stages_on_one_gpu_exchange_tensors_through_host_memory() -> None:
    device = torch.device("cuda", 0)
    with link_pair("gloo", device) as (sender, receiver):
        tensors = [kind(device) for kind in KINDS]
        torch.cuda.synchronize(device)
        room = carry(sender, receiver, tensors, device)
        assert all(map(torch.equal, room, tensors))


def test_a_stream_waits_for_the_gpu_to_finish_what_it_sends(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    with zmq.Context() as context:
        sender = sending_stream(context, device=device)
        receiver = receiving_stream(context, tmp_path, device=device)
        receiver.expect(1, sending_peer())
        sender.connect(1, receiving_peer(receiver.endpoint))
        try:
            for batch in range(20):
                value = torch.full((2000, 2000), 1.0, device=device)
                for _ in range(10):  # work that is still queued when the parcel is put
                    value = value @ torch.eye(2000, device=device) + batch
                sender.put(Parcel(Op.parse(f"F{batch}"), value, 1, 1))
                received = receiver.take(Op.parse(f"F{batch}")).value
                assert received.device == device
                assert torch.equal(received, value)
        finally:
            sender.close()
            receiver.close()


@pytest.fixture
def nccl_pair() -> Iterator[tuple[Link, Link]]:
    """Yield both ends of an NCCL link from GPU 0 to GPU 1."""
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(
                open_link,
                "nccl",
                rank,
                peer=f"stage {1 - rank}",
                address="127.0.0.1",
                device=torch.device("cuda", rank),
                exchange=exchange,
                timeout_s=60,
            )
            for rank, exchange in zip((SENDER, RECEIVER), exchanges(), strict=True)
        ]
        sender, receiver = (end.result(120) for end in ends)
    yield sender, receiver
    with ThreadPoolExecutor(2) as pool:  # an abort may wait for the other communicator's
        list(pool.map(lambda end: end.close(), (sender, receiver)))


@needs_two
def test_nccl_carries_tensors_of_every_kind(nccl_pair: tuple[Link, Link]) -> None:
    sender, receiver = nccl_pair
    tensors = [kind(torch.device("cuda", 0)) for kind in KINDS]
    torch.cuda.synchronize(0)
    room = carry(sender, receiver, tensors, torch.device("cuda", 1))
    assert all(
        torch.equal(one.cpu(), other.cpu()) for one, other in zip(room, tensors, strict=True)
    )


@needs_two
def test_abort_frees_a_receiver_that_nccl_would_let_wait_for_ever(
    nccl_pair: tuple[Link, Link],
) -> None:
    _, receiver = nccl_pair
    with torch.cuda.device(1):
        room = torch.empty(1 << 20, device="cuda")

        def wait() -> None:
            with pytest.raises(LinkError):
                receiver.receive([room], what="F7", timeout_s=600)

        with in_background(wait) as waiter:
            waiter.join(1)  # it is inside by then, and must still be
            assert waiter.is_alive()
            receiver.abort()
