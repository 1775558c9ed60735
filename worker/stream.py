"""A stream: parcels in order, exactly once, from one worker to a neighbour. Knows no layers.

Each end has a thread of its own, which alone touches the end's ZeroMQ socket and its link. A
parcel is announced by message and its tensors follow on the link, so the receiver has exactly
the right room before anything comes::

    sender                                receiver
    StreamHello(generation, address)  ──▶  checks who it is
                                      ◀──  StreamWelcome(address, position)
                  both build the link of this generation
    Announce(op, boundary, position)  ──▶  waits until it has room
    tensors                           ══▶

An end that fails remembers why, and whoever waits for it is told at once. ``connect`` and
``expect`` with a new generation start afresh: parcels are kept until the peer has them, and the
receiver's position says which those are. Deadlines are those of ``take`` and ``put``, where the
stage itself waits; the threads wait for as long as it does.
"""

from __future__ import annotations

from .receiving_stream import ReceivingStream
from .sending_stream import SendingStream

__all__ = ["ReceivingStream", "SendingStream"]
