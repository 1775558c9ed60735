"""Time is booked by activity, and a wait has a name while it lasts."""

from __future__ import annotations

import itertools

import pytest

from spectrain.protocol.schedule import Op
from spectrain.worker.stopwatch import Stopwatch, Times


def make() -> Stopwatch:
    """Return a stopwatch whose every interval is one second, not counting those inside it."""
    seconds = itertools.count()
    return Stopwatch(lambda: float(next(seconds)))


def test_time_adds_up_by_activity() -> None:
    watch = make()
    for activity in ("forward_s", "update_s", "forward_s"):
        with watch.timed(activity):
            pass
    assert watch.times == Times(forward_s=2, update_s=1)


@pytest.mark.parametrize("whom", ["upstream", "downstream", "feed"])
def test_a_wait_has_a_name_while_it_lasts(whom: str) -> None:
    watch = make()
    with watch.waiting(whom, "{} from stage 0", Op.parse("F3")):
        assert watch.waiting_for == "F3 from stage 0"
    assert watch.waiting_for == ""
    assert watch.times == Times(**{f"wait_{whom}_s": 1})


def test_an_unknown_activity_is_a_mistake() -> None:
    watch = make()
    with pytest.raises(KeyError), watch.timed("sleep_s"):
        pass
