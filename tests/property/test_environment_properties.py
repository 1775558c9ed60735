"""Laws of environments: values arrive as they are, whatever is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.launch.environment import ALLOWED, collect, redact, worker_environment
from spectrain.launch.remote import BOOTSTRAP

names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,11}", fullmatch=True)
awkward = st.sampled_from(list("\"'\\$;`\n\r\t #=&|<>*~!%"))
texts = st.text(st.one_of(awkward, st.characters(codec="utf-8", exclude_characters="\0")))


def double_quoted(value: str) -> str:
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r"}
    return '"' + "".join(escapes.get(character, character) for character in value) + '"'


@given(st.dictionaries(names, texts, max_size=4))
def test_a_quoted_file_is_read_back(values: dict[str, str]) -> None:
    text = "\n".join(f"{name}={double_quoted(value)}" for name, value in values.items())
    assert collect({}, env_file_text=text) == values


@given(st.dictionaries(names, texts, max_size=4))
def test_assignments_on_the_command_line_are_taken_as_they_are(values: dict[str, str]) -> None:
    assert collect({}, [f"{name}={value}" for name, value in values.items()]) == values


@given(st.dictionaries(names, texts), st.sampled_from(ALLOWED), texts)
def test_the_allow_list_takes_every_name_it_covers(
    environ: dict[str, str], pattern: str, value: str
) -> None:
    name = pattern.replace("*", "X")
    assert collect({**environ, name: value})[name] == value


@given(st.dictionaries(names, texts))
def test_redaction_keeps_names_and_shows_a_value_or_stars(values: dict[str, str]) -> None:
    shown = redact(values)
    assert shown.keys() == values.keys()
    assert all(shown[name] in (values[name], "***") for name in values)


@given(st.dictionaries(names, texts), st.dictionaries(names, texts), st.integers(1, 4))
def test_a_worker_keeps_all_that_was_passed_but_its_rank(
    base: dict[str, str], passed: dict[str, str], workers_on_host: int
) -> None:
    values = worker_environment(
        base,
        passed,
        stage=0,
        stages=4,
        slot=0,
        workers_on_host=workers_on_host,
        host_index=0,
        run_id="r",
        run_dir="/r",
        coordinator=None,
    )
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}
    for name in passed.keys() - ours:
        assert name.startswith("SPECTRAIN_") or values[name] == passed[name]
    assert (values.keys() & base.keys()) - passed.keys() <= ours


@settings(max_examples=15)
@given(st.dictionaries(names, texts, min_size=1, max_size=8))
def test_values_reach_another_process_byte_for_byte(values: dict[str, str]) -> None:
    environment = {f"T_{name}": value for name, value in values.items()}
    program = "import os; print({n: v.hex() for n, v in os.environb.items() if n[:2] == b'T_'})"
    request = {"parent": 0, "cwd": "/", "environment": environment, "argv": ["-c", program]}
    done = subprocess.run(
        [sys.executable, "-I", "-X", "utf8", "-c", BOOTSTRAP],
        input=json.dumps(request).encode() + b"\n",
        stdout=subprocess.PIPE,
        check=True,
    )
    expected = {name.encode(): os.fsencode(value).hex() for name, value in environment.items()}
    assert eval(done.stdout) == expected
