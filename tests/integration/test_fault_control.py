"""Coordinator, agent and nursery die, strangers knock, a replay differs: the run goes on."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import zmq
from integration.jobs import NOISY
from integration.launching import Launch
from integration.surviving import (
    GONE_WITHIN_S,
    Trial,
    losses_of,
    wait_for_losses,
    worker_of,
)
from waiting import wait_until

from spectrain.coordinator.export import weights_sha256
from spectrain.launch.snapshot_store import SHARED_MEMORY


def kill_and_wait_for_another(run: Launch, role: str) -> None:
    """Kill the process that plays this role and wait until another one does."""
    victim = run.role(role)
    victim.kill()
    wait_until(lambda: run.role(role).pid != victim.pid, what=f"another {role}", timeout_s=60)


def test_the_coordinator_dies_in_peace_in_a_recovery_and_near_commits(tmp_path: Path) -> None:
    """Row 21: it comes back and finds the run; no worker of the others is restarted."""
    trial = Trial(folder=tmp_path, epochs=150, every=3)
    run = trial.start()
    wait_for_losses(run, 50)
    kill_and_wait_for_another(run, "coordinator")
    wait_for_losses(run, 200)
    worker_of(run, 1).kill()
    reborn = run.run_dir / "logs" / "stage-1.localhost.restart-1.log"
    wait_until(reborn.exists, what="the beginning of a recovery")
    kill_and_wait_for_another(run, "coordinator")
    wait_for_losses(run, 400)
    for _ in range(2):
        kill_and_wait_for_another(run, "coordinator")
        wait_for_losses(run, len(run.losses()) + 10)
    trial.check(run, incarnations=(0, 1, 0, 0))


HELD_UP = NOISY.replace(
    "def datasets(samples: int = 104):",
    """def datasets(samples: int = 104, hold: str = ""):
    import time
    from pathlib import Path
    while hold and Path(hold).exists():
        time.sleep(0.01)""",
)
"""A coordinator cannot load this job for as long as the file ``hold`` is there."""


def test_ctrl_c_while_a_new_coordinator_finds_the_run_ends_it_in_order(tmp_path: Path) -> None:
    """Row 21, and the user stops the run in the middle of it: the weights are not lost."""
    hold = tmp_path / "hold"
    trial = Trial(folder=tmp_path, job=HELD_UP, epochs=10_000, hyper={"hold": str(hold)})
    run = trial.start()
    wait_for_losses(run, 50)
    hold.touch()
    kill_and_wait_for_another(run, "coordinator")
    log = run.run_dir / "logs" / "coordinator.log"
    wait_until(lambda: run.status()["state"] == "rejoining", what="the new coordinator")
    run.process.send_signal(signal.SIGINT)
    wait_until(
        lambda: "Ctrl-C: stopping when every stage has told" in log.read_text(), what="the stop"
    )
    hold.unlink()
    code, out, err = run.end()
    assert code == 130, out + err
    run.wait_for_nobody(GONE_WITHIN_S)
    summary = run.summary()
    assert summary["stopped_early"] is True
    assert summary["restarts"] == 0
    outcome = trial.quiet(batches=summary["updates"])
    assert run.losses() == losses_of(outcome)
    assert summary["weights_sha256"] == weights_sha256(outcome.state)


def test_everybody_ends_when_nobody_starts_the_coordinator_again_and_may_come_back_later(
    tmp_path: Path,
) -> None:
    """Row 22: a launcher that is stopped keeps the lines open and starts nothing."""
    trial = Trial(folder=tmp_path, epochs=80, options=("--lease", "3"))
    run = trial.start()
    wait_for_losses(run, 50)
    for role in ("agent", "nursery", "coordinator"):
        run.role(role)
    run_id = json.loads((run.run_dir / "run.json").read_text())["run_id"]
    run.process.send_signal(signal.SIGSTOP)
    try:
        run.role("coordinator").kill()
        run.wait_for_nobody(GONE_WITHIN_S)
        assert list(SHARED_MEMORY.glob(f"spectrain-*-{run_id[:12]}-*")) == []
    finally:
        run.process.send_signal(signal.SIGCONT)
    trial.check(run, incarnations=(1, 1, 1, 1), restarts=0)


def test_agent_and_nursery_die_with_their_workers_and_all_come_back(tmp_path: Path) -> None:
    """Row 23."""
    trial = Trial(folder=tmp_path, epochs=100)
    run = trial.start()
    for life, role in enumerate(("agent", "nursery")):
        wait_for_losses(run, 100 * (life + 1))
        workers = [worker_of(run, stage, life) for stage in range(4)]
        run.role(role).kill()
        psutil.wait_procs(workers, timeout=5)
        assert not any(worker.is_running() for worker in workers)
        worker_of(run, 3, life + 1)
    trial.check(run, incarnations=(2, 2, 2, 2), restarts=0)


def sockets_of(process: psutil.Process) -> set[str]:
    """Return the paths of the local sockets that a process listens on."""
    return {each.laddr for each in process.net_connections("unix") if "/" in str(each.laddr)}


def test_strangers_on_the_sockets_of_a_run_have_no_effect(tmp_path: Path) -> None:
    """Row 33: malformed, oversized and nameless messages, to the coordinator and to streams."""
    trial = Trial(folder=tmp_path, epochs=80)
    run = trial.start()
    wait_for_losses(run, 50)
    targets = sockets_of(run.role("coordinator")) | sockets_of(worker_of(run, 2))
    assert len(targets) >= 4
    with zmq.Context() as context, ExitStack() as strangers:
        for number, path in enumerate(sorted(targets)):
            stranger = strangers.enter_context(context.socket(zmq.DEALER))
            stranger.linger = 0
            stranger.identity = b"worker/1/0" if number % 2 else os.urandom(8)
            stranger.connect(f"ipc://{path}")
            for junk in (b"", b"\xc1", os.urandom(100), bytes(1 << 22)):
                with suppress(zmq.Again):
                    stranger.send_multipart([junk, junk], zmq.NOBLOCK)
        wait_for_losses(run, len(run.losses()) + 50)
    trial.check(run, incarnations=(0, 0, 0, 0))


WHIMSICAL = NOISY.replace(
    "def model(width: int = 16):", "def model(width: int = 16, lives: str = ''):"
)
WHIMSICAL = (
    WHIMSICAL.replace(
        "    return nn.Sequential(*layers, nn.Linear(width, 3))",
        "    layers.insert(6, Whim(lives))\n    return nn.Sequential(*layers, nn.Linear(width, 3))",
    )
    + """
import os
from pathlib import Path

class Whim(nn.Module):
    # The coordinator counts the work of the layer, the first worker runs it, and the second
    # computes something else.
    def __init__(self, lives):
        super().__init__()
        self.lives = lives
        self.number = None
    def forward(self, x):
        if self.lives and self.number is None:
            life = Path(self.lives)
            self.number = len(list(life.iterdir()))
            (life / str(os.getpid())).touch()
        return x + 0.001 if self.number == 2 else x
"""
)


def test_a_replay_that_differs_is_found_and_not_believed(tmp_path: Path) -> None:
    """Row 34."""
    lives = tmp_path / "lives"
    lives.mkdir()
    trial = Trial(folder=tmp_path, job=WHIMSICAL, hyper={"lives": str(lives)})
    run = trial.start("stage=1 phase=backward op=B29 action=kill")
    told = trial.check(run, incarnations=(0, 2, 0, 0))
    assert "stage 1 on localhost died: ReplayMismatchError" in told
