"""Building a message of which it is already known that the contract admits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

_Message = TypeVar("_Message")


def trusted(kind: type[_Message], values: Iterable[Any]) -> _Message:
    """Build a frozen message with slots without checking it again.

    Only for values that passed a check which admits nothing that ``checks`` refuses; arrays are
    read-only.

    Args:
        kind: One of the dataclasses of ``schemas``.
        values: Of all its fields, in their order.
    """
    message = object.__new__(kind)
    slots: Any = _slots  # mypy doubts that a class can be looked up
    for fill, value in zip(slots(kind), values, strict=True):
        fill(message, value)
    return message


@cache
def _slots(kind: Any) -> tuple[Callable[[Any, Any], None], ...]:
    return tuple(getattr(kind, name).__set__ for name in kind.__dataclass_fields__)
