"""Compilation of the kernels that the live learner, replay and benchmarks share.

Kernels are plain loops over arrays, without clock, generator or I/O, and run without the
interpreter's lock. numba compiles them at their first use and keeps the result in a cache. It does
not notice when a kernel's callee in another file changes, so the cache is one folder per state of
this package's sources.

A policy's two kernels have fixed signatures, so that ``kernels`` takes them as function pointers:

- ``learn(table, numbers, losses)``: one window, losses (N,) in [0, 1], no NaN;
- ``learn_round(table, numbers, index, probability, length_loss, agreement_loss)``: one round of
  the drafter that was played.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types

TABLE = types.float64[:, ::1]
VECTOR = types.float64[::1]

LEARN = types.void(TABLE, VECTOR, VECTOR)
LEARN_ROUND = types.void(TABLE, VECTOR, types.int64, types.float64, types.float64, types.float64)

SOURCES = Path(__file__).resolve().parents[1]
DEFAULT_CACHE = Path.home() / ".cache" / "draftloop" / "kernels"
"""Where compiled kernels are kept unless numba's own setting NUMBA_CACHE_DIR names a folder."""

Kernel = Callable[..., Any]
F = TypeVar("F", bound=Kernel)


def sources_digest(folder: Path) -> str:
    """Return a digest of all Python files below ``folder``: equal sources, equal machine code."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _keep_apart() -> None:
    """Let numba cache below a folder of these sources."""
    config: Any = numba.config
    config.CACHE_DIR = str(Path(config.CACHE_DIR or DEFAULT_CACHE) / sources_digest(SOURCES))


_keep_apart()


def compiled(function: F) -> F:
    """Compile ``function`` at its first call, for whatever types it is called with."""
    return cast("F", _jit(function, None))


@cache
def pointer(function: Kernel, signature: Any) -> Kernel:
    """Return ``function`` compiled for one signature, once per process."""
    return _jit(function, signature)


class FunctionAddress:
    """A kernel as an argument of compiled code.

    numba also takes the compiled function itself, but then looks its machine code up anew at every
    call, which costs more than a short walk.
    """

    def __init__(self, function: Kernel, signature: Any) -> None:
        made: Any = pointer(function, signature)
        self._numba_type_ = types.FunctionType(signature)
        self._library = made.overloads[made.signatures[0]].library  # keeps the code alive
        name = made.overloads[made.signatures[0]].fndesc.llvm_cfunc_wrapper_name
        self._address = int(self._library.get_pointer_to_function(name))

    def __wrapper_address__(self) -> int:
        return self._address


@cache
def address(function: Kernel, signature: Any) -> FunctionAddress:
    """Return ``function`` compiled for one signature, to be passed to compiled code."""
    return FunctionAddress(function, signature)


def _jit(function: Kernel, signature: Any) -> Kernel:
    jit: Callable[..., Any] = numba.njit
    arguments = () if signature is None else (signature,)
    try:
        made = jit(*arguments, cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # No folder for a cache, as in a container without a writable home.
        made = jit(*arguments, nogil=True, error_model="numpy")(function)
    return cast("Kernel", made)
