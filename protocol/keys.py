"""Who may talk to us: key pairs, and the list of keys that are let in under which names.

Holds no socket of ours and sets no options; ``sockets.py`` asks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

__all__ = ["ZAP_DOMAIN", "Authority", "KeyPair"]

ZAP_DOMAIN = "spectrain"
"""The name under which a server's socket asks the authority of its context (ZeroMQ RFC 27)."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85, 40 characters each; the secret stays out of every ``repr``."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make a pair from the system's randomness."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Authority:
    """Which keys may connect to the servers of one context, and under which names.

    A key stands for an identity and what lies below it: with "agent/0" a peer may call itself
    ``agent/0`` or ``agent/0/log`` but not ``agent/01``; with "worker/" any ``worker/...``.

    Runs a thread until ``close``; there can be one for each context. Keys may be added at any
    time from any thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: dict[str, str]) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which only servers need

        self._identities = dict(allowed)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def allow(self, public_key: str, identity: str) -> None:
        """Let the holder of this key connect as ``identity`` or a name below it."""
        self._identities[public_key] = identity

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq's signature
        """Answer the authenticator's thread: may this key (Z85) connect at all?"""
        return key.decode() in self._identities

    def permits(self, public_key: str, identity: str) -> bool:
        """Tell whether the holder of this key may call itself ``identity``."""
        allowed = self._identities.get(public_key)
        if allowed is None:
            return False
        return identity == allowed or identity.startswith(allowed.rstrip("/") + "/")

    def close(self) -> None:
        """End the thread; from then on no new peer is let in."""
        self._authenticator.stop()
