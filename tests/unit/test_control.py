"""A worker's line to the coordinator, whose part the test plays."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from unit.test_run_state import connected, done, progress, ready
from waiting import wait_until
from worker_birth import RUN_ID, worker_birth

from spectrain.protocol.errors import DeadlineError
from spectrain.protocol.messages import (
    Assign,
    Committed,
    Go,
    Heartbeat,
    LinkLost,
    Message,
    Progress,
    Quit,
    StageDone,
    StopBefore,
    WhoAreYou,
    WorkerConnected,
    WorkerHello,
    WorkerReady,
)
from spectrain.protocol.schedule import Work
from spectrain.protocol.sockets import Server
from spectrain.worker.control import LEASE_ENDED_STATUS, Control, peak_memory_bytes

M = TypeVar("M", bound=Message)

LONG_S = 20.0
ASSIGN = Assign(settings_json="{}", work=Work(train_batches=1, epoch_batches=1), layer_counts=(1,))
LOST = LinkLost(stage=0, incarnation=0, stream="activations", reason="gone")

ALONE = """
import sys, threading, json
from spectrain.protocol.bootstrap import WorkerBirth
from spectrain.protocol.messages import Go
from spectrain.worker.control import Control

control = Control(WorkerBirth.from_dict(json.loads(sys.stdin.readline())), "2.0")
control.handle(Go, lambda _: 1 / 0)
threading.Event().wait()
"""
"""A process whose control thread is all that can end it."""


class Coordinator:
    """What a worker talks to."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.server = Server(self.context, run_id=bytes.fromhex(RUN_ID), ipc=folder / "control")

    def hear(self, kind: type[M], identity: str = "worker/0/0") -> M:
        """Return the next message of this kind; others are passed over."""

        def heard() -> M | None:
            received = self.server.receive(LONG_S)
            assert received is not None, f"no {kind.__name__}"
            assert received.identity == identity
            return received.message if isinstance(received.message, kind) else None

        return wait_until(heard, what=kind.__name__, timeout_s=LONG_S, interval_s=0)

    def hear_all(self, count: int) -> list[type[Message]]:
        """Return the kinds of the next messages that are no heartbeats."""
        kinds: list[type[Message]] = []

        def heard() -> bool:
            received = self.server.receive(LONG_S)
            if received is not None and not isinstance(received.message, Heartbeat):
                kinds.append(type(received.message))
            return len(kinds) == count

        wait_until(heard, what=f"{count} messages", timeout_s=LONG_S, interval_s=0)
        return kinds

    def say(self, message: Message, identity: str = "worker/0/0") -> None:
        assert self.server.send(identity, message)

    def close(self) -> None:
        self.server.close()
        self.context.term()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path)
    yield coordinator
    coordinator.close()


def control_of(coordinator: Coordinator, **changes: Any) -> Control:
    return Control(worker_birth(control=coordinator.server.ipc_endpoint, **changes), "2.0")


@pytest.fixture
def control(coordinator: Coordinator) -> Iterator[Control]:
    """Return a worker's control whose hello has been heard."""
    control = control_of(coordinator)
    assert isinstance(coordinator.hear(WorkerHello), WorkerHello)
    yield control
    control.close()


def test_a_worker_introduces_itself_first(coordinator: Coordinator) -> None:
    control = control_of(coordinator, stage=3, incarnation=2)
    told = coordinator.hear(WorkerHello, "worker/3/2")
    assert (told.stage, told.incarnation, told.host, told.torch) == (3, 2, "here", "2.0")
    control.close()


def test_it_says_that_it_lives_until_there_is_something_to_report(
    coordinator: Coordinator, control: Control
) -> None:
    coordinator.hear(Heartbeat)
    seen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def report(sent: int, dropped: int) -> Progress:
        seen.put((sent, dropped))
        return progress(0)

    control.progress = report
    assert coordinator.hear(Progress) == progress(0)
    sent, dropped = seen.get(timeout=LONG_S)
    assert sent >= 2
    assert dropped == 0


def test_a_restarted_worker_reports_often_at_first(coordinator: Coordinator) -> None:
    control = control_of(coordinator, incarnation=1, heartbeat_s=50.0)
    for _ in range(3):
        coordinator.hear(Heartbeat, "worker/0/1")
    control.close()


def test_messages_arrive_in_the_order_in_which_they_were_said(
    coordinator: Coordinator, control: Control
) -> None:
    for message in (ready(0), connected(0), LOST):
        control.send(message)
    assert coordinator.hear_all(3) == [WorkerReady, WorkerConnected, LinkLost]


def test_the_end_is_told_after_a_last_report(coordinator: Coordinator, control: Control) -> None:
    control.progress = lambda *_: progress(0)
    control.send(LOST)
    control.send(done(0))
    kinds: list[type[Message]] = []
    while StageDone not in kinds:
        kinds += coordinator.hear_all(1)
    assert kinds[-2:] == [Progress, StageDone]


def test_what_is_waited_for_is_returned(coordinator: Coordinator, control: Control) -> None:
    coordinator.say(ASSIGN)
    assert control.wait_for(Assign, LONG_S, "its assignment") == ASSIGN


def test_heartbeats_and_the_unexpected_are_passed_over(
    coordinator: Coordinator, control: Control
) -> None:
    for message in (Heartbeat(), ASSIGN, Go()):
        coordinator.say(message)
    assert control.wait_for(Go, LONG_S, "the word to go") == Go()


def test_a_wait_that_is_too_long_says_what_for(control: Control) -> None:
    with pytest.raises(DeadlineError, match=r"stage 0 waited 0.01 s for the word to go from"):
        control.wait_for(Go, 0.01, "the word to go")


def test_a_handler_takes_its_kind_in_the_control_thread(
    coordinator: Coordinator, control: Control
) -> None:
    taken: queue.SimpleQueue[tuple[StopBefore, str]] = queue.SimpleQueue()
    control.handle(StopBefore, lambda m: taken.put((m, threading.current_thread().name)))
    coordinator.say(StopBefore(batch=7))
    assert taken.get(timeout=LONG_S) == (StopBefore(batch=7), "control")
    coordinator.say(Committed(update=3))
    assert control.wait_for(Committed, LONG_S, "a commit").update == 3


def test_a_coordinator_that_was_restarted_hears_all_that_matters_again(
    coordinator: Coordinator, control: Control
) -> None:
    asked = threading.Event()
    control.on_restarted_coordinator = asked.set
    for message in (ready(0), LOST, connected(0), done(0)):
        control.send(message)
    coordinator.hear(StageDone)
    coordinator.say(WhoAreYou())
    again = coordinator.hear_all(4)
    assert again == [WorkerHello, WorkerReady, WorkerConnected, StageDone]
    assert asked.wait(LONG_S)


def test_only_the_newest_of_each_kind_is_told_again(
    coordinator: Coordinator, control: Control
) -> None:
    for generation in (1, 2):
        control.send(WorkerConnected(stage=0, incarnation=0, generation=generation))
    coordinator.hear_all(2)
    coordinator.say(WhoAreYou())
    assert coordinator.hear(WorkerHello) == hello_of(control)
    assert coordinator.hear(WorkerConnected).generation == 2


def hello_of(control: Control) -> WorkerHello:
    return control._hello


def test_last_words_leave_before_the_line_is_closed(coordinator: Coordinator) -> None:
    control = control_of(coordinator)
    control.send(LOST)
    control.close()
    assert coordinator.hear(LinkLost) == LOST


def test_the_most_memory_ever_held_is_in_bytes() -> None:
    assert 10 << 20 < peak_memory_bytes() < 1 << 40


# -- the three ways in which the control thread ends its process --------------------------------


def alone(coordinator: Coordinator, **changes: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    birth = worker_birth(control=coordinator.server.ipc_endpoint, **changes)
    assert process.stdin is not None
    process.stdin.write(json.dumps(birth.to_dict()) + "\n")
    process.stdin.flush()
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=LONG_S)
    return process.returncode, err


def test_a_worker_that_is_told_to_quit_ends_well(coordinator: Coordinator) -> None:
    process = alone(coordinator)
    coordinator.hear(WorkerHello)
    coordinator.say(Quit())
    assert end_of(process) == (0, "")


def test_a_worker_that_hears_nothing_for_its_lease_ends(coordinator: Coordinator) -> None:
    code, err = end_of(alone(coordinator, lease_s=0.3))
    assert (code, err) == (
        LEASE_ENDED_STATUS, "no word from the coordinator for 0.3 s: ending\n"
    )  # fmt: skip


def test_any_word_renews_the_lease(coordinator: Coordinator) -> None:
    process = alone(coordinator, lease_s=5.0)
    coordinator.hear(WorkerHello)
    for _ in range(20):
        coordinator.hear(Heartbeat)
        coordinator.say(Heartbeat())
    assert process.poll() is None
    coordinator.say(Quit())
    assert end_of(process)[0] == 0


def test_a_fault_in_the_control_thread_ends_the_worker_with_its_traceback(
    coordinator: Coordinator,
) -> None:
    process = alone(coordinator)
    coordinator.hear(WorkerHello)
    coordinator.say(Go())
    code, err = end_of(process)
    assert code == 1
    assert "ZeroDivisionError" in err
