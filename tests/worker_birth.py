"""Births of workers that no agent has started, for tests."""

from __future__ import annotations

from typing import Any

from spectrain.protocol.bootstrap import WorkerBirth
from spectrain.protocol.keys import KeyPair

__all__ = ["RUN_ID", "worker_birth"]

RUN_ID = "5a" * 16


def worker_birth(**changes: Any) -> WorkerBirth:
    """Return the birth of stage 0, all on this host; what it calls answers nothing."""
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "stage": 0,
        "incarnation": 0,
        "host": "here",
        "device": "cpu",
        "job": "job.py",
        "control": "ipc:///nowhere/control",
        "data": "ipc:///nowhere/data",
        "server_key": "",
        "keys": KeyPair.new(),
        "peer_keys": (),
        "ipc_dir": "/nowhere",
        "snapshot_dir": "/nowhere",
        "address": None,
        "heartbeat_s": 0.05,
        "lease_s": 60.0,
    }
    return WorkerBirth(**{**values, **changes})
