"""Every message comes out as it went in; any bytes give a message or a refusal, never a crash."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spectrain.protocol.codec import (
    HEADER,
    PAYLOAD_KINDS,
    PROTOCOL_VERSION,
    Decoder,
    Encoder,
    InvalidMessageError,
)
from spectrain.protocol.messages import MESSAGES, Message
from spectrain.protocol.schedule import Work

RUN = bytes(range(16))
KINDS = [kind.__name__ for kind in MESSAGES]
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    NoneType: st.none(),
}
COUNTS = st.integers(1, 2**40)
WORKS = st.builds(
    Work,
    train_batches=COUNTS,
    epoch_batches=COUNTS,
    evaluation_batches=st.integers(0, 2**40),
    microbatches=COUNTS,
    last_microbatches=COUNTS,
)


def values(declared: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a declared type."""
    if declared is Work:
        return WORKS
    if is_dataclass(declared):
        hints = get_type_hints(declared)
        return st.builds(declared, **{f.name: values(hints[f.name]) for f in fields(declared)})
    if declared in SCALARS:
        return SCALARS[declared]
    arguments = get_args(declared)
    if get_origin(declared) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(declared) is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return st.one_of(*map(values, arguments))


def decode(frames: list[Any]) -> tuple[Message, list[Any]]:
    return Decoder(RUN).decode(b"worker/0", frames)


def decode_or_refuse(frames: list[Any]) -> Message | None:
    try:
        return decode(frames)[0]
    except InvalidMessageError:
        return None


def with_body(body: bytes) -> list[bytes]:
    return [HEADER.pack(b"SPT", PROTOCOL_VERSION, RUN, 1), body]


@pytest.mark.parametrize("kind", MESSAGES, ids=KINDS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_kind_comes_back_as_it_went(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    payload = data.draw(st.lists(st.binary(), max_size=2)) if kind in PAYLOAD_KINDS else []
    assert decode(Encoder(RUN).encode(message, payload)) == (message, payload)


MESSAGE = st.one_of(*map(values, MESSAGES))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(message=MESSAGE, data=st.data())
def test_a_truncated_body_is_refused(message: Message, data: st.DataObject) -> None:
    header, body = Encoder(RUN).encode(message)
    length = data.draw(st.integers(0, len(body) - 1))
    assert decode_or_refuse([header, body[:length]]) is None


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(message=MESSAGE, data=st.data())
def test_a_mutated_frame_gives_a_message_or_a_refusal(
    message: Message, data: st.DataObject
) -> None:
    frames = [bytearray(frame) for frame in Encoder(RUN).encode(message)]
    frame = data.draw(st.sampled_from(frames))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    mutated = decode_or_refuse(frames)
    assert mutated is None or isinstance(mutated, MESSAGES)


@given(frames=st.lists(st.binary(max_size=64), max_size=4))
@example(frames=[])
def test_junk_is_refused(frames: list[bytes]) -> None:
    assert decode_or_refuse(frames) is None


@given(body=st.binary(max_size=200))
def test_a_junk_body_under_a_good_header_is_refused(body: bytes) -> None:
    assert decode_or_refuse(with_body(body)) is None


PLAIN = st.recursive(
    st.one_of(*SCALARS.values(), st.just(float("nan"))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_known_kind_with_any_values_gives_that_kind_or_a_refusal(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(MESSAGES))
    names = [field.name for field in fields(kind)]
    record = {name: data.draw(PLAIN) for name in names}
    body = msgpack.packb({"kind": kind.__name__, **record})
    message = decode_or_refuse(with_body(body))
    assert message is None or type(message) is kind
