"""Brings one run up, stands by while it goes on, and sees every process of it to its end.

It starts the coordinator and one agent per host, passes on what the user wants (signals) and what
the run says (the console), and decides nothing about training.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import zmq

from ..protocol.bootstrap import AgentBirth, CoordinatorBirth
from ..protocol.errors import DeadlineError, ExitCode, HostError
from ..protocol.keys import KeyPair
from ..protocol.messages import (
    AgentLost,
    Cause,
    LauncherHello,
    Note,
    RunEnded,
    StartAgent,
    StopRequested,
    View,
)
from ..protocol.settings import Settings
from ..protocol.sockets import Client, Waker
from .address import address_towards, bracketed, is_loopback_address
from .console import Console
from .hosts import Host
from .remote import RemoteProcess, SshOptions, start_process
from .snapshot_store import remove_run

__all__ = ["Place", "Supervisor", "listen_address"]

_BIRTH_TIMEOUT_S = 30.0
_POLL_S = 0.2
_LARGEST_PORT = 65534  # the next one is for data


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One host of the run.

    Attributes:
        host: as the user named it.
        devices: of its slots, in order.
        is_here: whether it is this machine, which needs no ssh.
    """

    host: Host
    devices: tuple[str, ...]
    is_here: bool


def listen_address(places: Sequence[Place]) -> str | None:
    """Return the address to listen on for agents of other hosts; None if there are none.

    Raises:
        HostError: other hosts would have to come in by a loopback address.
    """
    elsewhere = [place.host.name for place in places if not place.is_here]
    if not elsewhere:
        return None
    towards = {name: address_towards(name) for name in elsewhere}
    for name, address in towards.items():
        if is_loopback_address(address):
            raise HostError(
                f"{name} resolves to this machine's loopback ({address}), which no other host can "
                "reach. Name it by an address of its own, or give --bind ADDRESS"
            )
    addresses = set(towards.values())
    if len(addresses) > 1:
        raise HostError(
            "the hosts reach this machine by different addresses: "
            + ", ".join(f"{name} by {address}" for name, address in towards.items())
            + ". --bind ADDRESS names one that all of them can reach"
        )
    return bracketed(addresses.pop())


def split_ports(bind: str | None) -> tuple[str | None, tuple[int, int]]:
    """Return the address of ``--bind`` and its ports for control and data; 0: any."""
    if bind is None or bind.endswith("]") or ":" not in bind:
        return bind, (0, 0)
    address, _, port = bind.rpartition(":")
    is_bare_ipv6 = ":" in address and not address.endswith("]")
    if not address or is_bare_ipv6 or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise HostError(f"--bind {bind!r}: expected ADDRESS or ADDRESS:PORT, IPv6 in brackets")
    return address, (int(port), int(port) + 1) if int(port) else (0, 0)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


class Supervisor:
    """One run, seen from the command line.

    Args:
        settings: what to do.
        places: where, in the order of the stages.
        bind: address to listen on for other hosts, with or without a port for control, of which
            the next one is for data; None: all of the run is here.
        ssh: how to reach hosts.
        python: interpreter on the hosts.
        environment: what agents and workers get on top of their own.
        console: what the user sees.
        resumes: id of the earlier run that this one continues; None begins a new one.
    """

    def __init__(
        self,
        settings: Settings,
        places: Sequence[Place],
        *,
        bind: str | None,
        ssh: SshOptions,
        python: str,
        environment: Mapping[str, str],
        console: Console,
        resumes: str | None = None,
    ) -> None:
        self._settings = settings
        self._places = places
        self._address, self._ports = split_ports(bind)
        self._coordinators = 0
        self._ssh = ssh
        self._python = python
        self._environment = environment
        self._console = console
        self._resumes = resumes is not None
        self._run_id = resumes or secrets.token_hex(16)
        self._coordinator_keys = KeyPair.new()
        self._agent_keys = [KeyPair.new() for _ in places]
        self._slot_keys = [[KeyPair.new() for _ in place.devices] for place in places]
        self._waker = Waker()
        self._signals: list[signal.Signals] = []
        self._agents: dict[int, RemoteProcess] = {}
        self._endpoints: dict[str, str] = {}

    def run(self) -> int:
        """Run to the end; return the exit code. No process of the run is left behind."""
        logs = Path(self._settings.run_dir, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="spectrain-") as ipc_dir,
            (logs / "coordinator.log").open("w", encoding="utf-8") as log,
            self._listening_to_signals(),
        ):
            self._ipc_dir, self._log = ipc_dir, log
            self._coordinator = self._start_coordinator()
            try:
                for index in range(len(self._places)):
                    self._start_agent(index)
                client = Client(
                    zmq.Context.instance(),
                    run_id=bytes.fromhex(self._run_id),
                    identity="launcher",
                    endpoint=self._endpoints["control_ipc"],
                )
                ended = self._stand_by(client)
                client.close()
            finally:
                self._end_processes()
        self._console.show(ended)
        return ended.exit_code

    # -- the way up -----------------------------------------------------------------------------

    def _start_coordinator(self) -> RemoteProcess:
        birth = CoordinatorBirth(
            run_id=self._run_id,
            settings=self._settings,
            hosts=tuple(place.host.name for place in self._places),
            ipc_dir=self._ipc_dir,
            tcp_address=self._address,
            ports=self._ports,
            is_restarted=self._coordinators > 0,
            resumes=self._resumes,
            keys=self._coordinator_keys,
            allowed=self._allowed(),
        )
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def write_log(line: str) -> None:
            self._log.write(line.partition(": ")[2] + "\n")
            self._log.flush()

        process = start_process(
            None,
            ["-m", "spectrain.coordinator"],
            environment=self._environment,
            cwd=str(Path.cwd()),
            first_line=birth.to_json().encode(),
            python=self._python,
            ssh=self._ssh,
            on_stdout=answers.put,
            on_stderr=write_log,
            dies_with_us=False,
        )
        answer = self._birth_answer(process, answers)
        if answer is None:
            self._coordinators += 1
            return process  # it died at once: whoever stands by sees it, and tries again
        if "refused" in answer:
            process.wait(_BIRTH_TIMEOUT_S)
            raise HostError(answer["refused"])
        self._coordinators += 1
        self._endpoints = answer
        if self._address is not None:
            # A coordinator that has to be started again must be found where the first was.
            self._ports = (_port(answer["control_tcp"]), _port(answer["data_tcp"]))
        return process

    def _birth_answer(
        self, process: RemoteProcess, answers: queue.SimpleQueue[str]
    ) -> dict[str, str] | None:
        """Return what a coordinator says first; None for a restarted one that died before it.

        Raises:
            DeadlineError: it did not start at all.
        """
        deadline = time.monotonic() + _BIRTH_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(queue.Empty):
                return json.loads(answers.get(timeout=_POLL_S))
        with suppress(queue.Empty):  # it may have spoken just before it died
            return json.loads(answers.get_nowait())
        died = process.poll() is not None
        process.kill()
        status = process.wait(_BIRTH_TIMEOUT_S)
        if died and self._coordinators > 0:
            return None
        raise DeadlineError(
            f"the coordinator did not start within {_BIRTH_TIMEOUT_S:g} s (status {status}); "
            f"its log: {self._log.name}"
        )

    def _allowed(self) -> dict[str, str]:
        """Return which identity each key stands for; any slot may run any stage."""
        allowed = {keys.public: f"agent/{index}" for index, keys in enumerate(self._agent_keys)}
        allowed.update(dict.fromkeys(self._peer_keys(), "worker/"))
        return allowed

    def _peer_keys(self) -> tuple[str, ...]:
        return tuple(keys.public for slots in self._slot_keys for keys in slots)

    def _start_agent(self, index: int) -> None:
        place = self._places[index]
        same_host = self._address is None
        transport = "ipc" if same_host else "tcp"
        birth = AgentBirth(
            run_id=self._run_id,
            host_index=index,
            host=place.host.name,
            stages=self._settings.stages,
            devices=place.devices,
            job=self._settings.job,
            run_dir=self._settings.run_dir,
            control=self._endpoints[f"control_{transport}"],
            data=self._endpoints[f"data_{transport}"],
            server_key="" if same_host else self._coordinator_keys.public,
            keys=self._agent_keys[index],
            slot_keys=tuple(self._slot_keys[index]),
            peer_keys=self._peer_keys(),
            resume=self._resumes,
            agent_keys=tuple(keys.public for keys in self._agent_keys),
            same_host=same_host,
            environment=self._environment,
            heartbeat_s=self._settings.heartbeat_s,
            lease_s=self._settings.lease_s,
        )
        self._agents[index] = start_process(
            None if place.is_here else place.host,
            ["-m", "spectrain.launch.agent"],
            environment=self._environment,
            cwd=str(Path.cwd()),
            first_line=birth.to_json().encode(),
            python=self._python,
            ssh=self._ssh,
            on_stderr=self._agent_says,
            dies_with_us=False,
        )

    def _agent_says(self, line: str) -> None:
        self._console.show(Note(level="info", text=line))

    # -- while it goes on -----------------------------------------------------------------------

    def _stand_by(self, client: Client) -> RunEnded:
        client.send(LauncherHello(pid=os.getpid()))
        stops_sent = 0
        lost: set[int] = set()
        while True:
            received = client.receive(_POLL_S, self._waker.fd)
            self._waker.clear()
            message = None if received is None else received[0]
            if isinstance(message, RunEnded):
                return message
            if isinstance(message, View | Note):
                self._console.show(message)
            elif isinstance(message, StartAgent):
                self._agents[message.host_index].kill()  # its end may hang on a broken network
                self._agents[message.host_index].wait(_POLL_S)
                self._start_agent(message.host_index)
                lost.discard(message.host_index)
            while stops_sent < len(self._signals):
                stops_sent += 1
                client.send(self._stop_request(self._signals[stops_sent - 1], stops_sent))
            for index, agent in self._agents.items():
                if index not in lost and agent.poll() is not None:
                    lost.add(index)
                    agent.wait(_POLL_S)
                    client.send(AgentLost(host_index=index, reason=agent.exit_reason()))
            if received is None and self._coordinator.poll() is not None:
                if not self._may_restart_coordinator():
                    return self._coordinator_died(self._coordinator)
                self._coordinator.wait(_POLL_S)
                reason = self._coordinator.exit_reason()
                text = f"the coordinator died: {reason}; starting it again"
                self._console.show(Note(level="warning", text=text))
                self._coordinator = self._start_coordinator()
                client.send(LauncherHello(pid=os.getpid()))

    def _stop_request(self, number: signal.Signals, count: int) -> StopRequested:
        reason = "Ctrl-C" if number is signal.SIGINT else number.name
        again = count > 1
        text = (
            f"{reason} again: ending at once"
            if again
            else f"{reason}: stopping when the batches under way are done; once more to abort"
        )
        self._console.show(Note(level="warning", text=text))
        return StopRequested(reason=reason, abort=again)

    def _may_restart_coordinator(self) -> bool:
        """Tell whether there is a run to go on with, and it is worth another try."""
        has_begun = Path(self._settings.run_dir, "commit.json").exists()
        is_allowed = self._coordinators <= self._settings.max_restarts
        return has_begun and is_allowed and not self._signals

    def _coordinator_died(self, coordinator: RemoteProcess) -> RunEnded:
        coordinator.wait(_POLL_S)
        status = coordinator.poll() or 0
        cause = Cause(
            stage=None,
            host="this machine",
            what="coordinator died",
            message=coordinator.exit_reason(),
            log_path=str(Path(self._settings.run_dir, "logs", "coordinator.log")),
            log_tail=coordinator.last_words(),
            exit_code=128 - status if status < 0 else ExitCode.WORKER_FAILED,
        )
        return RunEnded(exit_code=cause.exit_code, state="failed", cause=cause)

    # -- the way down ---------------------------------------------------------------------------

    def _end_processes(self) -> None:
        """See every process to its end: first by its lifeline, then by a signal."""
        deadline = time.monotonic() + self._settings.grace_s
        for agent in self._agents.values():
            agent.close_stdin()
        for process in (*self._agents.values(), self._coordinator):
            process.close_stdin()
            if process.wait(max(0.1, deadline - time.monotonic())) is None:
                process.kill()
                process.wait(self._settings.grace_s)
        remove_run(self._run_id)  # what an agent of this machine that was killed has left

    @contextmanager
    def _listening_to_signals(self) -> Generator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {
            number: signal.signal(number, self._on_signal) for number in numbers
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))
        self._waker.wake()
