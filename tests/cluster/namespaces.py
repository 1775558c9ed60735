"""One machine's worth of Linux namespaces, and whether this computer allows them.

A machine has its own network, host name, process numbers, mounts, shared memory and ``/run``; it
shares the file system, but for what is mounted over it. All of it lives exactly as long as the
machine's first process, which dies with the test run: no name or file on this computer can be
left behind, whatever kills the tests. Knows nothing of addresses, ssh or SpecTrain.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from waiting import wait_until

__all__ = ["Machine", "program_of", "why_unavailable"]

TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "sshd", "nsenter", "setpriv", "unshare", "mount")
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--kill-child", "--mount-proc")
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"

_TRIAL = """
ip link add br0 type bridge
ip link add left type veth peer name right
tc qdisc add dev left root tbf rate 1mbit burst 10kb latency 100ms
mount -t tmpfs tmpfs /dev/shm
hostname trial
"""

_FIRST_PROCESS = """
hostname "$1"
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
shift
while [ "$1" != -- ]; do
  mount --bind "$2" "$1"
  shift 2
done
shift
echo ready
read -r _
exec "$@"
"""


@functools.cache
def why_unavailable() -> str | None:
    """Return why this computer cannot run machines, or None when it can; tries it once."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = _run([*UNSHARE, "sh", "-euc", _TRIAL], text="", timeout_s=20.0, check=False)
    return None if trial.returncode == 0 else trial.stderr.strip() or "unshare failed"


class Machine:
    """A machine that is being set up, then runs one program as its process number 1.

    Args:
        name: its host name.
        program: what process 1 becomes at ``boot()``; it must wait for the children it inherits.
        log: where process 1 writes.
        mounts: what the machine sees at an existing path instead of what is there.
    """

    def __init__(
        self, name: str, *, program: Sequence[str], log: Path, mounts: Mapping[Path, Path]
    ) -> None:
        self.name = name
        pairs = [str(path) for pair in mounts.items() for path in pair]
        with log.open("wb") as output:
            # The chain dies from its head: tests, then unshare, then process 1, then all others.
            self._holder = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", *UNSHARE),
                    *("sh", "-euc", _FIRST_PROCESS, "sh", name, *pairs, "--", *program),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=_environment(),
            )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self._holder.kill()
            self._end_holder()
            raise RuntimeError(f"machine {name} did not start: {log.read_text()}")
        (self._first,) = psutil.Process(self._holder.pid).children()
        self._network = Path(f"/proc/{self._first.pid}/ns/net").readlink()

    @property
    def pid(self) -> int:
        """Process 1 of this machine, as the computer numbers it."""
        return self._first.pid

    def boot(self) -> None:
        """Let process 1 become its program."""
        assert self._holder.stdin is not None
        self._holder.stdin.write(b"boot\n")
        self._holder.stdin.flush()

    def processes(self) -> list[psutil.Process]:
        """Return what lives in this machine besides process 1."""
        apart = {self._holder.pid, self.pid}
        found: list[psutil.Process] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.NoSuchProcess):  # it ended while we looked
                is_here = (entry / "ns/net").readlink() == self._network
                if is_here and int(entry.name) not in apart:
                    found.append(psutil.Process(int(entry.name)))
        return found

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` inside, in the caller's working directory."""
        namespaces = ("--net", "--mount", "--pid", "--uts", "--ipc")
        at_home = ("env", f"--chdir={Path.cwd()}")
        return ["nsenter", "--target", str(self.pid), *namespaces, "--", *at_home, *argv]

    def start(self, argv: Sequence[str], *, output: Path) -> subprocess.Popen[bytes]:
        """Start a program in here and return at once.

        The process returned is a door-keeper: it ends as the program ends, with the same status,
        but a signal sent to it does not reach the program (see ``program_of``).
        """
        with output.open("wb") as stream:
            return subprocess.Popen(
                self.command(argv),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )

    def run(
        self, argv: Sequence[str], *, text: str = "", timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in here to its end; ``text`` is what it reads.

        Raises:
            RuntimeError: it failed and ``check`` is set; the text holds what it wrote.
            subprocess.TimeoutExpired: it was still running after ``timeout_s``.
        """
        return _run(self.command(argv), text=text, timeout_s=timeout_s, check=check)

    def configure(self, *argv: str, text: str = "") -> None:
        """Run one of the computer's own network tools on this machine's network.

        Raises:
            RuntimeError: the tool refused.
        """
        command = ["nsenter", "--target", str(self.pid), "--net", "--", *argv]
        _run(command, text=text, timeout_s=20.0, check=True)

    def close(self) -> None:
        """End every process of this machine and with them the machine; harmless when it is over."""
        with suppress(psutil.NoSuchProcess):
            self._first.kill()
        self._end_holder()

    def _end_holder(self) -> None:
        self._holder.wait(timeout=20)
        for stream in (self._holder.stdin, self._holder.stdout):
            assert stream is not None
            stream.close()


def program_of(door_keeper: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the program behind what ``Machine.start`` returned."""
    children = wait_until(psutil.Process(door_keeper.pid).children, what="the program to start")
    return children[0]


def _run(
    command: Sequence[str], *, text: str, timeout_s: float, check: bool
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command,
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_environment(),
    )
    if check and result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {result.returncode}: {result.stdout}{result.stderr}"
        )
    return result


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH_PATH}
