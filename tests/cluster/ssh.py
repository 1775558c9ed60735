"""What sshd and ssh of the test hosts read: throw-away keys and configuration. Starts neither."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.namespaces import SEARCH_PATH

__all__ = ["SshFiles"]

# An account whose password is locked ("!") may not log in without PAM, not even by key.
_SHADOW = "root:*:19000:0:99999:7:::\n"


@dataclass(frozen=True)
class SshFiles:
    """Keys and configuration for some hosts, in one directory.

    Attributes:
        directory: holds all of it; private to root.
        addresses: the hosts, by name.
    """

    directory: Path
    addresses: Mapping[str, str]

    def write(self) -> None:
        """Make the keys and write every file."""
        self.directory.mkdir(mode=0o700)
        self.empty.mkdir()
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / key],
                check=True,
                stdin=subprocess.DEVNULL,
            )
        user_key = (self.directory / "user_key.pub").read_text()
        host_key = (self.directory / "host_key.pub").read_text()
        names = ",".join([*self.addresses, *self.addresses.values()])
        (self.directory / "authorized_keys").write_text(user_key)
        (self.directory / "known_hosts").write_text(f"{names} {host_key}")
        (self.directory / "ssh_config").write_text(self._client())
        (self.directory / "shadow").write_text(_SHADOW)
        (self.directory / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        )
        for name, address in self.addresses.items():
            self._sshd_config(name).write_text(self._server(address))

    @property
    def empty(self) -> Path:
        """An empty directory."""
        return self.directory / "empty"

    def mounts(self) -> dict[Path, Path]:
        """Return what each host must see instead of this computer's own files."""
        mounts = {
            Path("/etc/hosts"): self.directory / "hosts",
            Path("/etc/shadow"): self.directory / "shadow",
            Path("/etc/ssh/ssh_config"): self.directory / "ssh_config",
        }
        own_ssh = Path.home() / ".ssh"
        return {**mounts, own_ssh: self.empty} if own_ssh.is_dir() else mounts

    def sshd(self, name: str) -> list[str]:
        """Return the command of a host's ssh server; it stays in the foreground."""
        program = shutil.which("sshd", path=SEARCH_PATH)
        assert program is not None, "why_unavailable() was not asked"
        return [program, "-D", "-e", "-f", str(self._sshd_config(name))]

    def _sshd_config(self, name: str) -> Path:
        return self.directory / f"sshd_config.{name}"

    def _server(self, address: str) -> str:
        return f"""\
ListenAddress {address}
HostKey {self.directory}/host_key
AuthorizedKeysFile {self.directory}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
"""

    def _client(self) -> str:
        return f"""\
Host *
  User root
  IdentityFile {self.directory}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {self.directory}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""
