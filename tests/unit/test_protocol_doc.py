"""``docs/protocol.md`` says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spectrain.protocol import codec
from spectrain.protocol.document import main, page
from spectrain.protocol.messages import MESSAGES

PAGE = Path(__file__).parent.parent.parent / "docs" / "protocol.md"


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == page(), (
        "run: python -m spectrain.protocol.document > docs/protocol.md"
    )


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out == page()


def test_every_message_has_a_section_in_order() -> None:
    titles = re.findall(r"^### (\w+)$", page(), re.MULTILINE)
    names = [kind.__name__ for kind in MESSAGES]
    assert [title for title in titles if title in names] == names


def test_a_section_says_who_when_and_what() -> None:
    section = page().split("### StopRequested\n")[1].split("###")[0]
    assert section == (
        "\nlauncher → coordinator, when the user or the scheduler asks to stop.\n\n"
        "| field | type | default | meaning |\n|---|---|---|---|\n"
        '| `reason` | `str` |  | "Ctrl-C", "SIGTERM", "SIGUSR1" |\n'
        "| `abort` | `bool` |  | False: finish the batches in flight; True: end at once |\n\n"
    )


def test_defaults_are_shown_and_bars_in_types_do_not_break_the_table() -> None:
    assert "| `loss` | `float \\| None` | `None` |" in page()
    assert "| `metrics` | `dict[str, float]` | `{}` | latest evaluation |" in page()


def test_work_is_explained_among_the_parts() -> None:
    parts = page().split("## Parts of messages")[1].split("\n## ")[0]
    assert "| `train_batches` | `int` |  | mini-batches of the whole run, at least 1 |" in parts


def test_the_limits_are_those_of_the_codec() -> None:
    assert f"| body (frame 1) | {codec.MAX_MESSAGE_BYTES >> 20} MiB |" in page()
    assert f"Protocol version: {codec.PROTOCOL_VERSION}." in page()


def test_the_diagram_names_only_messages_that_exist() -> None:
    diagram = page().split("```")[1]
    names = {kind.__name__ for kind in MESSAGES}
    assert set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", diagram)) <= names
