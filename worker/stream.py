"""A stream: parcels in order, exactly once, from one worker to a neighbour. Knows no layers.

Each end has a thread of its own, which alone touches the end's ZeroMQ socket. A parcel is
announced and its tensors follow on the link, so the receiver has exactly the right room before
they come. The announcement goes by message where the link carries nothing but tensors (NCCL),
else on the link itself; then the sending stage's own thread sends what needs no waiting::

    sender                                receiver
    StreamHello(generation, number)   ──▶  checks who it is
                                      ◀──  StreamWelcome(position, digests)
                  both build the link of this generation
    Announce(op, boundary, number)    ──▶  waits until it has room
    tensors                           ══▶

Links break when a process at one end dies. That is nobody's fault here: the stage goes on
waiting in ``take`` or ``put``, and ``expect`` and ``connect`` build the link of the next
generation, maybe with a neighbour in a new incarnation. Then the receiver's position is the only
truth: it needs the parcels from that number on, and no other. The sender keeps what it sent until
it is trimmed, so a restarted receiver gets again what its former self lost. A restarted sender
makes its parcels anew, with their old numbers; those the receiver has are not sent, but digests
show whether they are the same.

Deadlines are those of ``take`` and ``put``, where the stage itself waits, and count only while
the link stands; the threads wait for as long as it does.
"""

from __future__ import annotations

from .receiving_stream import ReceivingStream
from .sending_stream import SendingStream

__all__ = ["ReceivingStream", "SendingStream"]
