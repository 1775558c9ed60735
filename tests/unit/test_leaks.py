"""The leak check sees each kind of leak, and nothing when there is none."""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import zmq
from leaks import left_behind, take_snapshot
from waiting import wait_until


def test_nothing_is_left_behind_by_nothing() -> None:
    assert left_behind(take_snapshot()) == []


def test_a_running_thread_is_named() -> None:
    before = take_snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    assert left_behind(before) == ["thread forgotten"]
    end.set()
    thread.join()
    assert left_behind(before) == []


def test_a_child_process_is_named_with_its_command() -> None:
    before = take_snapshot()
    with subprocess.Popen(["sleep", "60"]) as child:
        wait_until(lambda: "sleep 60" in "".join(left_behind(before)), what="exec of the child")
        assert left_behind(before) == [f"process {child.pid}: sleep 60"]
        child.kill()
    assert left_behind(before) == []


def test_a_descriptor_that_a_library_forgot_is_named() -> None:
    before = take_snapshot()
    descriptor = os.eventfd(0)
    assert left_behind(before) == [f"descriptor {descriptor}: anon_inode:[eventfd]"]
    os.close(descriptor)
    assert left_behind(before) == []


def test_an_open_zeromq_context_is_seen() -> None:
    before = take_snapshot()
    with zmq.Context() as context, context.socket(zmq.PULL):
        assert any("eventfd" in line for line in left_behind(before))
    assert left_behind(before) == []


def test_a_file_in_shared_memory_counts_once_nobody_holds_it() -> None:
    before = take_snapshot()
    path = Path(f"/dev/shm/leak-check-{os.getpid()}")
    with path.open("w"):
        in_use = left_behind(before)
    abandoned = left_behind(before)
    path.unlink()
    assert not any(path.name in line and "nobody" in line for line in in_use)
    assert f"{path}, in nobody's use" in abandoned


def test_the_tracker_that_multiprocessing_keeps_is_no_leak() -> None:
    before = take_snapshot()
    resource_tracker.ensure_running()
    assert left_behind(before) == []


def test_a_wait_returns_the_condition_s_result() -> None:
    answers = iter([0, 0, 7])
    assert wait_until(lambda: next(answers), what="seven") == 7


def test_a_wait_that_fails_says_for_what_and_what_it_saw() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0 s for the moon; last seen: \[\]"):
        wait_until(list, what="the moon", timeout_s=0)
