"""The four faces of a run: what each says, when, and on which stream."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from spectrain.launch import console as console_module
from spectrain.launch.console import (
    Console,
    JsonConsole,
    LiveConsole,
    PlainConsole,
    QuietConsole,
    Started,
    open_console,
)
from spectrain.protocol.messages import Cause, Note, RunEnded, StageView, View

STARTED = Started(
    job="job.py", method="spectrain", stages=2, hosts=("node1", "node2"), run_dir="/runs/one"
)
CAUSE = Cause(stage=1, host="node2", what="ValueError", message="shapes differ")
FAILED = RunEnded(exit_code=1, state="failed", cause=CAUSE)
SUMMARY = {
    "updates": 3, "epochs": 1, "wall_s": 2.0, "samples_per_s": 12.0,
    "final_metrics": {"loss": 0.1}, "final_metrics_of": "test", "slowest_stage": None,
    "stages": [],
}  # fmt: skip
DONE = RunEnded(exit_code=0, state="done", summary_json=json.dumps(SUMMARY))


class Clock:
    """Time that stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def training(batch: int, metrics: dict[str, float] | None = None) -> View:
    return View(
        state="training", batch=batch, train_batches=20, epochs=1, loss=0.5, metrics=metrics or {}
    )


def starting(*missing: str) -> View:
    return View(state="starting", waiting_for=missing)


class Plain:
    """A plain console with its streams and its clock."""

    def __init__(self) -> None:
        self.out, self.err, self.clock = io.StringIO(), io.StringIO(), Clock()
        self.console = PlainConsole(self.out, self.err, self.clock)
        self.show = self.console.show

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


# -- plain --------------------------------------------------------------------------------------


def test_plain_says_at_first_what_will_run_and_where_it_is_kept() -> None:
    plain = Plain()
    plain.show(STARTED)
    assert plain.lines() == [
        "job.py: 2 stages on node1, node2, method spectrain",
        "run directory: /runs/one",
    ]


def test_plain_writes_one_progress_line_every_few_seconds() -> None:
    plain = Plain()
    for batch in range(1, 13):
        plain.show(training(batch))
        plain.clock.now_s += 1.0
    batches = [line.split("batch ")[1].split("/")[0] for line in plain.lines()]
    assert batches == ["1", "6", "11"]


def test_plain_writes_nothing_while_there_is_nothing_to_tell() -> None:
    plain = Plain()
    plain.show(training(0))
    assert plain.lines() == []


def test_plain_writes_each_new_evaluation_once_and_at_once() -> None:
    plain = Plain()
    plain.show(training(1))
    for accuracy in (0.5, 0.5, 0.75):
        plain.show(training(2, {"accuracy": accuracy}))
    assert plain.lines()[1:] == ["test: accuracy 0.5", "test: accuracy 0.75"]


def test_plain_names_who_is_missing_every_ten_seconds() -> None:
    plain = Plain()
    for _ in range(25):
        plain.show(starting("stage 1 (node2): importing torch"))
        plain.clock.now_s += 1.0
    assert plain.lines() == ["waiting for 1: stage 1 (node2): importing torch"] * 2


def test_plain_writes_notes_to_the_stream_of_their_level() -> None:
    plain = Plain()
    plain.show(Note(level="info", text="1 spare slot"))
    plain.show(Note(level="warning", text="clocks differ"))
    assert plain.lines() == ["1 spare slot"]
    assert plain.err.getvalue() == "warning: clocks differ\n"


def test_plain_ends_with_the_results() -> None:
    plain = Plain()
    plain.show(STARTED)
    plain.show(DONE)
    assert plain.lines()[-1] == "results: /runs/one"
    assert plain.err.getvalue() == ""


def test_plain_ends_a_failure_with_the_first_cause() -> None:
    plain = Plain()
    plain.show(FAILED)
    plain.console.close()
    assert plain.lines()[0] == "failed (exit code 1)"
    assert "stage 1 on node2: ValueError" in plain.err.getvalue()


def test_characters_that_a_stream_cannot_hold_are_escaped() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    PlainConsole(out, out, Clock()).show(Note(level="info", text="hôte"))
    assert raw.getvalue() == b"h\\xf4te\n"
    out.close()


# -- live ---------------------------------------------------------------------------------------


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> tuple[LiveConsole, Terminal, io.StringIO]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out, err = Terminal(), io.StringIO()
    return LiveConsole(out, err), out, err


Live = tuple[LiveConsole, Terminal, io.StringIO]


def test_live_draws_the_newest_view_in_place(live: Live) -> None:
    console, out, _ = live
    stage = StageView(
        stage=0, host="node1", pid=4, incarnation=0, state="training", version=3, last_batch=2,
        in_flight=1, wait_share=0.5,
    )  # fmt: skip
    console.show(training(1))
    console.show(
        View(state="training", batch=2, train_batches=20, epochs=1, loss=0.5, stages=(stage,))
    )
    console.close()
    text = out.getvalue()
    assert "batch 1/20" in text
    assert "batch 2/20" in text
    assert "node1  training" in text
    assert "\x1b[" in text  # it moved the cursor up to draw over the first view


def test_live_keeps_notes_whole_and_takes_no_markup_from_them(live: Live) -> None:
    console, out, _ = live
    console.show(STARTED)
    text = "see [bold] " + "x" * 120
    console.show(Note(level="warning", text=text))
    console.close()
    assert f"warning: {text}" in out.getvalue()
    assert "run directory: /runs/one" in out.getvalue()


def test_live_ends_with_results_below_the_view(live: Live) -> None:
    console, out, err = live
    console.show(STARTED)
    console.show(training(3))
    console.show(DONE)
    console.close()
    assert out.getvalue().endswith("test: loss 0.1\nresults: /runs/one\n")
    assert err.getvalue() == ""


def test_live_ends_a_failure_with_the_first_cause(live: Live) -> None:
    console, _, err = live
    console.show(FAILED)
    assert "stage 1 on node2: ValueError" in err.getvalue()


def test_live_gives_the_cursor_back_when_closed_early(live: Live) -> None:
    console, out, _ = live
    console.show(training(1))
    console.close()
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


# -- JSON ---------------------------------------------------------------------------------------


class Json:
    """A JSON console with its stream and its clock."""

    def __init__(self) -> None:
        self.out, self.clock = io.StringIO(), Clock()
        self.console = JsonConsole(self.out, self.clock)
        self.show = self.console.show

    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


def test_json_names_the_kind_of_every_event() -> None:
    machine = Json()
    for event in (STARTED, training(1), Note(level="info", text="x"), DONE):
        machine.show(event)
    machine.console.close()
    kinds = [each["event"] for each in machine.objects()]
    assert kinds == ["start", "view", "note", "end"]


def test_json_fields_are_those_of_the_messages() -> None:
    machine = Json()
    machine.show(STARTED)
    machine.show(training(4))
    start, view = machine.objects()
    assert start == {
        "event": "start", "job": "job.py", "method": "spectrain", "stages": 2,
        "hosts": ["node1", "node2"], "run_dir": "/runs/one",
    }  # fmt: skip
    assert set(view) == {"event", *View.__dataclass_fields__}
    assert (view["batch"], view["loss"], view["lr"]) == (4, 0.5, None)


def test_json_ends_with_the_summary_as_an_object() -> None:
    machine = Json()
    machine.show(STARTED)
    machine.show(DONE)
    assert machine.objects()[-1] == {
        "event": "end", "exit_code": 0, "state": "done", "cause": None, "summary": SUMMARY,
        "run_dir": "/runs/one",
    }  # fmt: skip


def test_json_ends_a_failure_with_its_cause() -> None:
    machine = Json()
    machine.show(FAILED)
    (end,) = machine.objects()
    assert end["summary"] is None
    assert isinstance(end["cause"], dict)
    assert (end["cause"]["stage"], end["cause"]["what"]) == (1, "ValueError")


def test_json_writes_one_view_a_second_and_each_change_of_state() -> None:
    machine = Json()
    for batch in range(4):
        machine.show(training(batch))
        machine.clock.now_s += 0.5
    machine.show(View(state="finishing"))
    states = [each["state"] for each in machine.objects()]
    assert states == ["training", "training", "finishing"]


def test_json_stays_json_when_a_loss_is_not_a_number() -> None:
    machine = Json()
    machine.show(View(state="training", loss=float("nan")))
    assert machine.objects()[0]["loss"] is None


# -- quiet --------------------------------------------------------------------------------------


def test_quiet_says_nothing_when_all_goes_well() -> None:
    err = io.StringIO()
    console = QuietConsole(err)
    for event in (STARTED, training(1), Note(level="info", text="x"), DONE):
        console.show(event)
    console.close()
    assert err.getvalue() == ""


def test_quiet_still_says_what_is_wrong() -> None:
    err = io.StringIO()
    console = QuietConsole(err)
    console.show(Note(level="warning", text="clocks differ"))
    console.show(FAILED)
    assert err.getvalue().startswith("warning: clocks differ\n+-- first cause")


# -- choice -------------------------------------------------------------------------------------


Choose = Callable[..., Console]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    def choose(
        *, terminal: bool, term: str = "xterm", json_lines: bool = False, quiet: bool = False
    ) -> Console:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
        console = open_console(json_lines=json_lines, quiet=quiet)
        console.close()
        return console

    return choose


def test_a_terminal_gets_the_live_view(choose: Choose) -> None:
    assert isinstance(choose(terminal=True), LiveConsole)


def test_a_pipe_or_a_dumb_terminal_gets_plain_lines(choose: Choose) -> None:
    assert isinstance(choose(terminal=False), PlainConsole)
    assert isinstance(choose(terminal=True, term="dumb"), PlainConsole)


def test_what_was_asked_for_wins_over_the_terminal(choose: Choose) -> None:
    assert isinstance(choose(terminal=True, quiet=True), QuietConsole)
    assert isinstance(choose(terminal=True, json_lines=True), JsonConsole)


def test_the_console_is_imported_without_rich_and_torch() -> None:
    script = f"import sys, {console_module.__name__}; print({{'rich', 'torch'}} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
