"""Starts one Python program on a host, over ssh or right here, and holds the line to it.

The environment, the arguments and every secret travel on the program's stdin, never on a command
line that others can read. Its stdin stays open as a lifeline: when this process dies, the program
reads end-of-file. This file decides nothing about runs: it does not know what it starts.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO

from ..protocol.errors import HostError, SettingsError
from .hosts import Host

__all__ = [
    "BOOTSTRAP",
    "RemoteProcess",
    "SshOptions",
    "explain_exit",
    "ssh_command",
    "start_process",
]

LineCallback = Callable[[str], None]
"""Gets one line of text without its end; called from a reader thread."""

_BOOTSTRAP_SOURCE = """\
import json, os, sys
line = b"".join(iter(lambda: os.read(0, 1) or sys.exit("spectrain: nothing to start"), b"\\n"))
request = json.loads(line)
if request["parent"] and sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if request["parent"] not in (0, os.getppid()):
    sys.exit("spectrain: the process that started this one is gone")
if not os.path.isdir(request["cwd"]):
    sys.exit("spectrain: the working directory " + request["cwd"] + " does not exist here")
os.chdir(request["cwd"])
os.environ.update(request["environment"])
os.execv(sys.executable, [sys.executable] + request["argv"])
"""
# Reads byte by byte, so that what follows the first line is left for the program. prctl(1) is
# PR_SET_PDEATHSIG: the kernel kills a local program with the thread that started it.

BOOTSTRAP = f"exec({json.dumps(_BOOTSTRAP_SOURCE)})"
"""The bootstrap as one line without single quotes, so that every login shell, csh and fish
included, hands it on unchanged."""

_SSH_FAILED = 255  # ssh's own code; a remote death by signal shows as the same
_NOT_EXECUTABLE = 126  # the shell's codes
_NOT_FOUND = 127
_TAIL_LINES = 20
_LONGEST_LINE_BYTES = 1 << 16
_DRAIN_S = 1.0  # a grandchild may hold the pipe open after the program is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How to call the user's own ``ssh``; what is not given is left to ``~/.ssh/config``.

    Attributes:
        port: 1 to 65535.
        identity: path of a private key.
        options: each as after ``ssh -o``: ``Name=value``. They win over the ones below.
        connect_timeout_s: how long ssh tries to connect, whole seconds.
        keepalive_s: how often ssh asks a silent host whether it lives; three misses end it.

    Raises:
        SettingsError: a value that ssh would not take.
    """

    port: int | None = None
    identity: str | None = None
    options: tuple[str, ...] = ()
    connect_timeout_s: int = 10
    keepalive_s: int = 5

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:  # noqa: PLR2004
            raise SettingsError(f"--ssh-port {self.port}: a port is a number from 1 to 65535")
        for option in self.options:
            name, equals, value = option.partition("=")
            if not (name.strip().isalnum() and equals and value.strip()):
                raise SettingsError(
                    f"--ssh-option {option!r}: expected Name=value as after `ssh -o`, for example "
                    "--ssh-option StrictHostKeyChecking=accept-new"
                )


def ssh_command(host: Host, options: SshOptions, remote_argv: Sequence[str]) -> list[str]:
    """Return the argv of the ssh client that runs ``remote_argv`` on ``host``.

    ssh keeps the first value it sees of an option: BatchMode stands first because nobody is there
    to answer a prompt, our defaults stand last so that the user's own win. ``exec`` leaves no
    shell between ssh and the program.
    """
    argv = ["ssh", "-T", "-o", "BatchMode=yes"]
    for option in options.options:
        argv += ["-o", option]
    argv += ["-o", f"ConnectTimeout={options.connect_timeout_s}"]
    argv += ["-o", f"ServerAliveInterval={options.keepalive_s}", "-o", "ServerAliveCountMax=3"]
    if options.port is not None:
        argv += ["-p", str(options.port)]
    if options.identity is not None:
        argv += ["-i", options.identity]
    if host.user is not None:
        argv += ["-l", host.user]
    return [*argv, "--", host.name, f"exec {shlex.join(remote_argv)}"]


def explain_exit(host: Host | None, python: str, status: int, tail: Sequence[str]) -> str:
    """Say in one sentence why a started program ended.

    Args:
        host: where it ran; None for this machine.
        python: the interpreter it was started with.
        status: exit code, or minus the signal.
        tail: last lines of its stderr, without the host in front.
    """
    where = "this machine" if host is None else host.name
    said = " / ".join(tail) or "nothing"
    if status < 0:
        program = "the local program" if host is None else f"the ssh connection to {where}"
        return f"{program} was killed by signal {-status}; last words: {said}"
    if host is not None and status == _SSH_FAILED:
        return (
            f"ssh to {where} failed or its connection broke (exit code 255); ssh said: {said}; "
            f"try `ssh -o BatchMode=yes {host.destination} true`"
        )
    if host is not None and status in (_NOT_EXECUTABLE, _NOT_FOUND):
        return (
            f"{where} cannot run the Python interpreter {python} (exit code {status}); its shell "
            f"said: {said}; --python names the interpreter on the hosts"
        )
    return f"the program on {where} ended with exit code {status}; last words: {said}"


def start_process(
    host: Host | None,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: str,
    first_line: bytes,
    python: str,
    ssh: SshOptions,
    on_stderr: LineCallback,
    on_stdout: LineCallback | None = None,
    dies_with_us: bool = True,
) -> RemoteProcess:
    """Start ``python *argv`` on a host and return at once.

    Call it from a thread that lives as long as the program may, best the main thread: a local
    program is killed when the thread that started it ends.

    Args:
        host: where; None starts it on this machine, without ssh and otherwise alike.
        argv: arguments of the interpreter, such as ``["-m", "package.module"]``.
        environment: added to what the program would have anyway; arrives byte for byte.
        cwd: working directory on that host; it must exist there.
        first_line: the first line that the program reads from its stdin; secrets go here.
        python: path of the interpreter on that host.
        ssh: how to connect; not looked at for this machine.
        on_stderr: gets each line of stderr with the host's name in front.
        on_stdout: gets each line of stdout as it is; None treats stdout like stderr.
        dies_with_us: whether a local program is killed when the thread that started it ends.
            False is for one that watches its stdin, and has something to clean up.

    Raises:
        HostError: there is no ssh client here, or no such interpreter for a local program.
    """
    # Isolated mode: the bootstrap starts in the home directory and must not import from there.
    # UTF-8 mode: the environment's bytes must not depend on the locale over there.
    command = [python, "-I", "-X", "utf8", "-c", BOOTSTRAP]
    if host is not None:
        command = ssh_command(host, ssh, command)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C on the terminal is the launcher's to handle
        )
    except OSError as error:
        what = "python" if host is None else "the ssh client"
        raise HostError(
            f"cannot start {what} {command[0]!r} on this machine: {error.strerror}"
        ) from error
    started = RemoteProcess(host, python, process, on_stderr, on_stdout)
    request = {
        "parent": os.getpid() if host is None and dies_with_us else 0,
        "cwd": cwd,
        "environment": dict(environment),
        "argv": list(argv),
    }
    started.send_line(json.dumps(request).encode())
    started.send_line(first_line)
    return started


class RemoteProcess:
    """One started program: its lifeline, its last words, its end. Made by ``start_process``.

    For a host it stands for the ssh client, whose end is the end of the connection and, with
    stdin as lifeline, of the program. It only ever signals the one process that it started.
    """

    def __init__(
        self,
        host: Host | None,
        python: str,
        process: subprocess.Popen[bytes],
        on_stderr: LineCallback,
        on_stdout: LineCallback | None,
    ) -> None:
        self.host = host
        self.name = "localhost" if host is None else host.name
        self._python = python
        self._process = process
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

        def from_stderr(line: str) -> None:
            self._tail.append(line)
            on_stderr(f"{self.name}: {line}")

        self._threads = [
            self._thread("stdin", _write_lines, process.stdin, self._outgoing),
            self._thread("stdout", _read_lines, process.stdout, on_stdout or from_stderr),
            self._thread("stderr", _read_lines, process.stderr, from_stderr),
        ]

    @property
    def pid(self) -> int:
        """Process id on this machine: of the program itself, or of its ssh client."""
        return self._process.pid

    def send_line(self, line: bytes) -> None:
        """Queue one line, without its end, for the program's stdin; never blocks or fails."""
        assert b"\n" not in line
        self._outgoing.put(line + b"\n")

    def close_stdin(self) -> None:
        """Cut the lifeline after what is queued; the program reads end-of-file."""
        self._outgoing.put(None)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end and for the last lines; None if it still runs after ``timeout_s``."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self.close_stdin()
        drained = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            thread.join(max(0.0, drained - time.monotonic()))
        return status

    def terminate(self) -> None:
        """Ask the started process to end (SIGTERM); nothing if it is gone."""
        self._process.terminate()

    def kill(self) -> None:
        """End the started process (SIGKILL); nothing if it is gone."""
        self._process.kill()

    def last_words(self) -> tuple[str, ...]:
        """Return the last lines of its stderr, oldest first."""
        return tuple(self._tail)

    def exit_reason(self) -> str:
        """Say in one sentence why it ended; call it after ``wait`` has returned a status."""
        assert self._process.returncode is not None
        return explain_exit(self.host, self._python, self._process.returncode, self.last_words())

    def _thread(self, stream: str, target: Callable[..., None], *args: object) -> threading.Thread:
        name = f"{stream}-{self.name}"
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread


def _write_lines(pipe: IO[bytes], outgoing: SimpleQueue[bytes | None]) -> None:
    # A broken pipe is no news: the exit code and the last words tell why the reader is gone.
    with suppress(BrokenPipeError), pipe:
        while (line := outgoing.get()) is not None:
            pipe.write(line)
            pipe.flush()


def _read_lines(pipe: IO[bytes], on_line: LineCallback) -> None:
    with pipe:
        for line in iter(lambda: pipe.readline(_LONGEST_LINE_BYTES), b""):
            on_line(line.decode("utf-8", "replace").rstrip("\r\n"))
