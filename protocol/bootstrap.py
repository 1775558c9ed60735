"""What each process is told at birth: who it is, whom to call, with which keys. No behaviour.

These records travel as one JSON line on the new process's standard input (over ssh for agents of
other hosts), so that secrets are never in an argument list, an environment or a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .keys import KeyPair
from .settings import Settings

__all__ = ["AgentBirth", "CoordinatorBirth", "WorkerBirth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorBirth:
    """launcher → coordinator.

    Attributes:
        run_id: 32 hexadecimal digits, the same in every process of the run.
        settings: what the run was asked to do.
        hosts: names of the hosts in the order of the user's list; agents are known by index.
        ipc_dir: directory of the sockets of this host, open to this user only.
        tcp_address: address to listen on for other hosts, without a port; None where the whole
            run is on this host.
        ports: to listen on there, for control and for data; 0 lets the system choose.
        resumes: whether the run continues from the checkpoints in its run directory.
        is_restarted: whether the run goes on already, and the coordinator before this one died.
        keys: the coordinator's own.
        allowed: identity (or prefix of identities) by public key; no other key may connect.
    """

    run_id: str
    settings: Settings
    hosts: tuple[str, ...]
    ipc_dir: str
    tcp_address: str | None
    ports: tuple[int, int]
    resumes: bool
    is_restarted: bool
    keys: KeyPair
    allowed: Mapping[str, str]

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({**asdict(self), "settings": self.settings.to_dict()})

    @classmethod
    def from_json(cls, line: str) -> CoordinatorBirth:
        """Read ``to_json``'s line."""
        values = json.loads(line)
        values["settings"] = Settings.from_dict(values["settings"])
        values["keys"] = KeyPair(**values["keys"])
        values["hosts"] = tuple(values["hosts"])
        values["ports"] = tuple(values["ports"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBirth:
    """launcher → agent.

    Attributes:
        run_id: as in ``CoordinatorBirth``.
        host_index: position of this host in the user's list.
        host: its name as the user wrote it.
        stages: of the whole run.
        devices: one per slot, "cpu" or "cuda:1".
        job: path of the job file on this host.
        run_dir: path of the run directory on this host.
        control: the coordinator's control endpoint as seen from here.
        data: the coordinator's data endpoint as seen from here.
        server_key: the coordinator's public key.
        keys: this agent's own.
        slot_keys: one pair per slot, for the workers it will start.
        peer_keys: public keys of all slots of the run, the only ones workers let in.
        same_host: whether all of the run is on one host, so that no TCP port is opened.
        environment: what workers get on top of the agent's own environment.
        heartbeat_s: how often to say that it lives.
        lease_s: how long to go on without a word from the coordinator.
        agent_keys: public keys of all agents of the run, in order of the hosts; the only ones
            that may send replicas of snapshots here.
        resume: whether the run goes on from checkpoints that an earlier one left in ``run_dir``.
    """

    run_id: str
    host_index: int
    host: str
    stages: int
    devices: tuple[str, ...]
    job: str
    run_dir: str
    control: str
    data: str
    server_key: str
    keys: KeyPair
    slot_keys: tuple[KeyPair, ...]
    peer_keys: tuple[str, ...]
    same_host: bool
    environment: Mapping[str, str]
    heartbeat_s: float
    lease_s: float
    agent_keys: tuple[str, ...] = ()
    resume: bool = False

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> AgentBirth:
        """Read ``to_json``'s line."""
        values = json.loads(line)
        values["keys"] = KeyPair(**values["keys"])
        values["slot_keys"] = tuple(KeyPair(**pair) for pair in values["slot_keys"])
        for name in ("devices", "peer_keys", "agent_keys"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBirth:
    """agent → worker, through the nursery.

    Attributes:
        run_id: as in ``CoordinatorBirth``.
        stage: the stage it owns, 0 is the input side.
        incarnation: how many workers were started for this stage before.
        host: the host's name as the user wrote it.
        device: what it computes on, "cpu" or "cuda:1".
        job: path of the job file on this host.
        control: the coordinator's control endpoint.
        data: the coordinator's data endpoint.
        server_key: the coordinator's public key.
        keys: its slot's own.
        peer_keys: public keys of all slots of the run, the only ones that may connect to it.
        ipc_dir: directory for its sockets on this host, open to this user only.
        snapshot_dir: directory in shared memory for its snapshots, which outlive it there.
        address: address that other hosts reach this one by; None where all stages share a host.
        heartbeat_s: how often to say that it lives.
        lease_s: how long to go on without a word from the coordinator.
    """

    run_id: str
    stage: int
    incarnation: int
    host: str
    device: str
    job: str
    control: str
    data: str
    server_key: str
    keys: KeyPair
    peer_keys: tuple[str, ...]
    ipc_dir: str
    snapshot_dir: str
    address: str | None
    heartbeat_s: float
    lease_s: float

    @property
    def identity(self) -> str:
        """Its name on the control plane, never used twice in a run."""
        return f"worker/{self.stage}/{self.incarnation}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkerBirth:
        """Build from ``to_dict``'s result as it looks after JSON."""
        fields: dict[str, Any] = dict(values)
        fields["keys"] = KeyPair(**fields["keys"])
        fields["peer_keys"] = tuple(fields["peer_keys"])
        return cls(**fields)
