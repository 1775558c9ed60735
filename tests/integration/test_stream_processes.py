from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stream_neighbour
import torch
import zmq
from links import (
    BACKENDS_ON_CPU,
    receiving_peer,
    receiving_stream,
    sending_peer,
    sending_stream,
)
from stream_neighbour import neighbours_parcel
from waiting import wait_until

from spectrain.protocol.errors import DeadlineError, LinkError
from spectrain.protocol.schedule import Op
from spectrain.worker.boundary import tensors_of
from spectrain.worker.memory_stream import memory_pair
from spectrain.worker.stream import ReceivingStream, SendingStream

START_TIMEOUT_S = 60


@pytest.fixture(params=BACKENDS_ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def neighbour(role: str, ipc_dir: Path, backend: str) -> Iterator[subprocess.Popen[str]]:
    """Start a neighbour that is dead when the block ends."""
    process = subprocess.Popen(
        [sys.executable, stream_neighbour.__file__, role, str(ipc_dir), backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str], *lines: str) -> None:
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()


@contextmanager
def stream_from_neighbour(
    ipc_dir: Path, backend: str, wait_timeout_s: float = 30
) -> Iterator[tuple[ReceivingStream, subprocess.Popen[str]]]:
    """Yield a receiving end here and the process of its sender, connected."""
    with zmq.Context() as context, neighbour("sender", ipc_dir, backend) as process:
        receiver = receiving_stream(
            context, ipc_dir, backend=backend, wait_timeout_s=wait_timeout_s
        )
        receiver.expect(1, sending_peer())
        say(process, receiver.endpoint)
        try:
            receiver.wait_connected(START_TIMEOUT_S)
            yield receiver, process
        finally:
            receiver.close()


@contextmanager
def stream_to_neighbour(
    ipc_dir: Path, backend: str
) -> Iterator[tuple[SendingStream, subprocess.Popen[str]]]:
    """Yield a sending end here and the process of its receiver, connected."""
    with zmq.Context() as context, neighbour("receiver", ipc_dir, backend) as process:
        sender = sending_stream(context, backend=backend, window=2)
        sender.connect(1, receiving_peer(process.stdout.readline().strip()))
        try:
            sender.wait_connected(START_TIMEOUT_S)
            yield sender, process
        finally:
            sender.close()


def test_parcels_from_another_process_are_those_of_a_stream_in_memory(
    tmp_path: Path, backend: str
) -> None:
    numbers = range(100)
    outbox, inbox = memory_pair()
    with stream_from_neighbour(tmp_path, backend) as (receiver, process):
        say(process, *["put"] * len(numbers))
        for number in numbers:
            expected = neighbours_parcel(number)
            outbox.put(expected)
            ours, theirs = inbox.take(expected.op), receiver.take(expected.op)
            assert (ours.samples, ours.value[1]) == (theirs.samples, theirs.value[1])
            assert all(map(torch.equal, tensors_of(ours.value), tensors_of(theirs.value)))


def test_a_neighbour_that_is_killed_while_it_owes_nothing_is_noticed(
    tmp_path: Path, backend: str
) -> None:
    with stream_from_neighbour(tmp_path, backend) as (receiver, process):
        say(process, "put")
        receiver.take(Op.parse("F0"))
        process.kill()
        with pytest.raises(LinkError, match="stage 0 is gone"):
            receiver.take(Op.parse("F1"))


def test_a_neighbour_that_is_stopped_is_a_deadline_and_a_killed_one_then_a_fault(
    tmp_path: Path, backend: str
) -> None:
    with stream_from_neighbour(tmp_path, backend, wait_timeout_s=1) as (receiver, process):
        say(process, "put")
        receiver.take(Op.parse("F0"))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            DeadlineError,
            match=r"stage 1 waited 1 s for F1 from stage 0 \(the newest from there is F0\)",
        ):
            receiver.take(Op.parse("F1"))
        process.kill()
        wait_until(lambda: receiver._gate.has_failed, what="the fault")
        with pytest.raises(LinkError, match="stage 0 is gone"):
            receiver.take(Op.parse("F1"))


def test_gloo_frees_a_sender_whose_receiver_is_killed(tmp_path: Path) -> None:
    with stream_to_neighbour(tmp_path, "gloo") as (sender, process):
        for number in range(3):  # one is held there, the others wait in the link and behind it
            sender.put(neighbours_parcel(number))
        process.kill()
        with pytest.raises(LinkError, match="could not send F1 to stage 1"):
            sender.flush(timeout_s=60)


def test_strict_tells_nothing_of_a_killed_receiver_until_it_is_aborted(tmp_path: Path) -> None:
    with stream_to_neighbour(tmp_path, "strict") as (sender, process):
        for number in range(3):
            sender.put(neighbours_parcel(number))
        process.kill()
        process.wait()
        with pytest.raises(DeadlineError, match="for stage 1 to take F1"):
            sender.flush(timeout_s=2)
        sender.close()  # aborts the link
        assert not sender._thread.is_alive()


def test_a_sender_whose_receiver_is_stopped_can_be_closed(tmp_path: Path, backend: str) -> None:
    with stream_to_neighbour(tmp_path, backend) as (sender, process):
        for number in range(3):
            sender.put(neighbours_parcel(number))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            sender.flush(timeout_s=0.3)
        sender.close()
        assert not sender._thread.is_alive()
