"""What a stream delivers when its ends die, come back with what a snapshot held, and die again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from links import BACKENDS_ON_CPU, in_background, stream_pair
from resumable import PARCEL_BYTES, op, parcel, resumable_stream
from waiting import wait_until

from spectrain.protocol.errors import DeadlineError, ReplayMismatchError
from spectrain.worker import receiving_stream as receiving_module
from spectrain.worker import sending_stream as sending_module
from spectrain.worker.boundary import Parcel
from spectrain.worker.link import Link


@pytest.fixture(params=BACKENDS_ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def forwards(start: int, stop: int) -> list[str]:
    return [f"F{batch}" for batch in range(start, stop)]


# -- a receiver that comes back -----------------------------------------------------------------


def test_a_restarted_receiver_gets_what_it_needs_and_nothing_before(
    tmp_path: Path, backend: str
) -> None:
    with resumable_stream(tmp_path, backend=backend) as stream:
        stream.put(*forwards(0, 7))
        assert stream.take(*forwards(0, 5)) == [0, 1, 2, 3, 4]
        stream.receiver.close()
        stream.start_receiver(3)
        stream.connect()
        stream.put("F7")
        assert stream.take(*forwards(3, 8)) == [3, 4, 5, 6, 7]
        assert not stream.receiver.ready(op("F2"))
        assert stream.sender.suppressed == 0


def test_a_restarted_receiver_throws_away_what_it_does_not_want(tmp_path: Path) -> None:
    with resumable_stream(tmp_path, window=2) as stream:
        stream.receiver.close()
        stream.start_receiver(1, is_wanted=lambda each: str(each)[0] == "F")
        stream.connect()
        stream.put("F0", "F1", "E0.0", "E0.1", "E0.2", "F2", "F3")
        assert stream.take("F1", "F2", "F3") == [1, 5, 6]
        assert stream.receiver.discarded == 3


def test_parcels_that_were_here_but_not_taken_come_again(tmp_path: Path, backend: str) -> None:
    with resumable_stream(tmp_path, backend=backend) as stream:
        stream.put("F0", "F1")
        wait_until(lambda: stream.receiver.ready(op("F1")), what="F1")
        stream.receiver.close()
        stream.start_receiver(0)
        stream.connect()
        assert stream.take("F0", "F1") == [0, 1]
        stream.sender.flush(timeout_s=20)
        assert stream.sender.sent == 4


# -- a sender that comes back -------------------------------------------------------------------


def test_a_restarted_sender_sends_only_what_its_receiver_lacks(
    tmp_path: Path, backend: str
) -> None:
    with resumable_stream(tmp_path, backend=backend) as stream:
        stream.put(*forwards(0, 6))
        wait_until(lambda: stream.receiver.ready(op("F5")), what="all")
        stream.sender.close()
        stream.start_sender(3)
        stream.connect()
        stream.put(*forwards(3, 8))
        assert stream.take(*forwards(0, 8)) == list(range(8))
        stream.sender.flush(timeout_s=20)
        assert (stream.sender.suppressed, stream.sender.sent) == (3, 2)
        assert not stream.faults


def test_outputs_in_flight_are_made_again_with_their_old_numbers(tmp_path: Path) -> None:
    with resumable_stream(tmp_path) as stream:
        stream.put("F0", "F1", "E0.0", "F2", "F3")
        wait_until(lambda: stream.receiver.ready(op("F3")), what="all")
        stream.take("F0", "F1")
        stream.sender.close()
        sender = stream.start_sender(5)
        stream.connect()  # before anything is made again
        sender.put(parcel("F2"), number=3)
        sender.put(parcel("F3"), number=4)
        assert sender.number == 5
        stream.put("F4")
        assert stream.take("E0.0", "F2", "F3", "F4") == [2, 3, 4, 5]
        sender.flush(timeout_s=20)
        assert (sender.suppressed, sender.sent, sender.number) == (2, 1, 6)


def test_what_is_made_again_before_the_link_stands_is_compared_too(tmp_path: Path) -> None:
    with resumable_stream(tmp_path) as stream:
        stream.put("F0", "F1")
        wait_until(lambda: stream.receiver.ready(op("F1")), what="F1")
        stream.sender.close()
        stream.start_sender()
        stream.put("F0", "F1", "F2")
        stream.connect()
        assert stream.take("F0", "F1", "F2") == [0, 1, 2]
        assert stream.sender.suppressed == 2


def test_parcels_that_differ_from_those_of_the_former_life_are_a_fault(
    tmp_path: Path, backend: str
) -> None:
    with resumable_stream(tmp_path, backend=backend) as stream:
        stream.put("F0", "F1")
        wait_until(lambda: stream.receiver.ready(op("F1")), what="F1")
        stream.sender.close()
        stream.start_sender()
        stream.connect()
        stream.put("F0")
        stream.sender.put(Parcel(op("F1"), parcel("F1").value + 1e-6, 1, 1))
        with pytest.raises(
            ReplayMismatchError, match=r"made parcel 1 of its activations, F1, anew with digest"
        ):
            stream.sender.flush(timeout_s=20)
        assert isinstance(stream.faults[0], ReplayMismatchError)
        with pytest.raises(ReplayMismatchError):
            stream.put("F2")
        stream.take("F0", "F1")  # the receiver's are the old ones


def test_digests_are_kept_until_they_are_trimmed(tmp_path: Path) -> None:
    with resumable_stream(tmp_path) as stream:
        stream.put(*forwards(0, 4))
        stream.take(*forwards(0, 4))
        stream.receiver.trim(2)
        assert list(stream.receiver._digests) == [2, 3]
        stream.sender.close()
        stream.start_sender()
        stream.connect()
        stream.sender.put(Parcel(op("F0"), torch.zeros(1), 1, 1))  # there is nothing to compare
        stream.put("F1", "F2")
        stream.sender.flush(timeout_s=20)
        assert stream.sender.suppressed == 3


def test_a_welcome_has_the_first_digests_and_no_more_than_a_message_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving_module, "_MOST_DIGESTS", 2)
    with resumable_stream(tmp_path) as stream:
        stream.put(*forwards(0, 4))
        stream.take(*forwards(0, 4))
        stream.sender.close()
        stream.start_sender()
        stream.connect()
        assert list(stream.sender._digests) == [0, 1]


# -- both ends, and the link between ------------------------------------------------------------


def test_both_ends_come_back_and_go_on_from_the_same_place(tmp_path: Path, backend: str) -> None:
    with resumable_stream(tmp_path, backend=backend) as stream:
        stream.put(*forwards(0, 6))
        stream.take(*forwards(0, 4))
        stream.receiver.close()
        stream.sender.close()
        stream.start_sender(2)
        stream.start_receiver(2)
        stream.connect()
        stream.put(*forwards(2, 7))
        assert stream.take(*forwards(2, 7)) == [2, 3, 4, 5, 6]
        stream.sender.flush(timeout_s=20)
        assert (stream.sender.suppressed, stream.sender.sent) == (0, 5)


def test_a_link_that_is_cut_within_a_large_parcel_delivers_it_by_the_next(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    receive = Link.receive

    def receive_and_tell(link: Link, *arguments: object, **named: object) -> None:
        begun.set()
        receive(link, *arguments, **named)

    monkeypatch.setattr(Link, "receive", receive_and_tell)
    for end in (sending_module, receiving_module):  # gloo leaves threads behind until then
        monkeypatch.setattr(end, "LINK_TIMEOUT_S", 3)
    with resumable_stream(tmp_path, backend=backend) as stream:
        large = parcel("F0", floats=8 << 20)
        stream.sender.put(large)
        assert begun.wait(20)
        stream.sender._link.abort()
        stream.connect()
        assert torch.equal(stream.receiver.take(op("F0")).value, large.value)
        stream.put("F1")
        assert stream.take("F1") == [1]


def test_time_counts_for_no_deadline_while_the_link_is_down(tmp_path: Path) -> None:
    with stream_pair(tmp_path, window=1, wait_timeout_s=0.2) as pair, ThreadPoolExecutor() as pool:
        pair.sender.put(parcel("F0"))
        put = pool.submit(pair.sender.put, parcel("F1"))
        wait_until(lambda: len(pair.sender._gate._changed._waiters) > 0, what="put to wait")
        with in_background(put.exception) as waiting:
            waiting.join(0.5)
            assert waiting.is_alive()
            pair.connect(1)
            put.result(10)
        with pytest.raises(DeadlineError, match=r"0\.2 s for stage 1 to take F1"):
            pair.sender.put(parcel("F2"))  # one is there, and one waits here
        assert pair.sender.waited_s > 0.5


def test_ends_that_run_cannot_be_given_another_place(tmp_path: Path) -> None:
    with resumable_stream(tmp_path) as stream:
        with pytest.raises(AssertionError, match="position of its own"):
            stream.receiver.resume_at(3)
        with pytest.raises(AssertionError, match="numbers of its own"):
            stream.sender.resume_at(3)


# -- the log ------------------------------------------------------------------------------------


def test_a_full_log_lets_put_wait_until_it_is_trimmed_and_drops_nothing(tmp_path: Path) -> None:
    with stream_pair(tmp_path, log_bytes=3 * PARCEL_BYTES) as pair, ThreadPoolExecutor() as pool:
        pair.connect()
        for text in forwards(0, 3):
            pair.sender.put(parcel(text))
        pair.sender.flush(timeout_s=20)
        assert pair.sender.log_bytes_used == 3 * PARCEL_BYTES
        put = pool.submit(pair.sender.put, parcel("F3"))
        wait_until(lambda: len(pair.sender._gate._changed._waiters) > 0, what="put to wait")
        pair.sender.trim(0)
        assert not put.done()
        pair.sender.trim(1)
        put.result(20)
        assert pair.sender.log_bytes_used == 3 * PARCEL_BYTES
        for text in forwards(0, 4):
            assert torch.equal(pair.receiver.take(op(text)).value, parcel(text).value)


def test_a_log_that_stays_full_is_a_deadline_that_says_what_to_do(tmp_path: Path) -> None:
    with stream_pair(tmp_path, log_bytes=40, wait_timeout_s=0.2) as pair:
        pair.connect()
        pair.sender.put(parcel("F0"))
        with pytest.raises(
            DeadlineError,
            match=r"stage 0 waited 0\.2 s for room for F1 .*the log is full with 1 parcels of 24 "
            r"bytes, allowed are 40; .*--snapshot-every.*--log-memory",
        ):
            pair.sender.put(parcel("F1"))
        assert pair.sender.number == 1


def test_a_parcel_larger_than_the_log_goes_through_alone(tmp_path: Path) -> None:
    with stream_pair(tmp_path, log_bytes=10) as pair:
        pair.connect()
        pair.sender.put(parcel("F0"))
        pair.sender.trim(1)
        pair.sender.put(parcel("F1"))
        assert pair.receiver.take(op("F1")).number == 1


def test_a_receiver_that_asks_for_what_was_trimmed_is_told(tmp_path: Path) -> None:
    with resumable_stream(tmp_path) as stream:
        stream.put(*forwards(0, 4))
        stream.take(*forwards(0, 4))
        stream.sender.trim(3)
        stream.receiver.close()
        stream.start_receiver(2)
        with pytest.raises(
            ReplayMismatchError, match=r"stage 1 needs parcel 2 .*stage 0 has only those from 3 on"
        ):
            stream.connect()
