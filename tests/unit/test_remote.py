"""Starting programs over ssh and here: what travels how, and that nothing outlives its launcher."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from fake_ssh import FakeSsh
from waiting import wait_until

from spectrain.launch.hosts import Host
from spectrain.launch.remote import (
    BOOTSTRAP,
    RemoteProcess,
    SshOptions,
    explain_exit,
    ssh_command,
    start_process,
)
from spectrain.protocol.errors import HostError, SettingsError

NODE = Host("node1")
HERE_AND_THERE = pytest.mark.parametrize("host", [None, NODE], ids=["local", "ssh"])
TIMEOUT_S = 20.0

ECHO = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
print("end of file", flush=True)
"""
SLEEP = "import signal; print('up', flush=True); signal.pause()"


class Lines:
    """Collects lines from reader threads; ``next`` waits for one."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[str] = SimpleQueue()

    def __call__(self, line: str) -> None:
        self.queue.put(line)

    def next(self) -> str:
        return self.queue.get(timeout=TIMEOUT_S)

    def rest(self) -> list[str]:
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


def start(
    host: Host | None,
    program: str,
    *,
    environment: dict[str, str] | None = None,
    cwd: str = "/",
    first_line: bytes = b"hello",
    python: str = sys.executable,
    out: Lines | None = None,
    err: Lines | None = None,
) -> RemoteProcess:
    return start_process(
        host,
        ["-c", program],
        environment=environment or {},
        cwd=cwd,
        first_line=first_line,
        python=python,
        ssh=SshOptions(),
        on_stdout=out,
        on_stderr=err or Lines(),
    )


# -- the ssh command ----------------------------------------------------------------------------


def test_ssh_never_prompts_whatever_the_user_asks_for() -> None:
    options = SshOptions(options=("BatchMode=no",))
    argv = ssh_command(NODE, options, ["true"])
    assert argv.index("BatchMode=yes") < argv.index("BatchMode=no")


def test_options_of_the_user_stand_before_our_defaults() -> None:
    options = SshOptions(options=("ConnectTimeout=60", "StrictHostKeyChecking=accept-new"))
    argv = ssh_command(NODE, options, ["true"])
    assert argv.index("ConnectTimeout=60") < argv.index("ConnectTimeout=10")
    assert argv[argv.index("StrictHostKeyChecking=accept-new") - 1] == "-o"


def test_ssh_notices_a_dead_host() -> None:
    argv = ssh_command(NODE, SshOptions(connect_timeout_s=7, keepalive_s=3), ["true"])
    assert {"ConnectTimeout=7", "ServerAliveInterval=3", "ServerAliveCountMax=3"} <= set(argv)


def test_port_identity_and_user_are_given_to_ssh() -> None:
    host = Host("fe80::1", user="ada")
    argv = ssh_command(host, SshOptions(port=2222, identity="/keys/my key"), ["true"])
    joined = " ".join(argv)
    assert "-p 2222 -i /keys/my key -l ada -- fe80::1 exec true" in joined


def test_nothing_is_given_that_the_user_left_to_the_ssh_config() -> None:
    argv = ssh_command(NODE, SshOptions(), ["true"])
    assert not {"-p", "-i", "-l"} & set(argv)


def test_no_option_of_ssh_can_follow_the_double_dash() -> None:
    argv = ssh_command(NODE, SshOptions(), ["true"])
    assert argv[-3:] == ["--", "node1", "exec true"]


def test_the_remote_shell_gets_each_argument_whole() -> None:
    remote = ["/opt/my python", "-c", "print($HOME; '\"')", "a\nb"]
    command = ssh_command(NODE, SshOptions(), remote)[-1]
    assert shlex.split(command) == ["exec", *remote]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(SettingsError, match=rf"--ssh-port {port}: a port is a number from 1"):
        SshOptions(port=port)


@pytest.mark.parametrize("option", ["", "-4", "=yes", "Compression", "Compression="])
def test_an_ssh_option_without_name_and_value_is_refused(option: str) -> None:
    with pytest.raises(SettingsError, match="expected Name=value"):
        SshOptions(options=(option,))


# -- the bootstrap ------------------------------------------------------------------------------


def test_the_bootstrap_survives_every_login_shell() -> None:
    assert not set("\n'!") & set(BOOTSTRAP)


def bootstrap(first_line: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-I", "-c", BOOTSTRAP],
        input=first_line,
        capture_output=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def test_the_bootstrap_ends_when_nothing_comes() -> None:
    done = bootstrap(b"")
    assert (done.returncode, done.stderr) == (1, b"spectrain: nothing to start\n")


def test_the_bootstrap_ends_when_its_launcher_is_already_gone() -> None:
    request = {"parent": 1, "cwd": "/", "environment": {}, "argv": ["-c", "print(1)"]}
    done = bootstrap(json.dumps(request).encode() + b"\n")
    assert done.returncode == 1
    assert done.stderr == b"spectrain: the process that started this one is gone\n"
    assert done.stdout == b""


def test_the_bootstrap_leaves_what_follows_its_line_to_the_program() -> None:
    program = "import sys; print(sys.stdin.read())"
    request = {"parent": 0, "cwd": "/", "environment": {}, "argv": ["-c", program]}
    done = bootstrap(json.dumps(request).encode() + b"\nfirst\nsecond\n")
    assert done.stdout == b"first\nsecond\n\n"


def test_a_module_in_the_home_directory_cannot_stand_in_for_ours(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    out = Lines()
    process = start(NODE, "print('fine')", out=out)
    assert process.wait(TIMEOUT_S) == 0, process.last_words()
    assert out.next() == "fine"


# -- what travels -------------------------------------------------------------------------------


@HERE_AND_THERE
def test_the_environment_arrives_byte_for_byte(host: Host | None, ssh: FakeSsh) -> None:
    values = {
        "QUOTES": """it's "quoted" `here` """,
        "SHELL_WORDS": "$HOME ${PATH} $(id); rm -rf x & | > < * ? ~ # !",
        "LINES": "one\ntwo\r\n\tthree\\n",
        "NOT_UTF8": os.fsdecode(b"\xff\xfe caf\xe9"),
        "UMLAUTS": "größer ∑",
        "EMPTY": "",
    }
    out = Lines()
    program = f"import os; print({{n: os.environb[n.encode()].hex() for n in {list(values)}}})"
    process = start(host, program, environment=values, out=out)
    assert process.wait(TIMEOUT_S) == 0, process.last_words()
    assert out.next() == str({name: os.fsencode(value).hex() for name, value in values.items()})


@HERE_AND_THERE
def test_the_first_line_arrives_and_later_ones_follow_in_order(
    host: Host | None, ssh: FakeSsh
) -> None:
    out = Lines()
    process = start(host, ECHO, first_line=b'{"key": "value"}', out=out)
    process.send_line(b"second")
    process.send_line(b"third")
    assert [out.next(), out.next(), out.next()] == ['{"key": "value"}', "second", "third"]
    process.close_stdin()
    assert out.next() == "end of file"
    assert process.wait(TIMEOUT_S) == 0


def test_secrets_are_on_no_command_line(ssh: FakeSsh) -> None:
    out = Lines()
    process = start(
        NODE, ECHO, environment={"API_KEY": "s3cret"}, first_line=b"curve-s3cret", out=out
    )
    assert out.next() == "curve-s3cret"
    argv = " ".join(ssh.argv())
    program = psutil.Process(process.pid)
    assert "s3cret" not in argv + " ".join(program.cmdline())
    process.close_stdin()
    assert process.wait(TIMEOUT_S) == 0


@HERE_AND_THERE
def test_a_line_longer_than_any_pipe_buffer_does_not_block_the_sender(
    host: Host | None, ssh: FakeSsh
) -> None:
    out = Lines()
    program = "import sys; print(len(sys.stdin.readline()))"
    process = start(host, program, first_line=b"x" * 3_000_000, out=out)
    assert process.wait(TIMEOUT_S) == 0, process.last_words()
    assert out.next() == "3000001"


@HERE_AND_THERE
def test_the_program_runs_in_the_given_directory(
    host: Host | None, ssh: FakeSsh, tmp_path: Path
) -> None:
    out = Lines()
    process = start(host, "import os; print(os.getcwd())", cwd=str(tmp_path), out=out)
    assert process.wait(TIMEOUT_S) == 0
    assert out.next() == str(tmp_path.resolve())


@HERE_AND_THERE
def test_a_missing_directory_is_named(host: Host | None, ssh: FakeSsh, tmp_path: Path) -> None:
    process = start(host, "print(1)", cwd=str(tmp_path / "gone"))
    assert process.wait(TIMEOUT_S) == 1
    assert f"the working directory {tmp_path}/gone does not exist here" in process.exit_reason()


def test_a_local_program_also_has_what_its_launcher_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHER", "yes")
    out = Lines()
    process = start(None, "import os; print(os.environ['OF_THE_LAUNCHER'])", out=out)
    assert process.wait(TIMEOUT_S) == 0
    assert out.next() == "yes"


# -- what comes back ----------------------------------------------------------------------------


def test_stderr_lines_carry_the_host_and_stdout_lines_do_not(ssh: FakeSsh) -> None:
    out, err = Lines(), Lines()
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr)"
    process = start(NODE, program, out=out, err=err)
    assert process.wait(TIMEOUT_S) == 0
    assert out.rest() == ["to stdout"]
    assert err.rest() == ["node1: to stderr"]
    assert process.last_words() == ("to stderr",)


def test_stdout_is_treated_like_stderr_where_nobody_wants_it() -> None:
    err = Lines()
    process = start(None, "print('to stdout')", err=err)
    assert process.wait(TIMEOUT_S) == 0
    assert err.rest() == ["localhost: to stdout"]


def test_bytes_that_are_no_text_and_a_missing_last_newline_come_through() -> None:
    err = Lines()
    process = start(None, r"import os; os.write(2, b'caf\xe9\r\nlast')", err=err)
    assert process.wait(TIMEOUT_S) == 0
    assert err.rest() == ["localhost: caf\ufffd", "localhost: last"]


def test_only_the_last_lines_are_kept() -> None:
    process = start(None, "import sys; [print(n, file=sys.stderr) for n in range(100)]")
    assert process.wait(TIMEOUT_S) == 0
    assert process.last_words() == tuple(str(number) for number in range(80, 100))


def test_threads_are_named_after_stream_and_host(ssh: FakeSsh) -> None:
    out = Lines()
    process = start(NODE, SLEEP, out=out)
    assert out.next() == "up"
    names = {thread.name for thread in threading.enumerate()}
    assert {"stdin-node1", "stdout-node1", "stderr-node1"} <= names
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL


# -- the end ------------------------------------------------------------------------------------


def test_poll_and_wait_tell_whether_it_runs() -> None:
    out = Lines()
    process = start(None, "input(); import sys; sys.exit(input())", out=out)
    assert process.poll() is None
    assert process.wait(0.01) is None
    process.send_line(b"bye")
    assert process.wait(TIMEOUT_S) == 1
    assert process.poll() == 1
    assert process.last_words() == ("bye",)


def test_terminate_asks_and_kill_insists() -> None:
    out = Lines()
    stubborn = "import signal; signal.signal(15, lambda *_: print('no', flush=True)); "
    process = start(None, stubborn + "print('up', flush=True)\nwhile True: signal.pause()", out=out)
    assert out.next() == "up"
    process.terminate()
    assert out.next() == "no"
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    process.terminate()
    process.kill()


def test_sending_to_a_program_that_is_gone_harms_nobody() -> None:
    process = start(None, "pass")
    assert process.wait(TIMEOUT_S) == 0
    process.send_line(b"too late")
    process.close_stdin()
    other = start(
        None, "import os; os.close(0); print('up', flush=True)", first_line=b"x" * 100_000
    )
    assert other.wait(TIMEOUT_S) == 0


@HERE_AND_THERE
def test_a_ctrl_c_on_the_terminal_does_not_reach_it(host: Host | None, ssh: FakeSsh) -> None:
    out = Lines()
    process = start(host, SLEEP, out=out)
    assert out.next() == "up"
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    process.kill()
    assert process.wait(TIMEOUT_S) is not None


LAUNCHER = """
import sys
from spectrain.launch.hosts import Host
from spectrain.launch.remote import SshOptions, start_process
host = Host("node1") if sys.argv[1] == "ssh" else None
process = start_process(host, ["-c", sys.argv[2]], environment={}, cwd="/", first_line=b"",
    python=sys.executable, ssh=SshOptions(), on_stderr=print,
    on_stdout=lambda pid: print(pid, flush=True))
process.wait(60)
"""


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("local", "import os, signal; print(os.getpid(), flush=True); signal.pause()"),
        ("ssh", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"),
    ],
    ids=["by the kernel", "by the lifeline"],
)
def test_the_program_ends_when_its_launcher_is_killed(
    kind: str, program: str, ssh: FakeSsh
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, kind, program],
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        started = psutil.Process(pid).create_time()
        launcher.kill()

    def gone() -> bool:
        try:
            process = psutil.Process(pid)
            return process.create_time() != started or process.status() == "zombie"
        except psutil.NoSuchProcess:
            return True

    wait_until(gone, what="the program to end with its launcher", timeout_s=TIMEOUT_S)


# -- why it ended -------------------------------------------------------------------------------


def test_a_refused_connection_is_explained_with_the_words_of_ssh(ssh: FakeSsh) -> None:
    process = start(Host("refused", user="ada"), "print(1)")
    assert process.wait(TIMEOUT_S) == 255
    assert process.exit_reason() == (
        "ssh to refused failed or its connection broke (exit code 255); ssh said: ssh: connect to "
        "host refused port 22: Connection refused; try `ssh -o BatchMode=yes ada@refused true`"
    )


def test_a_missing_interpreter_is_reported_as_such(ssh: FakeSsh) -> None:
    process = start(NODE, "print(1)", python="/nowhere/python")
    assert process.wait(TIMEOUT_S) == 127
    reason = process.exit_reason()
    assert "node1 cannot run the Python interpreter /nowhere/python (exit code 127)" in reason
    assert "--python names the interpreter on the hosts" in reason


def test_a_death_by_signal_says_which_process_died() -> None:
    assert explain_exit(None, "python", -9, []) == (
        "the local program was killed by signal 9; last words: nothing"
    )
    assert explain_exit(NODE, "python", -15, ["a", "b"]) == (
        "the ssh connection to node1 was killed by signal 15; last words: a / b"
    )


def test_any_other_end_tells_code_and_last_words() -> None:
    assert explain_exit(NODE, "python", 3, ["oh"]) == (
        "the program on node1 ended with exit code 3; last words: oh"
    )
    assert explain_exit(None, "python", 127, []).startswith("the program on this machine ended")


def test_a_missing_ssh_client_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="cannot start the ssh client 'ssh' on this machine: No"):
        start(NODE, "print(1)")


def test_a_missing_local_interpreter_is_a_clear_error() -> None:
    with pytest.raises(HostError, match="cannot start python '/nowhere/python'"):
        start(None, "print(1)", python="/nowhere/python")
