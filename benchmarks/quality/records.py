"""What is kept of a training, and the file that it is kept in: one line of JSON for each."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from grid import Run

__all__ = ["BusyError", "Journal", "Result", "parse"]


class BusyError(Exception):
    """Another process adds to the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one run went. The metric is in the unit of its task's label.

    Attributes:
        run: which.
        final: test metric after the last epoch; that of chance if the run diverged.
        best: of the epochs that it saw; that of chance if there was none.
        train_loss: mean over the last epoch that was finished; None if there was none.
        diverged: whether a loss was NaN or infinite, which ended the run.
        metric_curve: test metric after each epoch.
        loss_curve: mean loss of training in each finished epoch.
        seconds: that the training took on one core.
        torch: its version.
    """

    run: Run
    final: float
    best: float
    train_loss: float | None
    diverged: bool
    metric_curve: tuple[float, ...]
    loss_curve: tuple[float, ...]
    seconds: float
    torch: str

    def to_line(self) -> str:
        """Return one line of JSON without its end."""
        values = asdict(self)
        return json.dumps({**values.pop("run"), **values})

    @classmethod
    def from_line(cls, line: str) -> Result:
        """Read ``to_line``'s line."""
        values = json.loads(line)
        run = Run(**{field.name: values.pop(field.name) for field in fields(Run)})
        curves = {name: tuple(values.pop(name)) for name in ("metric_curve", "loss_curve")}
        return cls(run=run, **curves, **values)


def parse(text: str) -> list[Result]:
    """Read the lines of a file; what follows the last end of a line was never finished."""
    return [Result.from_line(line) for line in text.split("\n")[:-1]]


class Journal:
    """The results so far, on disk. One process at a time adds to it.

    Attributes:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Result]:
        """Return all finished results, in the order in which they were added."""
        return parse(self.path.read_text()) if self.path.exists() else []

    @contextmanager
    def alone(self) -> Generator[None]:
        """Keep other processes from adding, and cut off a last line that one was killed in.

        Raises:
            BusyError: there is another.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(f"another process adds to {self.path}; wait for it") from None
            file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            yield

    def add(self, result: Result) -> None:
        """Append one result, while ``alone``."""
        with self.path.open("a") as file:
            file.write(result.to_line() + "\n")
