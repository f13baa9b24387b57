"""Plain values of Avro records: arrays as little-endian bytes, times, enumerations, pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.events import DrafterVersion

Record: TypeAlias = dict[str, Any]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

INT16, INT32 = np.dtype("<i2"), np.dtype("<i4")
FLOAT16, FLOAT32, FLOAT64 = np.dtype("<f2"), np.dtype("<f4"), np.dtype("<f8")

_Choice = TypeVar("_Choice", bound=StrEnum)


def microseconds(moment: datetime) -> int:
    """Return microseconds since 1970 (UTC), exactly."""
    return (moment - EPOCH) // _MICROSECOND


def choice(path: str, kind: type[_Choice], value: str) -> _Choice:
    """Return the member of an enumeration, refusing a name it does not have."""
    try:
        return kind(value)
    except ValueError:
        expected = f"one of {[member.value for member in kind]}"
        raise ContractError(path, found=repr(value), expected=expected) from None


def array_from_bytes(
    path: str, data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """View little-endian bytes as a read-only array of native order.

    Raises:
        ContractError: If the number of bytes is not what ``shape`` needs.
    """
    needed = dtype.itemsize * (shape[0] if len(shape) == 1 else math.prod(shape))
    if len(data) != needed:
        raise ContractError(
            path, found=f"{len(data)} bytes", expected=f"{needed} bytes for {dtype.name}{shape}"
        )
    try:
        values: NDArray[Any] = np.ndarray(shape, dtype, data)
    except ValueError as error:
        # An empty array may claim a shape that no array can have.
        raise ContractError(path, found=f"shape {shape}", expected=str(error)) from error
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def array_to_bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Return the elements as row-major bytes of ``dtype``."""
    return values.astype(dtype, copy=False).tobytes()


def num_elements(path: str, data: bytes, dtype: np.dtype[Any]) -> int:
    """Return the number of elements, refusing bytes that end within one."""
    count, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise ContractError(
            path, found=f"{len(data)} bytes", expected=f"a multiple of {dtype.itemsize} bytes"
        )
    return count


def drafters_to_records(drafters: Sequence[DrafterVersion]) -> list[Record]:
    """Return the Avro records of a pool."""
    return [
        {
            "drafter_id": drafter.drafter_id,
            "weights_version": drafter.weights_version,
            "draft_vocabulary_hash": drafter.draft_vocabulary_hash,
        }
        for drafter in drafters
    ]


def drafters_from_records(records: Sequence[Record]) -> tuple[DrafterVersion, ...]:
    """Build a pool; a refusal names the drafter's place in it."""
    return _pool(tuple([tuple(map(record.__getitem__, _DRAFTER_FIELDS)) for record in records]))


_DRAFTER_FIELDS = ("drafter_id", "weights_version", "draft_vocabulary_hash")


@lru_cache(maxsize=256)
def _pool(values: tuple[tuple[Any, ...], ...]) -> tuple[DrafterVersion, ...]:
    """Build a pool once: thousands of events name the same one."""
    drafters = []
    for index, fields in enumerate(values):
        try:
            drafters.append(DrafterVersion(**dict(zip(_DRAFTER_FIELDS, fields, strict=True))))
        except ContractError as error:
            raise error.under(f"drafters[{index}]") from error
    return tuple(drafters)
