"""Exact comparison of messages, which dataclasses that hold arrays cannot do with ``==``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def same_message(left: object, right: object) -> bool:
    """Tell whether two messages are equal in every field; NaN equals NaN."""
    return first_difference(left, right) is None


def first_difference(left: Any, right: Any, path: str = "message") -> str | None:
    """Return where two messages differ first, with both values, or None if they are equal."""
    if type(left) is not type(right):
        return f"{path}: {type(left).__name__} is not {type(right).__name__}"
    if is_dataclass(left):
        children = {field.name: field.name for field in fields(left)}
        return _first_of(
            (f"{path}.{name}", getattr(left, name), getattr(right, name)) for name in children
        )
    if isinstance(left, np.ndarray):
        return _array_difference(left, right, path)
    if isinstance(left, Mapping) and left.keys() == right.keys():
        return _first_of((f"{path}[{key!r}]", left[key], right[key]) for key in left)
    if isinstance(left, tuple | list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return _first_of((f"{path}[{index}]", one, other) for index, (one, other) in pairs)
    is_same = left == right or (left != left and right != right)
    return None if is_same else f"{path}: {left!r} is not {right!r}"


def _first_of(triples: Any) -> str | None:
    for path, left, right in triples:
        difference = first_difference(left, right, path)
        if difference is not None:
            return difference
    return None


def _array_difference(left: Any, right: Any, path: str) -> str | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{path}: {left.dtype}{left.shape} is not {right.dtype}{right.shape}"
    same = left == right
    if left.dtype.kind == "f":
        same |= np.isnan(left) & np.isnan(right)
    if np.all(same):
        return None
    index = tuple(int(i) for i in np.argwhere(~np.asarray(same))[0])
    where = "".join(f"[{i}]" for i in index)
    return f"{path}{where}: {left[index]} is not {right[index]}"
