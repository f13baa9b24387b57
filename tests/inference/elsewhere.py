"""A device that is not the CPU's, on a machine that has none.

Tensors that say they lie elsewhere are computed by the CPU, but as strictly as a real accelerator
would take them: no operation may mix them with tensors of the CPU (except where torch copies by
itself), and numpy cannot see them. Code that passes here has no hidden wish for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("lazy")
"""Nothing is registered for this type, so whatever escapes the disguise fails loudly."""

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._copy_from.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default}
"""Torch moves indices of the CPU to the indexed tensor by itself."""


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that says it lies elsewhere."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        """Dress a tensor up."""
        with torch.inference_mode(False):  # a view of a plain tensor must be plain itself
            made: Elsewhere = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=ELSEWHERE,
            )
        made.held = inner
        return made

    def tolist(self) -> Any:
        """Copy to the CPU, as every device does here."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute as ``_Devices`` does, where no mode is active (in the backward pass)."""
        return _computed(func, args, kwargs or {})


class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes every operation, those without tensors too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """Takes what turns Python values into tensors, which torch does below its dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            device = kwargs.pop("device", None) or torch.device("cpu")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Have a device for the length of the block."""
    with _Constructors(), _Devices():  # type: ignore[no-untyped-call]
        yield ELSEWHERE


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = tree_flatten((args, kwargs))[0]
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    devices = [one for one in given if isinstance(one, torch.device)]
    is_there = any(isinstance(one, Elsewhere) for one in tensors)
    if devices:
        is_there = devices[0] == ELSEWHERE
    elif func not in _COPIES:
        _refuse_mixture(func, tensors, is_there)
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.is_mutable:
        return args[0]
    return tree_map(_dressed, found) if is_there else found


def _refuse_mixture(func: Any, tensors: list[torch.Tensor], is_there: bool) -> None:
    if func in _INDEXED and isinstance(tensors[0], Elsewhere):
        return
    if is_there and any(not isinstance(one, Elsewhere) and one.dim() for one in tensors):
        raise RuntimeError(f"{func}: tensors of two devices")


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, Elsewhere) else value


def _dressed(value: Any) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere)
    return Elsewhere(value) if is_plain else value
