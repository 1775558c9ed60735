"""The codec takes every valid message whole and names what is wrong with any other.

Run this file as a program to freeze the contract in ``tests/golden/messages.json`` anew.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import pytest

from spectrain.protocol import codec
from spectrain.protocol.codec import (
    HEADER,
    MAX_ELEMENTS,
    MAX_MESSAGE_BYTES,
    PAYLOAD_KINDS,
    PROTOCOL_VERSION,
    Decoder,
    Encoder,
    InvalidMessageError,
)
from spectrain.protocol.messages import (
    MESSAGES,
    Announce,
    Assign,
    BatchResult,
    Boundary,
    EndAgent,
    FeedBatch,
    Go,
    Heartbeat,
    Note,
    ReplicaChunk,
    StopBefore,
    StopRequested,
    StreamRefused,
    TensorSpec,
    Trained,
    View,
    WeightsPart,
)
from spectrain.protocol.schedule import Work

GOLDEN = Path(__file__).parent.parent / "golden" / "messages.json"
RUN = bytes(range(16))
SPEC = TensorSpec(dtype="float32", shape=(2, 3))
PART = WeightsPart(stage=1, incarnation=0, name="0.weight", spec=SPEC)


def frames_of(record: object, sequence: int = 1) -> list[bytes]:
    """Build the frames of a body that no encoder would make."""
    return raw_frames(msgpack.packb(record), sequence)


def raw_frames(body: bytes, sequence: int = 1) -> list[bytes]:
    return [HEADER.pack(b"SPT", PROTOCOL_VERSION, RUN, sequence), body]


def decode(frames: list[Any]) -> Any:
    return Decoder(RUN).decode(b"worker/0", frames)[0]


def refusal(frames: list[Any], decoder: Decoder | None = None) -> InvalidMessageError:
    with pytest.raises(InvalidMessageError) as caught:
        (decoder or Decoder(RUN)).decode(b"worker/0", frames)
    return caught.value


# -- the contract -------------------------------------------------------------------------------


def is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def innermost(declared: Any) -> Any:
    """Return the innermost type: of ``tuple[TensorSpec | None, ...]`` the ``TensorSpec``."""
    while arguments := get_args(declared):
        declared = arguments[-1] if get_origin(declared) is dict else arguments[0]
    return declared


def contract() -> dict[str, dict[str, str]]:
    """Return every kind and part with its fields, their types and whether they have a default."""
    found: dict[str, dict[str, str]] = {}

    def visit(record: Any) -> None:
        found[record.__name__] = {
            field.name: field.type + ("" if is_required(field) else " (has a default)")
            for field in fields(record)
        }
        for part in map(innermost, get_type_hints(record).values()):
            if is_dataclass(part) and part.__name__ not in found:
                visit(part)

    for kind in MESSAGES:
        visit(kind)
    return dict(sorted(found.items()))


def test_kinds_fields_and_types_are_those_of_the_golden_file() -> None:
    frozen = json.loads(GOLDEN.read_text())
    assert contract() == frozen, (
        "the wire contract has changed; if it was meant to (a new field with a default, or a new "
        f"PROTOCOL_VERSION), run: python {__file__}"
    )


def test_no_field_is_named_like_the_tag() -> None:
    assert all("kind" not in names for names in contract().values())


# -- frames -------------------------------------------------------------------------------------


def test_the_header_is_magic_version_run_and_sequence() -> None:
    header, _ = Encoder(RUN).encode(Go())
    assert header[:4] == b"SPT" + bytes([PROTOCOL_VERSION])
    assert header[4:20] == RUN
    assert len(header) == HEADER.size == 28


def test_the_body_is_one_map_tagged_with_the_kind() -> None:
    _, body = Encoder(RUN).encode(StopBefore(batch=7))
    assert msgpack.unpackb(body) == {"kind": "StopBefore", "batch": 7}


def test_records_inside_records_travel_as_maps() -> None:
    work = Work(train_batches=4, epoch_batches=2)
    message = Assign(settings_json="{}", work=work, layer_counts=(1, 2))
    frames = Encoder(RUN).encode(message)
    assert msgpack.unpackb(frames[1])["work"]["train_batches"] == 4
    assert decode(frames) == message


def test_a_none_in_a_tuple_of_records_stays_none() -> None:
    boundary = Boundary(form="tuple", tensors=(SPEC, None))
    message = FeedBatch(
        part="inputs", op="F1", samples=2, batch_samples=2, ids_digest="", boundary=boundary
    )
    assert decode(Encoder(RUN).encode(message)) == message


def test_payload_passes_through_uncopied() -> None:
    tensor = bytearray(b"1234")
    frames = Encoder(RUN).encode(PART, [tensor])
    message, payload = Decoder(RUN).decode(b"", frames)
    assert message == PART
    assert payload[0] is tensor


def test_an_encoder_gives_payload_to_no_other_kind() -> None:
    with pytest.raises(AssertionError, match="Go has no payload"):
        Encoder(RUN).encode(Go(), [b"1234"])


def test_payload_after_another_kind_is_refused() -> None:
    error = refusal([*Encoder(RUN).encode(Go()), b"1234"])
    assert error.reason == "payload"
    assert "Go is followed by 1 raw frames" in str(error)


def test_only_the_kinds_that_carry_bulk_data_have_payload() -> None:
    assert (FeedBatch, WeightsPart, ReplicaChunk) == PAYLOAD_KINDS


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_a_run_id_has_sixteen_bytes(kind: type) -> None:
    with pytest.raises(AssertionError, match="is not a run id"):
        kind(b"short")


# -- header -------------------------------------------------------------------------------------


def test_a_message_has_at_least_two_frames() -> None:
    assert refusal([]).reason == "header"
    assert refusal([b"x"]).reason == "header"


def test_a_header_of_another_size_is_refused() -> None:
    header, body = Encoder(RUN).encode(Go())
    assert "has 27 bytes, not 28" in str(refusal([header[:-1], body]))


def test_another_magic_is_refused() -> None:
    header, body = Encoder(RUN).encode(Go())
    error = refusal([b"GET" + header[3:], body])
    assert error.reason == "header"
    assert "b'GET'" in str(error)


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    header, body = Encoder(RUN).encode(Go())
    error = refusal([header[:3] + b"\x63" + header[4:], body])
    assert error.reason == "version"
    assert str(error) == f"protocol version 99; this side speaks {PROTOCOL_VERSION}"


def test_another_run_is_refused() -> None:
    error = refusal(Encoder(b"another run's id").encode(Go()))
    assert error.reason == "run"
    assert RUN.hex() in str(error)


# -- sequence -----------------------------------------------------------------------------------


def test_a_replayed_message_is_refused() -> None:
    decoder = Decoder(RUN)
    frames = Encoder(RUN).encode(Go())
    decoder.decode(b"worker/0", frames)
    assert refusal(frames, decoder).reason == "replayed"


def test_an_older_message_is_refused_and_a_gap_is_not() -> None:
    decoder = Decoder(RUN)
    older, _, newer = (Encoder.encode(sender, Go()) for sender in [Encoder(RUN)] * 3)
    decoder.decode(b"worker/0", newer)
    assert refusal(older, decoder).reason == "replayed"


def test_senders_are_numbered_apart() -> None:
    decoder = Decoder(RUN)
    frames = Encoder(RUN).encode(Go())
    decoder.decode(b"worker/0", frames)
    assert decoder.decode(b"worker/1", frames) == (Go(), [])


def test_a_refused_message_does_not_use_up_its_number() -> None:
    decoder = Decoder(RUN)
    refusal(frames_of({"kind": "Nonsense"}, sequence=5), decoder)
    assert decoder.decode(b"worker/0", frames_of({"kind": "Go"}, sequence=5)) == (Go(), [])


def test_a_sender_that_starts_again_goes_on_above_its_predecessor() -> None:
    decoder = Decoder(RUN)
    before, after = Encoder(RUN), Encoder(RUN)
    for _ in range(100):
        decoder.decode(b"worker/0", before.encode(Go()))
    assert decoder.decode(b"worker/0", after.encode(Go())) == (Go(), [])


def test_threads_that_share_an_encoder_never_share_a_number() -> None:
    encoder = Encoder(RUN)
    headers: list[bytes] = []

    def encode_many() -> None:
        headers.extend(bytes(encoder.encode(Go())[0]) for _ in range(500))

    threads = [threading.Thread(target=encode_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(headers)) == 2000


# -- fields -------------------------------------------------------------------------------------


def test_an_unknown_kind_is_refused() -> None:
    error = refusal(frames_of({"kind": "Exec", "code": "1"}))
    assert error.reason == "unknown kind"
    assert "'Exec'" in str(error)


@pytest.mark.parametrize("record", [{}, {"kind": 3}, {"kind": ["Go"]}, {"kind": "TensorSpec"}])
def test_a_body_without_the_name_of_a_message_is_refused(record: object) -> None:
    assert refusal(frames_of(record)).reason == "unknown kind"


def test_unknown_fields_are_ignored() -> None:
    assert decode(frames_of({"kind": "StopBefore", "batch": 7, "colour": "red"})) == StopBefore(
        batch=7
    )


def test_a_missing_field_with_a_default_gets_it() -> None:
    assert decode(frames_of({"kind": "View", "state": "training"})) == View(state="training")


def test_missing_fields_without_defaults_are_all_named() -> None:
    error = refusal(frames_of({"kind": "Note"}))
    assert error.reason == "malformed"
    assert str(error) == "Note: no level, text"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"kind": "StopBefore", "batch": "7"}, "StopBefore.batch: expected int, got str '7'"),
        ({"kind": "StopBefore", "batch": True}, "StopBefore.batch: expected int, got bool True"),
        ({"kind": "StopBefore", "batch": 7.0}, "StopBefore.batch: expected int, got float 7.0"),
        ({"kind": "StopBefore", "batch": None}, "StopBefore.batch: expected int, got NoneType"),
        ({"kind": "EndAgent", "grace_s": True}, "EndAgent.grace_s: expected float, got bool True"),
        ({"kind": "EndAgent", "grace_s": "1"}, "EndAgent.grace_s: expected float, got str '1'"),
        ({"kind": "StreamRefused", "reason": b"x"}, "StreamRefused.reason: expected str, got byt"),
        ({"kind": "View", "state": "", "loss": "x"}, "View.loss: expected float, got str 'x'"),
        ({"kind": "View", "state": "", "waiting_for": "x"}, "View.waiting_for: expected an array"),
        ({"kind": "View", "state": "", "waiting_for": ["a", 1]}, "View.waiting_for[1]: expected s"),
        ({"kind": "View", "state": "", "metrics": []}, "View.metrics: expected a map, got list"),
        ({"kind": "View", "state": "", "metrics": {b"a": 1.0}}, "View.metrics: expected a map wit"),
        ({"kind": "View", "state": "", "metrics": {"a": ""}}, "View.metrics['a']: expected float"),
        ({"kind": "View", "state": "", "stages": [3]}, "View.stages[0]: expected a map of StageVi"),
    ],
)
def test_a_wrong_type_is_refused_with_the_path_of_the_field(
    record: dict[str, object], text: str
) -> None:
    error = refusal(frames_of(record))
    assert error.reason == "malformed"
    assert text in str(error)


def test_bool_fields_take_only_bools() -> None:
    error = refusal(frames_of({"kind": "StopRequested", "reason": "Ctrl-C", "abort": 1}))
    assert "StopRequested.abort: expected bool, got int 1" in str(error)
    message = StopRequested(reason="Ctrl-C", abort=True)
    assert decode(Encoder(RUN).encode(message)) == message


def test_the_rule_of_a_record_holds_on_the_wire() -> None:
    work = {"train_batches": 0, "epoch_batches": 1}
    error = refusal(
        frames_of({"kind": "Assign", "settings_json": "", "work": work, "layer_counts": []})
    )
    assert error.reason == "malformed"
    assert str(error).startswith("Assign.work: a run needs at least one batch")


def test_an_int_passes_for_a_float_and_becomes_one() -> None:
    grace_s = decode(frames_of({"kind": "EndAgent", "grace_s": 3})).grace_s
    assert type(grace_s) is float
    assert grace_s == 3.0


def test_a_loss_may_be_nan_or_infinite() -> None:
    results = tuple(
        BatchResult(batch=0, samples=1, loss=loss, lr=0.1) for loss in (math.nan, math.inf)
    )
    decoded = decode(Encoder(RUN).encode(Trained(stage=0, incarnation=0, batches=results)))
    assert math.isnan(decoded.batches[0].loss)
    assert decoded.batches[1].loss == math.inf


def test_text_that_utf8_cannot_hold_is_replaced() -> None:
    message = decode(Encoder(RUN).encode(Note(level="error", text="no file caf\udce9")))
    assert message == Note(level="error", text="no file caf?")


def test_errors_show_only_the_beginning_of_a_long_value() -> None:
    assert len(str(refusal(frames_of({"kind": "StopBefore", "batch": "7" * 10_000})))) < 200
    assert len(str(refusal(frames_of({"kind": "K" * 10_000})))) < 200


# -- msgpack ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="never used"),
        pytest.param(msgpack.packb({"kind": "Go"})[:-1], id="truncated"),
        pytest.param(msgpack.packb({"kind": "Go"}) + b"\x00", id="trailing byte"),
        pytest.param(b"\x81\xa1\xff\xc0", id="not UTF-8"),
        pytest.param(msgpack.packb({"kind": "Go", 3: 4}), id="int key"),
        pytest.param(msgpack.packb({"kind": "Go", "x": msgpack.ExtType(4, b"abc")}), id="ext"),
        pytest.param(b"\x82\xa4kind\xa2Go\xa1x\xc7\x00\x04", id="empty ext"),
        pytest.param(msgpack.packb({"x": msgpack.Timestamp(1)}), id="timestamp"),
        pytest.param(b"\x91" * 100_000 + b"\xc0", id="deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="claims 2**32 elements"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="claims 2**32 pairs"),
        pytest.param(msgpack.packb([0] * (MAX_ELEMENTS + 1)), id="too many elements"),
        pytest.param(msgpack.packb(["Go"]), id="not a map"),
    ],
)
def test_a_body_that_is_not_one_plain_map_is_refused(body: bytes) -> None:
    assert refusal(raw_frames(body)).reason == "malformed"


def test_a_body_above_the_limit_is_refused_on_both_sides() -> None:
    largest = MAX_MESSAGE_BYTES - len(Encoder(RUN).encode(StreamRefused(reason=""))[1]) - 4
    decode(Encoder(RUN).encode(StreamRefused(reason="x" * largest)))
    with pytest.raises(InvalidMessageError, match="StreamRefused: the body has 1048577 bytes"):
        Encoder(RUN).encode(StreamRefused(reason="x" * (largest + 1)))
    assert refusal(raw_frames(bytes(MAX_MESSAGE_BYTES + 1))).reason == "oversized"


def test_a_payload_frame_above_the_limit_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = Encoder(RUN).encode(PART, [memoryview(bytes(40)).cast("f")])
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 39)
    error = refusal(frames)
    assert error.reason == "oversized"
    assert "a payload frame has 40 bytes, at most 39" in str(error)
    with pytest.raises(InvalidMessageError, match="a payload frame has 40 bytes"):
        Encoder(RUN).encode(PART, [bytes(40)])


def test_a_value_with_no_wire_form_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="cannot travel"):
        Encoder(RUN).encode(EndAgent(grace_s=object()))  # type: ignore[arg-type]


def test_a_field_type_with_no_wire_form_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="no wire form for a field of type"):
        codec._reader(list[int])


def test_an_announcement_keeps_its_shapes_as_tuples() -> None:
    announce = {
        "kind": "Announce",
        "op": "F1",
        "samples": 2,
        "batch_samples": 2,
        "boundary": {"form": "tensor", "tensors": [{"dtype": "int64", "shape": [2, 3]}]},
        "generation": 0,
        "position": 0,
    }
    message = decode(frames_of(announce))
    assert isinstance(message, Announce)
    assert message.boundary.tensors == (TensorSpec(dtype="int64", shape=(2, 3)),)


def test_a_message_without_fields_is_its_tag_alone() -> None:
    assert decode(frames_of({"kind": "Heartbeat"})) == Heartbeat()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(contract(), indent=2) + "\n")
