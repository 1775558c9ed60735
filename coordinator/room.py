"""Whether the hosts have room for the snapshots of their stages. Pure.

A full shared memory would kill workers in the middle of a write (SIGBUS) instead of refusing, so
it is looked at before training begins.
"""

from __future__ import annotations

from ..protocol.errors import ExitCode
from ..protocol.messages import Cause, ReserveSnapshots, SnapshotsReserved
from ..protocol.methods import remembered_copies
from ..protocol.settings import Settings
from .events import Send
from .fleet import Fleet, Worker

__all__ = ["ask_for_room", "lacks_room"]

_FLOAT_BYTES = 4
_STATE_COPIES = 3  # clean weights, and at most two numbers per weight in common optimizers
_FILES = 3  # the committed round, the next one, and one being written


def ask_for_room(fleet: Fleet, settings: Settings) -> list[Send]:
    """Return the question to each host, by what its stages say of their size."""
    replicas = 2 if len(fleet.hosts) > 1 else 1
    questions: list[Send] = []
    for index in fleet.agents:
        needed = sum(_snapshot_bytes(worker, settings) for worker in fleet.on_host(index))
        question = ReserveSnapshots(bytes_needed=replicas * _FILES * needed)
        questions.append(Send(f"agent/{index}", question))
    return questions


def lacks_room(answer: SnapshotsReserved, fleet: Fleet) -> Cause | None:
    """Return why the run cannot begin, if a host has too little room."""
    if answer.free_bytes >= answer.bytes_needed:
        return None
    host = fleet.hosts[answer.host_index]
    return Cause(
        stage=None,
        host=host,
        what="no room for snapshots",
        message=f"{answer.directory} on {host} has {_mib(answer.free_bytes)} free, and the "
        f"snapshots of its stages need up to {_mib(answer.bytes_needed)}",
        advice="Make it larger (mount -o remount,size=...), use more hosts, or run without "
        "restarts: --snapshot-every 0.",
        exit_code=ExitCode.CHECKPOINT,
        user_error=True,
    )


def _snapshot_bytes(worker: Worker, settings: Settings) -> int:
    """Return the most that one snapshot of a stage takes, old weights of N-1-k batches included."""
    assert worker.ready is not None, "sizes are known when a stage is built"
    stage, stages = worker.stage, settings.stages
    remembered = remembered_copies(settings.method, settings.predictor, stage, stages)
    copies = _STATE_COPIES + remembered + stages - 1 - stage
    return worker.ready.parameters * _FLOAT_BYTES * copies


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
