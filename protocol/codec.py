"""Messages to frames and back: strict, size-limited, versioned. No sockets, no pickle.

On the wire a message is two frames, and for a few kinds raw payload after them::

    frame 0    header    magic "SPT", protocol version, run id, sequence number
    frame 1    body      msgpack map {"kind": class name, field: value, ...}
    frame 2..  payload   raw bytes, only after the kinds in PAYLOAD_KINDS

Decoding follows the declared types of ``messages.py`` and nothing else: a missing field, another
type, an unknown kind or a byte too many is refused with the path of the field. Unknown *fields*
are ignored, so that a new field with a default breaks nobody.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from threading import Lock
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args, get_origin, get_type_hints

import msgpack

from .errors import ProtocolError
from .messages import MESSAGES, FeedBatch, Message, ReplicaChunk, WeightsPart

__all__ = [
    "HEADER",
    "MAX_ELEMENTS",
    "MAX_MESSAGE_BYTES",
    "MAX_PAYLOAD_BYTES",
    "PAYLOAD_KINDS",
    "PROTOCOL_VERSION",
    "RUN_ID_BYTES",
    "Buffer",
    "Decoder",
    "Encoder",
    "InvalidMessageError",
    "Reason",
    "pack_body",
    "unpack_body",
]

PROTOCOL_VERSION = 1
"""Raised by one whenever an old receiver would misread a new sender."""

RUN_ID_BYTES = 16

HEADER = struct.Struct(f">3sB{RUN_ID_BYTES}sQ")
"""Frame 0, big-endian: magic, protocol version, run id, sequence number."""

MAX_MESSAGE_BYTES = 1 << 20
"""The largest body, frame 1; a traceback or a log tail fits many times over."""

MAX_PAYLOAD_BYTES = 8 << 30
"""The largest payload frame: one tensor, such as the embedding of a large vocabulary."""

MAX_ELEMENTS = 1 << 16
"""The most elements of one array or map in a body."""

PAYLOAD_KINDS: tuple[type[Message], ...] = (FeedBatch, WeightsPart, ReplicaChunk)
"""The only messages that raw frames may follow."""

Buffer: TypeAlias = bytes | bytearray | memoryview

Reason: TypeAlias = Literal[
    "header",  # not ours at all: magic, size or number of frames
    "version",  # another protocol version
    "run",  # another run's id
    "replayed",  # a sequence number that this sender has already passed
    "oversized",
    "malformed",  # not msgpack, or not what the kind declares
    "unknown kind",
    "payload",  # raw frames after a kind that has none
    "identity",  # not the name that the sender's key stands for
]

_MAGIC = b"SPT"
_KINDS = {kind.__name__: kind for kind in MESSAGES}
_Path: TypeAlias = "tuple[_Path, object] | str"
"""Of a value in a message: where its container is, and its place there; in words when refused."""

_Read: TypeAlias = Callable[[object, _Path], Any]


class InvalidMessageError(ProtocolError):
    """A message was refused; ``reason`` is one word for counting."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


def pack_body(message: Message) -> bytes:
    """Return a message as frame 1 alone, for a channel that needs no header."""
    record = {"kind": type(message).__name__, **_fields(message)}
    # Text from the operating system may hold what UTF-8 cannot (undecodable file names).
    packer = msgpack.Packer(default=_fields, unicode_errors="replace")
    return cast("bytes", packer.pack(record))


class Encoder:
    """Turns messages of one sender into frames and numbers them; safe to call from any thread.

    Sequence numbers start at the wall clock in ns, not at 0: a process that is started again
    under its old name then goes on above everything its predecessor has sent.
    """

    def __init__(self, run_id: bytes) -> None:
        assert len(run_id) == RUN_ID_BYTES, f"{run_id!r} is not a run id"
        self._run_id = run_id
        self._sequence = time.time_ns()
        self._lock = Lock()

    def encode(self, message: Message, payload: Sequence[Buffer] = ()) -> list[Buffer]:
        """Return the frames of ``message``; payload frames are passed on uncopied.

        Raises:
            InvalidMessageError: the body or a payload frame is larger than a receiver accepts.
        """
        kind = type(message).__name__
        assert not payload or isinstance(message, PAYLOAD_KINDS), f"{kind} has no payload"
        body = pack_body(message)
        _check_sizes(kind, body, payload)
        with self._lock:
            self._sequence += 1
            header = HEADER.pack(_MAGIC, PROTOCOL_VERSION, self._run_id, self._sequence)
        return [header, body, *payload]


class Decoder:
    """Turns frames back into messages and refuses everything it does not fully understand."""

    def __init__(self, run_id: bytes) -> None:
        assert len(run_id) == RUN_ID_BYTES, f"{run_id!r} is not a run id"
        self._run_id = run_id
        self._last_sequence: dict[bytes, int] = {}

    def decode(self, sender: bytes, frames: Sequence[Buffer]) -> tuple[Message, list[Buffer]]:
        """Return the message and its payload frames, which are passed on uncopied.

        Args:
            sender: whom the frames came from; its sequence numbers must rise.
            frames: header, body, payload.

        Raises:
            InvalidMessageError: the frames are not one whole, new message of this run.
        """
        if len(frames) < 2:  # noqa: PLR2004 - header and body
            raise InvalidMessageError("header", f"{len(frames)} frames, at least 2 make a message")
        header, body, *payload = frames
        sequence = self._read_header(sender, header)
        _check_sizes("message", body, payload)
        message = unpack_body(body)
        if payload and not isinstance(message, PAYLOAD_KINDS):
            kind = type(message).__name__
            raise InvalidMessageError("payload", f"{kind} is followed by {len(payload)} raw frames")
        self._last_sequence[sender] = sequence
        return message, payload

    def _read_header(self, sender: bytes, header: Buffer) -> int:
        if len(header) != HEADER.size:
            text = f"the header has {len(header)} bytes, not {HEADER.size}"
            raise InvalidMessageError("header", text)
        magic, version, run_id, sequence = HEADER.unpack(header)
        if magic != _MAGIC:
            raise InvalidMessageError("header", f"the header starts with {magic!r}, not {_MAGIC!r}")
        if version != PROTOCOL_VERSION:
            text = f"protocol version {version}; this side speaks {PROTOCOL_VERSION}"
            raise InvalidMessageError("version", text)
        if run_id != self._run_id:
            text = f"run {run_id.hex()}; this side takes part in {self._run_id.hex()}"
            raise InvalidMessageError("run", text)
        last = self._last_sequence.get(sender, -1)
        if sequence <= last:
            text = f"message {sequence} of {sender!r} after its message {last}"
            raise InvalidMessageError("replayed", text)
        return sequence


def _check_sizes(kind: str, body: Buffer, payload: Sequence[Buffer]) -> None:
    if len(body) > MAX_MESSAGE_BYTES:
        text = f"{kind}: the body has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} are allowed"
        raise InvalidMessageError("oversized", text)
    largest = max((memoryview(frame).nbytes for frame in payload), default=0)
    if largest > MAX_PAYLOAD_BYTES:
        text = (
            f"{kind}: a payload frame has {largest} bytes, at most {MAX_PAYLOAD_BYTES} are allowed"
        )
        raise InvalidMessageError("oversized", text)


def _fields(record: object) -> dict[str, Any]:
    """Return one level of a record; msgpack comes back for the records inside."""
    assert is_dataclass(record), f"{record!r} cannot travel in a message"
    return {name: getattr(record, name) for name in _names(type(record))}


@cache
def _names(record_type: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record_type))


# -- reading by declared type -------------------------------------------------------------------


def unpack_body(body: Buffer) -> Message:
    """Return the message that ``pack_body`` packed.

    Raises:
        InvalidMessageError: the bytes are not one whole message.
    """
    try:
        record = msgpack.unpackb(
            body,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
        )
    except ValueError as error:  # msgpack's own errors, and text that is not UTF-8
        raise InvalidMessageError("malformed", f"not one msgpack value: {error!r}") from error
    if not isinstance(record, dict):
        _refuse(record, "a map", "message")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidMessageError("unknown kind", f"kind {kind!r:.100} is none of messages.py")
    return _reader(_KINDS[kind])(record, kind)


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    # An empty extension passes max_ext_len.
    raise ValueError(f"extension type {code} of {len(data)} bytes")


@cache
def _reader(declared: Any) -> _Read:
    """Return the function ``(value, path) -> checked value`` for one declared type."""
    if is_dataclass(declared):
        return _record_reader(declared)
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is UnionType and arguments[1:] == (NoneType,):
        return _optional_reader(_reader(arguments[0]))
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_reader(_reader(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _dict_reader(_reader(arguments[1]))
    if declared is float:
        return _read_float
    assert declared in (int, str, bytes, bool), f"no wire form for a field of type {declared}"
    return _scalar_reader(declared)


def _record_reader(record_type: Any) -> _Read:
    declared = get_type_hints(record_type)
    readers = {field.name: _reader(declared[field.name]) for field in fields(record_type)}
    required = {
        field.name
        for field in fields(record_type)
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(value: object, path: _Path) -> Any:
        if not isinstance(value, dict):
            _refuse(value, f"a map of {record_type.__name__}", path)
        if not required <= value.keys():
            missing = ", ".join(sorted(required - value.keys()))
            raise InvalidMessageError("malformed", f"{_in_words(path)}: no {missing}")
        checked = {
            name: reader(value[name], (path, name))
            for name, reader in readers.items()
            if name in value
        }
        try:
            return record_type(**checked)
        except ValueError as error:  # the record's own rule, in its __post_init__
            raise InvalidMessageError("malformed", f"{_in_words(path)}: {error}") from error

    return read


def _optional_reader(inner: _Read) -> _Read:
    return lambda value, path: None if value is None else inner(value, path)


def _tuple_reader(element: _Read) -> _Read:
    def read(value: object, path: _Path) -> tuple[Any, ...]:
        if not isinstance(value, list):
            _refuse(value, "an array", path)
        return tuple([element(item, (path, index)) for index, item in enumerate(value)])

    return read


def _dict_reader(element: _Read) -> _Read:
    def read(value: object, path: _Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            _refuse(value, "a map", path)
        if not all(isinstance(key, str) for key in value):
            _refuse(value, "a map with str keys", path)
        return {key: element(item, (path, f"[{key!r:.100}]")) for key, item in value.items()}

    return read


def _read_float(value: object, path: _Path) -> float:
    if type(value) is not float and type(value) is not int:
        _refuse(value, "float", path)
    return float(value)


def _scalar_reader(scalar: type) -> _Read:
    def read(value: object, path: _Path) -> Any:
        if type(value) is not scalar:  # not isinstance: True is an int
            _refuse(value, scalar.__name__, path)
        return value

    return read


def _refuse(value: object, expected: str, path: _Path) -> NoReturn:
    found = f"{type(value).__name__} {value!r:.100}"
    text = f"{_in_words(path)}: expected {expected}, got {found}"
    raise InvalidMessageError("malformed", text)


def _in_words(path: _Path) -> str:
    if isinstance(path, str):
        return path
    container, place = path
    if isinstance(place, int):
        return f"{_in_words(container)}[{place}]"
    joint = "" if str(place).startswith("[") else "."
    return f"{_in_words(container)}{joint}{place}"
