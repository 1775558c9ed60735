"""The test hosts behave like hosts: reachable by ssh, apart from one another, gone afterwards."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster.hosts import Cluster, Host, cluster_of
from cluster.namespaces import program_of
from waiting import wait_until

NAMES = ("launch", "node1", "node2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(*NAMES, directory=tmp_path / "cluster") as cluster:
        yield cluster


def reaches(origin: Host, target: Host) -> bool:
    connect = f"import socket; socket.create_connection(('{target.address}', 22), 1).close()"
    return origin.run([sys.executable, "-c", connect], check=False).returncode == 0


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def network_of_this_computer() -> list[str]:
    links = subprocess.run(["ip", "-brief", "link"], check=True, capture_output=True, text=True)
    named = Path("/run/netns"), Path("/etc/netns")
    return [
        *links.stdout.splitlines(),
        *(str(path) for folder in named for path in folder.glob("*")),
    ]


def test_every_host_logs_in_everywhere_by_name(cluster: Cluster) -> None:
    for origin, target in itertools.product(NAMES, NAMES):
        answer = cluster[origin].run(["ssh", "-o", "BatchMode=yes", target, "hostname"])
        assert answer.stdout == f"{target}\n"
        assert answer.stderr == ""


def test_ssh_forwards_input_status_and_errors(cluster: Cluster) -> None:
    command = ["ssh", "node1", "cat; echo no >&2; exit 7"]
    answer = cluster["launch"].run(command, text="a\nb", check=False)
    assert (answer.returncode, answer.stdout, answer.stderr) == (7, "a\nb", "no\n")


def test_a_command_that_fails_shows_what_it_wrote(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3: out\nerr\n"):
        cluster["node1"].run(["sh", "-c", "echo out; echo err >&2; exit 3"])


def test_hosts_have_their_own_shared_memory_and_process_numbers(cluster: Cluster) -> None:
    cluster["node1"].run(["touch", "/dev/shm/mine"])
    assert cluster["node1"].run(["ls", "/dev/shm"]).stdout == "mine\n"
    assert cluster["node2"].run(["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/mine").exists()
    pid = int(cluster["node1"].run(["sh", "-c", "echo $$"]).stdout)
    assert pid < 100


def test_a_cut_cable_isolates_one_host_until_it_is_restored(cluster: Cluster) -> None:
    launch, node1, node2 = (cluster[name] for name in NAMES)
    assert reaches(launch, node1)
    node1.cut()
    assert not reaches(launch, node1)
    assert not reaches(node1, launch)
    assert reaches(launch, node2)
    node1.restore()
    wait_until(lambda: reaches(launch, node1), what="node1 to be back", timeout_s=30)


def test_a_throttled_cable_delays_what_is_sent(cluster: Cluster) -> None:
    cluster["node1"].throttle(rate_bytes_per_s=128 * 1024)
    start = time.monotonic()
    answer = cluster["launch"].run(["ssh", "node1", "wc -c"], text="x" * 256 * 1024)
    assert answer.stdout == "262144\n"
    assert time.monotonic() - start > 1.5  # 240 KiB beyond the burst at 128 KiB/s; never less


def test_processes_lists_what_runs_on_that_host_only(cluster: Cluster, tmp_path: Path) -> None:
    door_keeper = cluster["node1"].start(["sleep", "60"], output=tmp_path / "log")
    program = program_of(door_keeper)
    wait_until(lambda: program.cmdline() == ["sleep", "60"], what="sleep")
    assert program in cluster["node1"].processes()
    assert program not in cluster["node2"].processes()
    program.kill()
    assert door_keeper.wait(timeout=10) == -9
    assert cluster["node1"].processes() == []


def test_an_orphan_is_reaped_by_its_host(cluster: Cluster) -> None:
    node1 = cluster["node1"]
    node1.run(["sh", "-c", "sleep 0.05 & exit"])
    wait_until(lambda: not node1.processes(), what="the orphan to end")
    states = node1.run(["ps", "-A", "-o", "stat="]).stdout.split()
    assert not any(state.startswith("Z") for state in states)


def test_a_private_directory_differs_from_host_to_host(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    with cluster_of("a", "b", directory=tmp_path / "cluster", private=private) as cluster:
        cluster["a"].run(["sh", "-c", f"echo written > {private}/file"])
        assert cluster["b"].run(["ls", str(private)]).stdout == ""
        assert cluster.seen_by("a", private / "file").read_text() == "written\n"
    assert list(private.iterdir()) == []


def test_nothing_is_left_of_a_cluster(tmp_path: Path) -> None:
    before = network_of_this_computer()
    with cluster_of("a", "b", directory=tmp_path / "cluster") as cluster:
        door_keeper = cluster["a"].start(["sleep", "60"], output=tmp_path / "log")
        program = program_of(door_keeper)
        assert network_of_this_computer() == before
    assert door_keeper.wait(timeout=10) == -9
    assert not program.is_running()
    assert not any(host.processes() for host in cluster.values())
    assert network_of_this_computer() == before


def test_a_host_that_cannot_be_set_up_takes_the_others_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    with (
        pytest.raises(RuntimeError, match=r"machine a did not start: mount: .*missing"),
        cluster_of("a", "b", directory=directory, private=tmp_path / "missing"),
    ):
        pytest.fail("a host came up without its private directory")


def test_hosts_die_with_the_tests_that_made_them(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from cluster.hosts import cluster_of
with cluster_of("a", directory=Path({str(tmp_path)!r}) / "cluster") as cluster:
    print(cluster["a"].pid, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        first = psutil.Process(int(tests.stdout.readline()))
        tests.kill()
    wait_until(lambda: is_over(first), what="the host to die", timeout_s=20)
