"""Real hosts on one computer: each with its own address, ssh server and cable to one switch.

::

    with cluster_of("launch", "node1", "node2", directory=tmp_path / "cluster") as cluster:
        cluster["launch"].run(["ssh", "node1", "hostname"])
        cluster["node2"].cut()

Every host resolves every name and may log in everywhere as root with the cluster's own key: plain
``ssh node1`` works, as on a cluster that somebody has set up. Starts nothing but sshd.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.namespaces import Machine
from cluster.ssh import SshFiles
from waiting import wait_until

__all__ = ["Cluster", "Host", "cluster_of"]

_BRIDGE = "bridge0"
_CABLE = "eth0"  # the host's end; the switch's end is named by its port number
_HELD_BACK_MS = 200  # what a throttled cable holds before it drops


class Host(Machine):
    """A machine with a cable to the switch and an ssh server.

    Args:
        address: its own, as all hosts of the cluster know it.
        port: name of the switch's end of its cable.
    """

    def __init__(
        self, name: str, *, address: str, port: str, switch: Machine, ssh: SshFiles, log: Path,
        mounts: Mapping[Path, Path],
    ) -> None:  # fmt: skip
        program = ssh.sshd(name)
        super().__init__(name, program=program, log=log, mounts={**ssh.mounts(), **mounts})
        self.address = address
        self._port = port
        self._switch = switch
        self._log = log

    def plug_in(self) -> None:
        """Lay the cable, switch it on, and start the ssh server."""
        port, switch = self._port, self._switch
        cable = f"link add {port} type veth peer name {_CABLE} netns {self.pid}"
        switch.configure("ip", "-batch", "-", text=f"{cable}\nlink set {port} master {_BRIDGE} up")
        address = f"address add {self.address}/24 dev {_CABLE}"
        self.configure("ip", "-batch", "-", text=f"{address}\nlink set {_CABLE} up")
        self.boot()
        wait_until(lambda: "Server listening" in self._log.read_text(), what=f"sshd on {self.name}")

    def cut(self) -> None:
        """Pull the cable out: packets vanish both ways, open connections hang."""
        self._switch.configure("ip", "link", "set", self._port, "down")

    def restore(self) -> None:
        """Put the cable back."""
        self._switch.configure("ip", "link", "set", self._port, "up")

    def cut_for(self, seconds: float) -> None:
        """Pull the cable out and put it back after this time, which is what a test is about."""
        self.cut()
        time.sleep(seconds)
        self.restore()

    def block(self, other: Host) -> None:
        """Drop what this host sends to one other; what comes from there still arrives."""
        self.configure("ip", "route", "add", "blackhole", f"{other.address}/32")

    def unblock(self, other: Host) -> None:
        """Let through what this host sends to the other."""
        self.configure("ip", "route", "delete", "blackhole", f"{other.address}/32")

    def throttle(self, rate_bytes_per_s: int) -> None:
        """Make the cable slow, the same rate each way; the latest call counts."""
        burst_bytes = max(16_384, rate_bytes_per_s // 50)
        shape = ("tbf", "rate", f"{rate_bytes_per_s}bps", "burst", str(burst_bytes))
        limit = ("latency", f"{_HELD_BACK_MS}ms")
        self._switch.configure("tc", "qdisc", "replace", "dev", self._port, "root", *shape, *limit)
        self.configure("tc", "qdisc", "replace", "dev", _CABLE, "root", *shape, *limit)


class Cluster(dict[str, Host]):
    """The hosts that are up, by name."""

    def __init__(self, directory: Path, private: Path | None) -> None:
        super().__init__()
        self._directory = directory
        self._private = private

    def seen_by(self, name: str, path: Path) -> Path:
        """Return where this computer finds what a host sees at ``path`` in ``private``."""
        assert self._private is not None, "the hosts share all files"
        return self._directory / "private" / name / path.relative_to(self._private)


@contextmanager
def cluster_of(*names: str, directory: Path, private: Path | None = None) -> Generator[Cluster]:
    """Run hosts of these names; afterwards nothing is left of them but files in ``directory``.

    Args:
        names: what ``hostname`` says on each, and what all others call it.
        directory: made for keys, configuration and logs.
        private: an existing directory that each host has for itself, empty at first; without it
            the hosts share all files, as over NFS.

    Raises:
        RuntimeError: a host could not be set up.
        TimeoutError: its ssh server does not listen.
    """
    directory.mkdir()
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
    ssh = SshFiles(directory / "ssh", addresses)
    ssh.write()
    cluster = Cluster(directory, private)
    with ExitStack() as closing:
        log = directory / "switch.log"
        switch = Machine("switch", program=["sleep", "infinity"], log=log, mounts={})
        closing.callback(switch.close)
        switch.configure("ip", "link", "add", _BRIDGE, "up", "type", "bridge")
        switch.boot()
        for number, (name, address) in enumerate(addresses.items()):
            mounts: dict[Path, Path] = {}
            if private is not None:
                mounts[private] = cluster.seen_by(name, private)
                mounts[private].mkdir(parents=True)
            log = directory / f"{name}.log"
            cluster[name] = Host(
                name, address=address, port=f"port{number}", switch=switch, ssh=ssh, log=log,
                mounts=mounts,
            )  # fmt: skip
            closing.callback(cluster[name].close)
            cluster[name].plug_in()
        yield cluster
