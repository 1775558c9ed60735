"""What it costs to move a payload from one process to another: a copy, raw links, a whole stream.

    python benchmarks/links.py [--rounds 5] [--json PATH]

Two processes. Each size is measured over every carrier in turn, round after round, so that a busy
machine disturbs all alike. A round trip is one message there and one back, over two links, as
between neighbours; one way is messages back to back until the peer has the last. CPU time and page
faults are for one message one way, in both processes together. Wires fill the same memory again and
again; a stream fills new memory for each parcel, as it must, and keeps a log that is trimmed
between rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import click
import torch
import zmq

from spectrain.protocol.messages import Peer
from spectrain.protocol.schedule import Kind, Op
from spectrain.worker.boundary import Parcel
from spectrain.worker.direct_wire import open_direct_wire
from spectrain.worker.gloo_wire import open_gloo_wire
from spectrain.worker.heap import keep_freed_memory
from spectrain.worker.link import Wire
from spectrain.worker.rendezvous import Exchange
from spectrain.worker.socket_wire import open_socket_wire
from spectrain.worker.stream import ReceivingStream, SendingStream

TIMES_BY_BYTES = {4 << 10: 1000, 64 << 10: 500, 1 << 20: 100, 8 << 20: 20, 64 << 20: 4}
"""Messages in one measurement, by their size."""

TIMEOUT_S = 60.0
WINDOW = 4
ANY_ADDRESS = "0.0.0.0"  # not a loopback, so that TCP is offered


class Carrier(Protocol):
    """One process's end of two links, one there and one back."""

    def load(self, size_bytes: int) -> None:
        """Get ready for messages of this size; none is under way."""
        ...

    def send(self) -> None: ...

    def receive(self) -> None: ...


class Copy:
    """The limit: one copy within a process for a send, and nothing for a receive."""

    def load(self, size_bytes: int) -> None:
        self._from = torch.ones(size_bytes, dtype=torch.uint8)
        self._to = torch.ones(size_bytes, dtype=torch.uint8)

    def send(self) -> None:
        self._to.copy_(self._from)

    def receive(self) -> None:
        """Have it already."""


class Wires:
    """Raw links."""

    def __init__(self, out: Wire, back: Wire) -> None:
        self._out, self._back = out, back

    def load(self, size_bytes: int) -> None:
        self._payload = torch.ones(size_bytes, dtype=torch.uint8)
        self._room = torch.ones(size_bytes, dtype=torch.uint8)

    def send(self) -> None:
        self._out.send([self._payload], TIMEOUT_S)

    def receive(self) -> None:
        self._back.receive([self._room], TIMEOUT_S)


class Streams:
    """Streams of gradients, which a stage hands over without a copy."""

    def __init__(self, out: SendingStream, back: ReceivingStream) -> None:
        self._out, self._back = out, back
        self._sent = self._received = 0

    def load(self, size_bytes: int) -> None:
        self._out.flush(TIMEOUT_S)
        self._out.trim(self._sent)
        self._back.trim(self._received)
        self._payload = torch.ones(size_bytes // 4)

    def send(self) -> None:
        self._out.put(Parcel(Op(Kind.BACKWARD, self._sent), self._payload, 1, 1))
        self._sent += 1

    def receive(self) -> None:
        self._back.take(Op(Kind.BACKWARD, self._received))
        self._received += 1


# -- both processes -----------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one measurement, for a message: wall clock, processors, and pages of new memory."""

    time_s: float
    cpu_s: float
    faults: float


def open_carriers(
    side: int, peer: Connection, ipc_dir: Path, cleanup: ExitStack
) -> dict[str, Carrier]:
    """Open all carriers while the other side does."""

    def exchange(own: bytes) -> bytes:
        peer.send_bytes(own)
        return peer.recv_bytes()

    def exchange_without_unix(own: bytes) -> bytes:
        token, _, *network = exchange(own).decode().split() or ("", "")
        return " ".join((token, "nobody", *network)).encode()  # no such name

    def wires(open_wire: Callable[..., Wire], exchange: Exchange, address: str) -> Wires:
        ends = [
            open_wire(side ^ way, address=address, exchange=exchange, timeout_s=TIMEOUT_S)
            for way in (0, 1)
        ]
        for end in ends:
            cleanup.callback(end.close)
        return Wires(ends[side], ends[1 - side])

    return {
        "memcpy": Copy(),
        "direct": wires(open_direct_wire, exchange, "127.0.0.1"),
        "unix socket": wires(open_socket_wire, exchange, "127.0.0.1"),
        "tcp": wires(open_socket_wire, exchange_without_unix, ANY_ADDRESS),
        "gloo": wires(open_gloo_wire, exchange, "127.0.0.1"),
        "stream": open_streams(side, peer, ipc_dir, cleanup),
    }


def open_streams(side: int, peer: Connection, ipc_dir: Path, cleanup: ExitStack) -> Streams:
    common = {
        "context": cleanup.enter_context(zmq.Context()),
        "run_id": bytes(16),
        "stage": side,
        "incarnation": 0,
        "address": "127.0.0.1",
        "keys": None,
        "device": torch.device("cpu"),
        "window": WINDOW,
        "wait_timeout_s": TIMEOUT_S,
        "epoch_batches": 1 << 30,
        "backend": "direct",
        "on_link_lost": str,  # at the end one side is gone before the other
        "on_fault": print,
    }
    names = ("activations", "gradients")
    back = ReceivingStream(
        names[1 - side], ipc_dir=ipc_dir, authority=None, is_wanted=bool, **common
    )
    out = SendingStream(names[side], log_bytes=8 << 30, least_parcels=1, **common)
    peer.send(back.endpoint)
    neighbour = Peer(stage=1 - side, incarnation=0, endpoint=peer.recv(), public_key="")
    back.expect(1, neighbour)
    out.connect(1, neighbour)
    cleanup.callback(back.close)
    cleanup.callback(out.close)
    out.wait_connected(TIMEOUT_S)
    back.wait_connected(TIMEOUT_S)
    return Streams(out, back)


def exchange_messages(carrier: Carrier, side: int, times: int) -> None:
    turn = (carrier.send, carrier.receive)
    for _ in range(times):
        turn[side]()
        turn[1 - side]()


def pass_on_messages(carrier: Carrier, side: int, times: int) -> None:
    act = carrier.receive if side else carrier.send
    for _ in range(times):
        act()


MEASURED = {"round trip": exchange_messages, "one way": pass_on_messages}


def measure(carrier: Carrier, side: int, peer: Connection, what: str, size_bytes: int) -> Cost:
    """Carry messages of this size; return what each cost on this side."""
    times = TIMES_BY_BYTES[size_bytes]
    carrier.load(size_bytes)
    exchange_messages(carrier, side, 2)  # whatever is slow the first time
    meet(peer)
    start_s, start_cpu_s, start_faults = time.perf_counter(), time.process_time(), page_faults()
    MEASURED[what](carrier, side, times)
    cpu_s, faults = time.process_time() - start_cpu_s, page_faults() - start_faults
    meet(peer)  # both are through
    return Cost((time.perf_counter() - start_s) / times, cpu_s / times, faults / times)


def meet(peer: Connection) -> None:
    peer.send(None)
    peer.recv()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def serve(peer: Connection, ipc_dir: Path) -> None:
    """Be the other process: take part in what is measured until told to stop."""
    with ExitStack() as cleanup:
        carriers = open_carriers(1, peer, ipc_dir, cleanup)
        while order := peer.recv():
            name, what, size_bytes = order
            peer.send(measure(carriers[name], 1, peer, what, size_bytes))


# -- the process that reports -------------------------------------------------------------------

Costs = dict[int, dict[str, dict[str, list[Cost]]]]
"""By size, carrier, and what was measured; one for each round, of both sides together."""


def measure_all(peer: Connection, ipc_dir: Path, rounds: int) -> Costs:
    with ExitStack() as cleanup:
        carriers = open_carriers(0, peer, ipc_dir, cleanup)
        costs: Costs = {
            size_bytes: {name: {what: [] for what in MEASURED} for name in carriers}
            for size_bytes in TIMES_BY_BYTES
        }
        for size_bytes, _, name, what in product(TIMES_BY_BYTES, range(rounds), carriers, MEASURED):
            peer.send((name, what, size_bytes))
            ours = measure(carriers[name], 0, peer, what, size_bytes)
            theirs: Cost = peer.recv()
            both = Cost(ours.time_s, ours.cpu_s + theirs.cpu_s, ours.faults + theirs.faults)
            costs[size_bytes][name][what].append(both)
        peer.send(None)
    return costs


def show(costs: Costs) -> None:
    print(
        "| size | carrier | round trip, us | one way, us | GB/s | CPU, us | page faults |\n"
        "|---|---|---|---|---|---|---|"
    )
    for size_bytes, by_carrier in costs.items():
        for name, measured in by_carrier.items():
            one_way = measured["one way"]
            rate = size_bytes / statistics.median(cost.time_s for cost in one_way) / 1e9
            cells = (
                name_of(size_bytes),
                name,
                spread([1e6 * cost.time_s for cost in measured["round trip"]]),
                spread([1e6 * cost.time_s for cost in one_way]),
                f"{rate:.2f}",
                spread([1e6 * cost.cpu_s for cost in one_way]),
                f"{statistics.median(cost.faults for cost in one_way):.0f}",
            )
            print(f"| {' | '.join(cells)} |")
    print("\nA stream's rate over that of its raw link, round by round (target: at least 0.90):\n")
    for size_bytes, by_carrier in costs.items():
        pairs = zip(by_carrier["direct"]["one way"], by_carrier["stream"]["one way"], strict=True)
        shares = [raw.time_s / whole.time_s for raw, whole in pairs]
        print(f"- {name_of(size_bytes)}: {spread(shares, 2)}")


def spread(values: list[float], digits: int = 0) -> str:
    """Return the median, and the least and greatest."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def name_of(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KB"


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all costs here.")
def main(rounds: int, json_path: Path | None) -> None:
    """Print a table, and how near a stream comes to its link."""
    keep_freed_memory()  # as in a worker
    torch.set_num_threads(1)
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="spectrain-links-") as folder:
        # Forked, like a worker: torch is imported, and no thread has been started.
        other = multiprocessing.get_context("fork").Process(
            target=serve, args=(theirs, Path(folder))
        )
        other.start()
        costs = measure_all(ours, Path(folder), rounds)
        other.join()
    show(costs)
    if json_path is not None:
        plain = {
            str(size_bytes): {
                name: {what: [cost._asdict() for cost in each] for what, each in measured.items()}
                for name, measured in by_carrier.items()
            }
            for size_bytes, by_carrier in costs.items()
        }
        json_path.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
