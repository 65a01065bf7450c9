"""The tensors that users get of an optimizer's state: p, a moment, or a view of one.

They are on memory that the optimizer process writes during training. So each access to their
values, also through a handle or a view kept for many steps, first waits for the update in flight.
The optimizer's own tensors are never handed out.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_ext.errors import StateError

__all__ = ["ShownTensor", "nan_like", "plain"]


class ShownTensor(torch.Tensor):
    """A tensor of the optimizer's state that a user may keep, on the host.

    Any operation that uses its values waits for the update in flight, and the next step starts from
    the values that it leaves. What only describes it is no operation, such as ``shape``,
    ``is_pinned()`` or ``data_ptr()``, and views are of this class, too; all other results, and
    pickled or deep copies, are plain tensors. Later accesses by address are not noticed:
    ``numpy()``, DLPack.
    """

    shown_by: weakref.ref[Any]
    """The `StateStore`."""
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, tensor: torch.Tensor, shown_by: weakref.ref[Any]) -> ShownTensor:
        """Another tensor on the memory of `tensor`, a plain one."""
        made: ShownTensor = torch.Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        made.shown_by = shown_by
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shown = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        with torch._C._DisableTorchDispatch():
            if func.is_view or func is torch.ops.aten.is_pinned.default:
                of = partial(cls.of, shown_by=shown[0].shown_by)
                return tree_map_only(torch.Tensor, of, func(*args, **kwargs))
            schema = func._schema.arguments
            named = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
            written = tree_leaves([named.get(each.name) for each in schema if each.is_write])
            writes = any(isinstance(each, cls) for each in written)
            for shown_by in {each.shown_by for each in shown}:
                _used(shown_by, writes=writes)
            return func(*args, **kwargs)

    def _used(self) -> torch.Tensor:
        """A plain tensor on the same memory, for what is no operation."""
        _used(self.shown_by, writes=False)
        return plain(self)

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        return plain(self).is_pinned(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._used().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._used().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._used())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._used().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._used().detach().clone().requires_grad_(self.requires_grad)
        copied: torch.Tensor = memo[id(self)]
        return copied


def _used(shown_by: weakref.ref[Any], *, writes: bool) -> None:
    if (owner := shown_by()) is None or not owner.is_open:
        raise StateError(
            "the engine of this optimizer state was destroyed, which frees p and the moments: copy "
            "what you need of them before engine.destroy()"
        )
    owner.used(writes=writes)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the same memory; valid while nothing is in flight."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in the place of values that a failed worker has lost."""
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device="cpu")
