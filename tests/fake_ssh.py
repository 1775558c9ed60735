"""An ``ssh`` for tests: takes ssh's arguments, runs the command here with a bare environment.

Hosts by name: ``refused`` cannot be reached, ``silent`` never answers; every other name is this
machine, as a login shell of a stranger would see it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/argv"
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
case $host in
refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
silent) exec sleep 600 ;;
noisy) echo "Welcome to noisy!" ;;
esac
exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""


class FakeSsh:
    """Puts the fake in front of ``PATH`` and remembers what it was called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "fake-ssh"
        self._folder.mkdir()
        script = self._folder / "ssh"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self._folder}{os.pathsep}{os.environ['PATH']}")

    def argv(self) -> list[str]:
        """Return the arguments of the latest call."""
        return (self._folder / "argv").read_text().splitlines()
