"""Finds out which host is this one, and by which address others reach it. Sends nothing."""

from __future__ import annotations

import socket

from ..protocol.errors import HostError
from .hosts import Host

__all__ = ["address_towards", "bracketed", "is_loopback_address", "is_this_machine"]

_ANY_PORT = 9  # a datagram socket is only connected, so that the kernel picks a route


def address_towards(name: str) -> str:
    """Return this host's own numeric address on the way to ``name``.

    Raises:
        HostError: the name is unknown here, or there is no route.
    """
    try:
        family, kind, protocol, _, peer = socket.getaddrinfo(
            name, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HostError(
            f"cannot tell by which address {name} reaches this machine: {error}. "
            "--bind ADDRESS names it"
        ) from error


def is_loopback_address(address: str) -> bool:
    """Tell whether only this host itself can reach ``address``."""
    return address == "::1" or address.startswith("127.")


def is_this_machine(host: Host) -> bool:
    """Tell whether ``host`` needs no ssh: it is this machine, as the user who asks."""
    own = socket.gethostname().lower()
    is_own_name = host.name.lower() in {own, own.partition(".")[0]}
    return host.is_loopback or (is_own_name and host.user is None)


def bracketed(address: str) -> str:
    """Return the address as an endpoint holds it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
