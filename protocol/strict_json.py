"""Turns plain values into JSON that every reader takes; nothing else.

Python's own encoder writes ``NaN`` and ``Infinity``, which are no JSON and which a loss can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["json_text"]


def json_text(value: Any) -> str:
    """Return ``value`` as one line of JSON, with ``null`` for NaN and infinities.

    Args:
        value: of mappings, sequences, strings, numbers, booleans and None.
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):  # seldom: the other way is far slower
        return json.dumps(_strict(value), allow_nan=False, ensure_ascii=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(item) for item in value]
    return value
