"""Documents that are half written by hand: what stands between two marks is replaced."""

from __future__ import annotations

import re

__all__ = ["between_marks"]


def between_marks(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between ``<!-- name -->`` and ``<!-- end of name -->``."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(text), f"the document has no marks for {name}"
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)
