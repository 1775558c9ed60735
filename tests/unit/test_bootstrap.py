"""What processes are told at birth comes out of JSON as it went in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spectrain.protocol.bootstrap import AgentBirth, CoordinatorBirth, WorkerBirth
from spectrain.protocol.errors import SettingsError
from spectrain.protocol.keys import KeyPair
from spectrain.protocol.settings import Settings

KEYS, OTHER_KEYS = KeyPair.new(), KeyPair.new()
COORDINATOR = CoordinatorBirth(
    run_id="5a" * 16,
    settings=Settings(job="job.py", run_dir="/run", stages=2, partition=(3, 5), hyper={"lr": 0.1}),
    hosts=("left", "right"),
    ipc_dir="/ipc",
    tcp_address="10.0.0.1",
    ports=(5000, 5001),
    resumes=True,
    is_restarted=False,
    keys=KEYS,
    allowed={OTHER_KEYS.public: "agent/0"},
)
AGENT = AgentBirth(
    run_id="5a" * 16,
    host_index=1,
    host="right",
    stages=2,
    devices=("cuda:0", "cuda:1"),
    job="/job.py",
    run_dir="/run",
    control="tcp://10.0.0.1:5000",
    data="tcp://10.0.0.1:5001",
    server_key=KEYS.public,
    keys=OTHER_KEYS,
    slot_keys=(KEYS, OTHER_KEYS),
    peer_keys=(KEYS.public, OTHER_KEYS.public),
    same_host=False,
    environment={"OMP_NUM_THREADS": "1"},
    heartbeat_s=0.5,
    lease_s=7.0,
    agent_keys=(OTHER_KEYS.public,),
    resume=True,
)
WORKER = WorkerBirth(
    run_id="5a" * 16,
    stage=3,
    incarnation=2,
    host="right",
    device="cuda:1",
    job="/job.py",
    control="tcp://10.0.0.1:5000",
    data="tcp://10.0.0.1:5001",
    server_key=KEYS.public,
    keys=OTHER_KEYS,
    peer_keys=(KEYS.public,),
    ipc_dir="/ipc",
    snapshot_dir="/dev/shm/x",
    address=None,
    heartbeat_s=0.5,
    lease_s=7.0,
)


def test_a_coordinators_birth_survives_its_line() -> None:
    assert CoordinatorBirth.from_json(COORDINATOR.to_json()) == COORDINATOR


def test_a_coordinator_without_other_hosts_has_no_address() -> None:
    here = replace(COORDINATOR, tcp_address=None, ports=(0, 0), allowed={})
    assert CoordinatorBirth.from_json(here.to_json()) == here


def test_a_coordinators_settings_are_checked_again() -> None:
    line = COORDINATOR.to_json().replace('"epochs": 1', '"epochs": 0')
    with pytest.raises(SettingsError, match="epochs = 0"):
        CoordinatorBirth.from_json(line)


def test_an_agents_birth_survives_its_line() -> None:
    assert AgentBirth.from_json(AGENT.to_json()) == AGENT


def test_a_workers_birth_survives_json() -> None:
    assert WorkerBirth.from_dict(json.loads(json.dumps(WORKER.to_dict()))) == WORKER


def test_a_workers_name_holds_stage_and_incarnation() -> None:
    assert WORKER.identity == "worker/3/2"


@pytest.mark.parametrize("line", [COORDINATOR.to_json(), AGENT.to_json()])
def test_a_birth_is_one_line(line: str) -> None:
    assert "\n" not in line


@pytest.mark.parametrize("birth", [COORDINATOR, AGENT, WORKER])
def test_secrets_are_told_but_not_shown(birth: object) -> None:
    assert KEYS.secret not in repr(birth)
    assert OTHER_KEYS.secret not in repr(birth)
