"""The four faces of one run: live view, plain lines, JSON lines, quiet; only writes, never asks.

A console is given every event once and in order. What it says is put together in ``render.py``;
here is decided when to say it, and on which stream. Progress and results go to standard output,
warnings, errors and the first cause to standard error, and JSON owns standard output alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO, TypeAlias

from ..protocol.messages import Note, RunEnded, View
from ..protocol.strict_json import json_text
from .render import cause_box, end_lines, live_lines, metrics_text, progress_line, waiting_line

__all__ = [
    "Console",
    "Event",
    "JsonConsole",
    "LiveConsole",
    "PlainConsole",
    "QuietConsole",
    "Started",
    "open_console",
]

WAITING_EVERY_S = 10.0
"""How often a start-up that takes its time says who is missing."""

PROGRESS_EVERY_S = 5.0
JSON_VIEW_EVERY_S = 1.0

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is known before any process is started."""

    job: str
    method: str
    stages: int
    hosts: tuple[str, ...]
    run_dir: str


Event: TypeAlias = Started | View | Note | RunEnded


class Console(Protocol):
    """What the launcher talks to."""

    def show(self, event: Event) -> None:
        """Say what has happened, or nothing."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and more than once."""
        ...


def open_console(*, json_lines: bool, quiet: bool) -> Console:
    """Choose the face: as asked for, else a live view on a terminal and plain lines elsewhere."""
    if json_lines:
        return JsonConsole(sys.stdout)
    if quiet:
        return QuietConsole(sys.stderr)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(sys.stdout, sys.stderr)
    return PlainConsole(sys.stdout, sys.stderr)


class PlainConsole:
    """A line every few seconds, for logs and pipes.

    Args:
        out: for progress and results.
        err: for warnings, errors and the first cause.
        clock: seconds, monotonic.
    """

    def __init__(self, out: TextIO, err: TextIO, clock: Clock = time.monotonic) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._run_dir = ""
        self._metrics: dict[str, float] = {}
        self._waiting_due_s = clock() + WAITING_EVERY_S
        self._progress_due_s = clock()

    def show(self, event: Event) -> None:
        """Say what has happened, or nothing."""
        if isinstance(event, Started):
            self._run_dir = event.run_dir
            _write(self._out, _start_lines(event))
        elif isinstance(event, View):
            self._show_view(event)
        elif isinstance(event, Note):
            _write(self._out if event.level == "info" else self._err, [_note_line(event)])
        else:
            _write(self._out, end_lines(event, self._run_dir))
            _write_cause(self._err, event)

    def close(self) -> None:
        """Do nothing: lines need no end."""

    def _show_view(self, view: View) -> None:
        now_s = self._clock()
        if view.waiting_for:
            if now_s >= self._waiting_due_s:
                self._waiting_due_s = now_s + WAITING_EVERY_S
                _write(self._out, [waiting_line(view)])
            return
        line = progress_line(view)
        if line and now_s >= self._progress_due_s:
            self._progress_due_s = now_s + PROGRESS_EVERY_S
            _write(self._out, [line])
        if view.metrics != self._metrics:
            self._metrics = view.metrics
            _write(self._out, [f"test: {metrics_text(view.metrics)}"])


class LiveConsole:
    """A view that stays in place at the foot of a terminal; notes scroll by above it.

    Args:
        out: the terminal.
        err: for the first cause, once the view has been taken down.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        # Only here: importing rich takes longer than a whole --help may.
        import rich.console
        import rich.live
        import rich.text

        self._out = out
        self._err = err
        self._run_dir = ""
        self._text = rich.text.Text
        self._terminal = rich.console.Console(file=out, highlight=False, markup=False)
        self._live = rich.live.Live(console=self._terminal, auto_refresh=False)
        self._live.start()

    def show(self, event: Event) -> None:
        """Draw the newest view, or write above it."""
        if isinstance(event, Started):
            self._run_dir = event.run_dir
            self._print(_start_lines(event))
        elif isinstance(event, View):
            lines = live_lines(event, self._terminal.width)
            text = self._text("\n".join(lines), no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif isinstance(event, Note):
            self._print([_note_line(event)])
        else:
            self.close()
            _write(self._out, end_lines(event, self._run_dir))
            _write_cause(self._err, event)

    def close(self) -> None:
        """Take the view down; its last state stays readable."""
        self._live.stop()

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._terminal.print(line, soft_wrap=True)


class JsonConsole:
    """One JSON object per line and event, for machines; ``event`` names its kind.

    Kinds are ``start``, ``view``, ``note`` and ``end``. The other fields are those of the message
    of that kind, under the same names; ``end`` holds the summary as an object.

    Args:
        out: where the lines go, and nothing else.
        clock: seconds, monotonic.
    """

    def __init__(self, out: TextIO, clock: Clock = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._run_dir = ""
        self._state = ""
        self._due_s = clock()

    def show(self, event: Event) -> None:
        """Write the event; of views one a second, and the first of each state."""
        if isinstance(event, Started):
            self._run_dir = event.run_dir
            self._line("start", asdict(event))
        elif isinstance(event, View):
            now_s = self._clock()
            if event.state != self._state or now_s >= self._due_s:
                self._state = event.state
                self._due_s = now_s + JSON_VIEW_EVERY_S
                self._line("view", asdict(event))
        elif isinstance(event, Note):
            self._line("note", asdict(event))
        else:
            fields = asdict(event)
            text = fields.pop("summary_json")
            summary = json.loads(text) if text else None
            self._line("end", {**fields, "summary": summary, "run_dir": self._run_dir})

    def close(self) -> None:
        """Do nothing: lines need no end."""

    def _line(self, kind: str, fields: dict[str, Any]) -> None:
        _write(self._out, [json_text({"event": kind, **fields})])


class QuietConsole:
    """Warnings, errors and the first cause; a run that goes well says nothing.

    Args:
        err: where they go.
    """

    def __init__(self, err: TextIO) -> None:
        self._err = err

    def show(self, event: Event) -> None:
        """Write the event if something is wrong."""
        if isinstance(event, Note) and event.level != "info":
            _write(self._err, [_note_line(event)])
        elif isinstance(event, RunEnded):
            _write_cause(self._err, event)

    def close(self) -> None:
        """Do nothing: lines need no end."""


def _start_lines(started: Started) -> list[str]:
    hosts = ", ".join(started.hosts)
    return [
        f"{started.job}: {started.stages} stages on {hosts}, method {started.method}",
        f"run directory: {started.run_dir}",
    ]


def _note_line(note: Note) -> str:
    return note.text if note.level == "info" else f"{note.level}: {note.text}"


def _write_cause(stream: TextIO, ended: RunEnded) -> None:
    if ended.cause is not None:
        _write(stream, [cause_box(ended.cause)])


def _write(stream: TextIO, lines: Sequence[str]) -> None:
    """Write whole lines; characters that the stream cannot hold are written as escapes."""
    encoding = stream.encoding or "utf-8"
    text = "".join(f"{line}\n" for line in lines)
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
