from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from links import exchanges, in_background, over_network
from torch import Tensor
from waiting import wait_until

from spectrain.worker import direct_wire
from spectrain.worker.direct_wire import DirectWire, open_direct_wire
from spectrain.worker.rendezvous import Exchange
from spectrain.worker.socket_wire import SocketWire

LARGE_BYTES = 1 << 20
GONE = r"Broken pipe|Connection reset|closed the connection"


@contextmanager
def wire_pair(
    exchange: tuple[Exchange, Exchange] | None = None, address: str = "127.0.0.1"
) -> Iterator[tuple[DirectWire | SocketWire, DirectWire | SocketWire]]:
    """Open both ends of a wire; the first sends to the second."""
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(open_direct_wire, rank, address=address, exchange=each, timeout_s=10)
            for rank, each in enumerate(exchange or exchanges())
        ]
        sender, receiver = (end.result() for end in ends)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def payload(size_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size_bytes,), generator=generator, dtype=torch.uint8)


def received(wire: DirectWire | SocketWire, size_bytes: int = LARGE_BYTES) -> Tensor:
    room = torch.zeros(size_bytes, dtype=torch.uint8)
    wire.receive([room], 10)
    return room


# -- what it carries ----------------------------------------------------------------------------


def test_small_and_large_payloads_arrive_unchanged_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct_wire, "_READ_BYTES", LARGE_BYTES)
    payloads = [
        [payload(1)],
        [payload(3 * LARGE_BYTES + 5, 1), payload(7, 2)],
        [payload(100, 3), payload(LARGE_BYTES, 4), payload(100, 5)],
        [payload(direct_wire._SMALL_BYTES, 6)],
        [payload(direct_wire._SMALL_BYTES + 1, 7)],
    ] * 2
    with wire_pair() as (sender, receiver), ThreadPoolExecutor() as pool:
        assert isinstance(sender, DirectWire)
        sent = pool.submit(lambda: [sender.send(parts, 10) for parts in payloads])
        for parts in payloads:
            room = [torch.zeros_like(part) for part in parts]
            receiver.receive(room, 10)
            assert all(map(torch.equal, room, parts))
        sent.result(10)


def test_a_payload_stays_until_it_is_read() -> None:
    with wire_pair() as (sender, receiver):
        sender.send([payload(LARGE_BYTES)], 10)  # nobody else has it any more
        junk = [torch.ones(LARGE_BYTES, dtype=torch.uint8) for _ in range(4)]  # in its place?
        assert torch.equal(received(receiver), payload(LARGE_BYTES))
        del junk


def test_a_send_waits_while_two_payloads_are_unread() -> None:
    with wire_pair() as (sender, receiver):
        for seed in range(2):
            sender.send([payload(LARGE_BYTES, seed)], 10)
        with pytest.raises(TimeoutError):
            sender.send([payload(LARGE_BYTES, 2)], 0.05)
        assert torch.equal(received(receiver), payload(LARGE_BYTES, 0))
        sender.send([payload(LARGE_BYTES, 2)], 10)
        assert torch.equal(received(receiver), payload(LARGE_BYTES, 1))
        assert torch.equal(received(receiver), payload(LARGE_BYTES, 2))


# -- ends that are gone -------------------------------------------------------------------------


def test_what_a_sender_offered_before_its_end_does_not_arrive() -> None:
    with wire_pair() as (sender, receiver):
        sender.send([payload(LARGE_BYTES)], 10)
        sender.close()
        with pytest.raises(ConnectionError, match="the peer closed the connection"):
            received(receiver)


def test_what_is_read_of_a_sender_that_ends_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = direct_wire._read
    with wire_pair() as (sender, receiver):
        for seed in range(2):  # the second is still on its way when the end comes
            sender.send([payload(LARGE_BYTES, seed)], 10)

        def read_and_lose_the_sender(pid: int, address: int, room: Tensor) -> None:
            read(pid, address, room)
            sender.close()

        monkeypatch.setattr(direct_wire, "_read", read_and_lose_the_sender)
        with pytest.raises(ConnectionError, match="the peer closed the connection"):
            received(receiver)


def test_memory_that_is_not_there_is_an_error() -> None:
    with wire_pair() as (sender, receiver):
        sender._connection.sendall(direct_wire._ADDRESS.pack(8))
        with pytest.raises(OSError, match="cannot read the memory of process") as caught:
            received(receiver)
        assert caught.value.errno == errno.EFAULT


def test_a_sender_that_waits_to_be_read_is_told_of_its_peers_end() -> None:
    with wire_pair() as (sender, receiver), ThreadPoolExecutor() as pool:
        sent = pool.submit(lambda: [sender.send([payload(LARGE_BYTES)], 100) for _ in range(4)])
        received(receiver)  # it is under way
        receiver.close()
        with pytest.raises(ConnectionError):
            sent.result(10)


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_at_either_end_frees_both(rank: int) -> None:
    with wire_pair() as ends:
        freed: list[Exception] = []

        def wait() -> None:
            with pytest.raises(ConnectionError, match=GONE) as caught:
                received(ends[1])
            freed.append(caught.value)

        with in_background(wait):
            wait_until(lambda: ends[rank].abort() or freed, what="the receiver to be free")
        with pytest.raises(ConnectionError, match=GONE):
            ends[0].send([payload(LARGE_BYTES)], 100)


# -- where memory cannot be read ----------------------------------------------------------------


def assert_a_plain_socket(
    sender: DirectWire | SocketWire, receiver: DirectWire | SocketWire
) -> None:
    assert isinstance(sender, SocketWire)
    assert isinstance(receiver, SocketWire)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(sender.send, [payload(LARGE_BYTES)], 10)
        assert torch.equal(received(receiver), payload(LARGE_BYTES))
        sent.result(10)


def test_where_the_system_forbids_it_the_wire_is_a_plain_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(pid: int, address: int, room: Tensor) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(direct_wire, "_read", forbid)
    with wire_pair() as ends:
        assert_a_plain_socket(*ends)


def test_a_process_without_a_name_here_has_a_plain_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_wire, "_pid_of_peer", lambda _: 0)  # of another container
    with wire_pair() as ends:
        assert_a_plain_socket(*ends)


def test_memory_of_another_process_by_the_same_name_is_not_taken_for_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct_wire, "_read", lambda _, __, room: room.fill_(1))
    with wire_pair() as ends:
        assert_a_plain_socket(*ends)


def test_between_hosts_the_wire_is_a_plain_socket() -> None:
    with wire_pair(over_network(), address="0.0.0.0") as ends:
        assert_a_plain_socket(*ends)


def test_ranks_on_one_host_read_each_other_whatever_their_address() -> None:
    with wire_pair(address="0.0.0.0") as ends:
        assert all(isinstance(end, DirectWire) for end in ends)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_that_dies_before_memory_was_read_is_no_wire(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def die(*_: object) -> bool:
        raise RuntimeError("dead")

    monkeypatch.setattr(direct_wire, ("_show", "_look")[rank], die)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(open_direct_wire, each, address="127.0.0.1", exchange=swap, timeout_s=10)
            for each, swap in enumerate(exchanges())
        ]
        with pytest.raises(ConnectionError, match=GONE):
            ends[1 - rank].result()
        with pytest.raises(RuntimeError, match="dead"):
            ends[rank].result()
