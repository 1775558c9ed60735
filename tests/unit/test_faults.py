"""Faults are planted where they were asked for, and nowhere else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from spectrain.protocol.errors import SettingsError
from spectrain.protocol.schedule import Op
from spectrain.worker import fault_points, faults
from spectrain.worker.fault_points import POINTS
from spectrain.worker.faults import ACTIONS, Fault, InjectedError, parse_faults, plant_faults


@pytest.fixture(autouse=True)
def unwrapped_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every function that may be wrapped be itself again after the test."""
    for points in POINTS.values():
        for point in points:
            monkeypatch.setattr(point.owner, point.name, getattr(point.owner, point.name))


KILL_ON_SEND = Fault(stage=1, phase="send", action="kill", op="B17")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("stage=1 phase=send op=B17 action=kill", (KILL_ON_SEND,)),
        (" ; action=kill op=B17 phase=send stage=1;", (KILL_ON_SEND,)),
        (
            "stage=0 phase=link action=stop nth=2 incarnation=3",
            (Fault(stage=0, phase="link", action="stop", nth=2, incarnation=3),),
        ),
        (
            "stage=0 phase=link action=exit incarnation=any",
            (Fault(stage=0, phase="link", action="exit", incarnation=None),),
        ),
    ],
)
def test_faults_are_read_from_words(text: str, expected: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("phase=send action=kill", "stage"),
        ("stage=one phase=send action=kill", "one"),
        ("stage=1 phase=send action=kill op=X3", "X3"),
        ("stage=1 phase=sending action=kill", "phase must be one of"),
        ("stage=1 phase=send action=explode", "action must be one of"),
        ("stage=1 phase=send action=kill when=now", "unknown are when"),
    ],
)
def test_what_is_no_fault_is_refused_with_its_text(text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        parse_faults(text)


class Recorder:
    """Stands for a place in the worker, and for what goes wrong there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        point = fault_points.Point(Recorder, "work", POINTS["forward"][0].wrap)
        monkeypatch.setitem(POINTS, "forward", (point,))
        monkeypatch.setitem(ACTIONS, "kill", lambda: self.events.append("killed"))
        monkeypatch.setattr(Recorder, "work", Recorder.work)

    def work(self, at: object) -> str:
        self.events.append(str(at))
        return f"did {at}"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_a_fault_strikes_once_before_the_op_that_it_names(recorder: Recorder) -> None:
    plant_faults("stage=1 phase=forward op=F2 action=kill", stage=1, incarnation=0)
    for text in ("F1", "F2", "F2"):
        assert recorder.work(Op.parse(text)) == f"did {text}"
    assert recorder.events == ["F1", "killed", "F2", "F2"]


def test_a_fault_without_an_op_strikes_when_the_phase_is_reached(recorder: Recorder) -> None:
    plant_faults("stage=1 phase=forward action=kill nth=2", stage=1, incarnation=0)
    for text in ("F1", "F2", "F3"):
        recorder.work(Op.parse(text))
    assert recorder.events == ["F1", "killed", "F2", "F3"]


def test_two_faults_of_one_phase_strike_each_at_its_op(recorder: Recorder) -> None:
    text = "stage=1 phase=forward op=F2 action=kill; stage=1 phase=forward op=F1 action=kill"
    plant_faults(text, stage=1, incarnation=0)
    recorder.work(Op.parse("F1"))
    recorder.work(Op.parse("F2"))
    assert recorder.events == ["killed", "F1", "killed", "F2"]


@pytest.mark.parametrize(
    ("of", "incarnation", "strikes"),
    [("", 0, 1), ("", 1, 0), ("incarnation=1", 1, 1), ("incarnation=any", 7, 1)],
)
def test_a_fault_is_for_the_first_worker_unless_it_says_otherwise(
    of: str, incarnation: int, strikes: int, recorder: Recorder
) -> None:
    plant_faults(f"stage=1 phase=forward action=kill {of}", stage=1, incarnation=incarnation)
    recorder.work(Op.parse("F1"))
    assert recorder.events.count("killed") == strikes


def test_nothing_is_wrapped_for_another_stage_or_phase(recorder: Recorder) -> None:
    work = Recorder.work
    plant_faults("stage=1 phase=forward action=kill", stage=2, incarnation=0)
    plant_faults("stage=1 phase=link action=kill", stage=1, incarnation=0)
    assert Recorder.work is work


def test_every_phase_names_functions_that_exist() -> None:
    for points in POINTS.values():
        for point in points:
            assert callable(getattr(point.owner, point.name))


def test_a_link_can_fail_before_and_after_its_address_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def build(_: str, *, exchange: object) -> None:
        assert callable(exchange)
        events.append(f"got {exchange(b'own')!r}")

    def exchange(own: bytes) -> bytes:
        events.append(f"told {own!r}")
        return b"theirs"

    monkeypatch.setattr(fault_points.stream_end, "open_link", build)
    monkeypatch.setitem(ACTIONS, "kill", lambda: events.append("killed"))
    monkeypatch.setitem(ACTIONS, "stop", lambda: events.append("stopped"))
    text = "stage=0 phase=link action=kill; stage=0 phase=linked action=stop"
    plant_faults(text, stage=0, incarnation=0)
    fault_points.stream_end.open_link("socket", exchange=exchange)
    assert events == ["killed", "told b'own'", "stopped", "got b'theirs'"]


def test_a_snapshot_goes_by_the_update_it_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    struck: list[str] = []
    monkeypatch.setattr(fault_points.snapshotter, "write_snapshot", lambda *_: (1, "digest"))
    monkeypatch.setitem(ACTIONS, "kill", lambda: struck.append("killed"))
    plant_faults("stage=0 phase=snapshot-written op=U9 action=kill", stage=0, incarnation=0)
    write = fault_points.snapshotter.write_snapshot
    assert write(tmp_path / "stage-0.update-9.safetensors", "", {}) == (1, "digest")
    assert not struck
    write(tmp_path / "stage-0.update-10.safetensors", "", {})
    assert struck == ["killed"]


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_go_to_this_very_process(
    action: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.os, "kill", lambda *call: sent.append(call))
    ACTIONS[action]()
    assert sent == [(os.getpid(), number)]


def test_raising_is_an_error_of_nobodys_class() -> None:
    with pytest.raises(InjectedError, match="asked for"):
        ACTIONS["raise"]()


def test_exiting_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(faults.os, "_exit", codes.append)
    ACTIONS["exit"]()
    assert codes == [3]
