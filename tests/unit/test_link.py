from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from links import BACKENDS_ON_CPU, CPU, in_background, link_pair
from waiting import wait_until

from spectrain.protocol.errors import DeadlineError, LinkError, SettingsError
from spectrain.worker.gloo_wire import GlooWire, _listener
from spectrain.worker.link import LINK_VARIABLE, RECEIVER, SENDER, Link, default_backend, open_link
from spectrain.worker.nccl_wire import NcclWire
from spectrain.worker.rendezvous import Met

TENSORS = [
    torch.randn(1000, 300),
    torch.tensor([True, False, True]),
    torch.empty(0, 5),
    torch.arange(7),
    torch.randn(4).bfloat16(),
    torch.randn(3, dtype=torch.complex128),
    torch.tensor(2.5),
]


def no_exchange(own: bytes) -> bytes:
    raise LinkError("nobody is there")


@pytest.fixture(params=BACKENDS_ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_tensors_of_every_kind_arrive_unchanged(backend: str) -> None:
    with link_pair(backend) as (sender, receiver):
        room = [torch.empty_like(tensor) for tensor in TENSORS]
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(sender.send, TENSORS, what="F0", timeout_s=10)
            receiver.receive(room, what="F0", timeout_s=10)
            sent.result(10)
        assert all(map(torch.equal, room, TENSORS))


def test_transfers_arrive_in_the_order_of_sending(backend: str) -> None:
    with link_pair(backend) as (sender, receiver), ThreadPoolExecutor() as pool:

        def send_all() -> None:
            for number in range(50):
                sender.send([torch.full((number + 1,), number)], what="x", timeout_s=10)

        sent = pool.submit(send_all)
        for number in range(50):
            room = torch.empty(number + 1, dtype=torch.int64)
            receiver.receive([room], what="x", timeout_s=10)
            assert room.unique().tolist() == [number]
        sent.result(10)


def test_a_leaf_that_needs_a_gradient_can_be_sent_and_filled(backend: str) -> None:
    with link_pair(backend) as (sender, receiver), ThreadPoolExecutor() as pool:
        room = torch.zeros(2, requires_grad=True)
        sent = pool.submit(
            sender.send, [torch.ones(2, requires_grad=True)], what="F0", timeout_s=10
        )
        receiver.receive([room], what="F0", timeout_s=10)
        sent.result(10)
        assert room.tolist() == [1, 1]


def test_nothing_is_carried_for_tensors_without_elements(backend: str) -> None:
    with link_pair(backend) as (sender, receiver):
        sender.send([torch.empty(0)], what="F0", timeout_s=0.1)  # nobody receives
        receiver.receive([torch.empty(0, 3)], what="F0", timeout_s=0.1)


def test_a_silent_peer_is_a_passed_deadline_and_named(backend: str) -> None:
    text = r"could not get F7 from stage 0 within 0\.1 s"
    with link_pair(backend) as (_, receiver), pytest.raises(DeadlineError, match=text):
        receiver.receive([torch.empty(1)], what="F7", timeout_s=0.1)


@pytest.mark.parametrize("backend", ["gloo", "strict"])  # a socket takes what it has room for
def test_a_send_waits_for_its_receive(backend: str) -> None:
    text = r"could not send F7 to stage 1 within 0\.1 s"
    with link_pair(backend) as (sender, _), pytest.raises(DeadlineError, match=text):
        sender.send([torch.empty(1)], what="F7", timeout_s=0.1)


@pytest.mark.parametrize("end", [SENDER, RECEIVER])
def test_abort_frees_the_waiter_with_a_link_error(backend: str, end: int) -> None:
    with link_pair(backend) as ends:
        faults: list[LinkError] = []
        waiting = ends[end].send if end == SENDER else ends[end].receive

        def wait() -> None:
            try:
                while True:  # a wire may take something before it waits
                    waiting([torch.empty(1 << 20)], what="F7", timeout_s=100)
            except LinkError as fault:
                faults.append(fault)

        with in_background(wait):
            # An abort that comes before the wait must hold, too; one of them comes after it.
            wait_until(lambda: ends[end].abort() or faults, what="the waiter to be free")
        assert "F7" in str(faults[0])


def test_gloo_tells_of_a_peer_that_is_gone_at_once() -> None:
    with link_pair("gloo") as (sender, receiver):
        sender.close()
        with pytest.raises(LinkError, match="could not get F7 from stage 0"):
            receiver.receive([torch.empty(1)], what="F7", timeout_s=100)


def test_strict_waits_for_a_peer_that_is_gone() -> None:
    with link_pair("strict") as (sender, receiver):
        sender.close()
        with pytest.raises(DeadlineError):
            receiver.receive([torch.empty(1)], what="F7", timeout_s=0.2)


def test_strict_waits_for_a_receiver_that_is_gone() -> None:
    with link_pair("strict") as (sender, receiver):
        receiver.close()
        with pytest.raises(DeadlineError):
            sender.send([torch.empty(1 << 22)], what="F7", timeout_s=0.2)


def test_strict_waits_for_a_receiver_that_dies_half_way() -> None:
    with link_pair("strict") as (sender, receiver), ThreadPoolExecutor() as pool:
        sent = pool.submit(sender.send, [torch.empty(1 << 24)], what="F7", timeout_s=1)
        receiver.receive([torch.empty(1)], what="F7", timeout_s=10)  # the first of many bytes
        receiver.close()
        with pytest.raises(DeadlineError):
            sent.result(10)


def test_a_closed_gloo_link_says_so() -> None:
    with link_pair("gloo") as (sender, receiver):
        sender.close()
        receiver.close()
        with pytest.raises(LinkError, match="the link is closed"):
            sender.send([torch.empty(1)], what="F7", timeout_s=1)
        with pytest.raises(LinkError, match="the link is closed"):
            receiver.receive([torch.empty(1)], what="F7", timeout_s=1)


def test_a_build_that_is_abandoned_raises_what_the_exchange_raised(backend: str) -> None:
    with pytest.raises(LinkError, match="nobody is there"):
        open_link(
            backend,
            SENDER,
            peer="stage 1",
            address="127.0.0.1",
            device=CPU,
            exchange=no_exchange,
            timeout_s=5,
        )


def test_a_peer_that_never_connects_is_a_link_error_in_time() -> None:
    with pytest.raises(LinkError, match=r"no strict link with stage 1: timed out"):
        open_link(
            "strict",
            SENDER,
            peer="stage 1",
            address="127.0.0.1",
            device=CPU,
            exchange=lambda _: b"",
            timeout_s=0.2,
        )


def test_a_gloo_peer_that_died_after_giving_its_address_is_a_link_error() -> None:
    with link_pair("gloo") as (sender, _):
        address_of_the_dead = sender._wire._met.peer
    with pytest.raises(LinkError, match=r"no gloo link with stage 1"):
        open_link(
            "gloo",
            SENDER,
            peer="stage 1",
            address="127.0.0.1",
            device=CPU,
            exchange=lambda _: address_of_the_dead,
            timeout_s=10,
        )


def test_an_address_that_is_not_ours_is_a_link_error(backend: str) -> None:
    with pytest.raises(LinkError, match=r"no .* link with stage 1"):
        open_link(
            backend,
            SENDER,
            peer="stage 1",
            address="192.0.2.1",
            device=CPU,
            exchange=no_exchange,
            timeout_s=1,
        )


# -- which backend ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "device", "backend"),
    [
        ("", "cpu", "direct"),
        ("socket", "cpu", "socket"),
        ("gloo", "cpu", "gloo"),
        ("", "cuda", "nccl"),
        ("gloo", "cuda", "gloo"),
        ("strict", "cpu", "strict"),
    ],
)
def test_the_device_chooses_the_backend_unless_the_environment_does(
    monkeypatch: pytest.MonkeyPatch, variable: str, device: str, backend: str
) -> None:
    monkeypatch.setenv(LINK_VARIABLE, variable)
    assert default_backend(torch.device(device)) == backend


@pytest.mark.parametrize(
    ("variable", "text"),
    [("mpi", "must be one of direct, socket, gloo, nccl, strict"), ("nccl", "GPUs only")],
)
def test_an_impossible_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(LINK_VARIABLE, variable)
    with pytest.raises(SettingsError, match=text):
        default_backend(CPU)


# -- parts that need no second end --------------------------------------------------------------


class RecordingWire:
    """Remembers what was sent and receives ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.parts: list[torch.Tensor] = []

    def send(self, parts: Sequence[torch.Tensor], timeout_s: float) -> None:
        assert timeout_s == 1
        self.parts = list(parts)

    def receive(self, parts: Sequence[torch.Tensor], timeout_s: float) -> None:
        assert timeout_s == 1
        self.parts = list(parts)
        for part in parts:
            part.fill_(1)

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


def test_a_wire_that_knows_no_gpu_lands_in_host_memory_and_is_copied_on() -> None:
    wire = RecordingWire()
    room = torch.zeros(3, dtype=torch.uint8)
    Link(wire, "stage 0", is_staged=True).receive([room], what="F0", timeout_s=1)
    assert room.tolist() == [1, 1, 1]
    assert wire.parts[0].data_ptr() != room.data_ptr()


def test_other_tensors_are_filled_where_they_are() -> None:
    wire = RecordingWire()
    room = torch.zeros(3, dtype=torch.uint8)
    Link(wire, "stage 0").receive([room], what="F0", timeout_s=1)
    assert wire.parts[0].data_ptr() == room.data_ptr()


def test_a_staged_send_hands_over_bytes_in_host_memory() -> None:
    wire = RecordingWire()
    Link(wire, "stage 1", is_staged=True).send([torch.ones(2)], what="F0", timeout_s=1)
    assert (wire.parts[0].dtype, wire.parts[0].numel()) == (torch.uint8, 8)
    assert not wire.parts[0].is_cuda


def test_abort_and_close_reach_the_wire() -> None:
    wire = RecordingWire()
    link = Link(wire, "stage 0")
    link.abort()
    link.close()
    assert wire.calls == ["abort", "close"]


@pytest.mark.parametrize(
    ("sockaddr", "address"),
    [
        (bytes.fromhex("0200 1f90 7f000001"), ("127.0.0.1", 8080)),
        (bytes.fromhex("0a00 1f90 00000000") + bytes(15) + b"\x01", ("::1", 8080)),
        (bytes(28), None),
    ],
    ids=["IPv4", "IPv6", "unknown"],
)
def test_the_listening_address_is_read_from_a_gloo_rendezvous_value(
    sockaddr: bytes, address: tuple[str, int] | None
) -> None:
    value = bytes(8) + b"host" + (136).to_bytes(8, "little") + sockaddr.ljust(136, b"\0")
    assert _listener(value) == address


def test_a_gloo_link_that_cannot_be_aborted_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with link_pair("gloo") as (sender, _):
        sender._wire._met = sender._wire._met._replace(peer=bytes(170))
        sender.abort()
    assert "cannot abort a gloo link" in caplog.text


class DeafGroup:
    """Stands for a gloo group that has got a part of a message and will not hear of its end."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.end = threading.Event()

    def recv(self, *_: object) -> DeafGroup:
        return self

    def wait(self, timeout: timedelta) -> None:
        self.waiting.set()
        assert self.end.wait(timeout.total_seconds())


def test_an_abort_that_gloo_does_not_notice_frees_the_waiter_all_the_same() -> None:
    group = DeafGroup()
    link = Link(GlooWire(group, 0, Met(b"", b"")), "stage 0")

    def wait() -> None:
        for _ in range(2):  # it holds for those who come later, too
            with pytest.raises(LinkError, match=r"could not get F7 from stage 0: .* was aborted"):
                link.receive([torch.empty(1)], what="F7", timeout_s=100)

    with in_background(wait):
        assert group.waiting.wait(10)
        link.abort()
    assert not group.end.is_set()
    group.end.set()  # so ends the thread that was left behind
    link.close()


class RecordingGroup:
    """Stands for NCCL's process group."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> RecordingGroup:
        self.calls.append(("send", len(tensors), rank, tag))
        return self

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> RecordingGroup:
        self.calls.append(("recv", len(tensors), rank, tag))
        return self

    def wait(self, timeout: timedelta) -> None:
        self.calls.append(("wait", timeout.total_seconds() > 0))

    def abort(self) -> None:
        self.calls.append(("abort",))


def test_nccl_finishes_one_transfer_before_the_next_and_in_order() -> None:
    group = RecordingGroup()
    wire = NcclWire(group, peer=1)
    parts = [torch.zeros(1, dtype=torch.uint8)] * 2
    wire.send(parts, 1)
    wire.receive(parts, 1)
    assert group.calls == [
        *(("send", 1, 1, 0), ("wait", True)) * 2,
        *(("recv", 1, 1, 0), ("wait", True)) * 2,
    ]


def test_a_closed_nccl_wire_has_aborted_its_communicator_once() -> None:
    group = RecordingGroup()
    wire = NcclWire(group, peer=1)
    wire.close()
    wire.abort()
    assert group.calls == [("abort",)]
    with pytest.raises(RuntimeError, match="closed"):
        wire.send([], 1)
