"""What a coordinator writes down for the one that may have to take its place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spectrain.coordinator.catalogue import Catalogue
from spectrain.coordinator.memory import Memory

EMPTY = Catalogue(stages=2, hosts=range(2)).to_json()
MEMORY = Memory(
    life=3, catalogue=EMPTY, slots=((0, 1), (1, 0)), incarnations=(2, 0), restarts=(1, 0)
)


def test_a_memory_survives_the_file() -> None:
    assert Memory.from_json(MEMORY.to_json()) == MEMORY


def test_a_stop_survives_the_file() -> None:
    stopped = replace(MEMORY, stop_before=7, stop_reason="SIGTERM", stop_code=75)
    assert Memory.from_json(stopped.to_json()) == stopped


def test_repairs_that_are_over_survive_the_file() -> None:
    repaired = replace(MEMORY, repairs=({"stage": 1, "seconds": {"detect": 0.5}},))
    assert Memory.from_json(repaired.to_json()) == repaired


def test_the_catalogue_stands_in_the_file_as_json_not_as_text() -> None:
    assert json.loads(MEMORY.to_json())["catalogue"] == json.loads(EMPTY)


@pytest.mark.parametrize("name", ["life", "catalogue", "slots", "restarts", "stop_before"])
def test_a_file_that_lacks_something_is_refused_by_its_name(name: str) -> None:
    values = json.loads(MEMORY.to_json())
    del values[name]
    with pytest.raises(ValueError, match=f"not the commit file of a run: KeyError\\('{name}'\\)"):
        Memory.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "null"])
def test_what_is_no_commit_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Memory.from_json(text)


@pytest.mark.parametrize("slots", [[[0]], [[0, 1, 2]], [0], None])
def test_slots_of_another_form_are_refused(slots: object) -> None:
    values = {**json.loads(MEMORY.to_json()), "slots": slots}
    with pytest.raises(ValueError, match=r".+"):
        Memory.from_json(json.dumps(values))
