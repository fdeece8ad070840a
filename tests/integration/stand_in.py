"""A device for torch that is not the CPU and needs no card: its tensors' bytes lie here, out of reach but by copies.

`open_device()` makes "card:0" known to torch for the rest of the process, so only a process that does nothing else may
call it. An operation between one of its tensors and a CPU tensor of at least one dimension raises, as CUDA does;
copies cross, and so do indices. `numpy()` and `data_ptr()` do not work on it, as on a card. What it cannot show is
order: everything is done at once, there are no streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "card:0"
_aten = torch.ops.aten
_CROSSING = {
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
}


class CardTensor(torch.Tensor):
    """What torch sees: a tensor of that device. `held` is the CPU tensor that does the work."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> CardTensor:
        made: CardTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE),
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, CardTensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, CardTensor) and tensor.dim()]
    if ours and strangers and op not in _CROSSING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got {DEVICE} and cpu")
    wanted = kwargs.get("device")
    here = bool(ours) if wanted is None else torch.device(wanted).type != "cpu"
    if op is _aten.copy_.default:
        here = isinstance(args[0], CardTensor)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = op(*tree_map(_held, args), **tree_map(_held, kwargs))
    if not here:
        return args[0] if op is _aten.copy_.default else found
    known = {id(tensor.held): tensor for tensor in ours}
    return tree_map(lambda leaf: _card_tensor(leaf, known), found)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, CardTensor) else leaf


def _card_tensor(leaf: Any, known: dict[int, CardTensor]) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, CardTensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else CardTensor(leaf)


def _made_here(make: Any) -> Any:
    def made(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        tensor: torch.Tensor = make(data, dtype=dtype)
        return tensor if device is None else tensor.to(device)

    return made


_kept: list[torch.library.Library] = []


def open_device() -> str:
    """Make the device known to torch; its name. Some of torch's ways are bent for the whole process:

    `inference_mode` becomes `no_grad`, since wrapped tensors cannot be inference tensors; `tolist` copies first;
    `tensor` and `as_tensor` make theirs on the CPU and copy.
    """
    if _kept:
        return DEVICE
    _setup_privateuseone_for_python_backend(DEVICE.partition(":")[0])
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _kept.append(library)
    torch.tensor, torch.as_tensor = _made_here(torch.tensor), _made_here(torch.as_tensor)
    plain_list = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: plain_list(tensor.cpu())  # type: ignore[assignment, method-assign]
    torch.inference_mode = torch.no_grad  # type: ignore[assignment, misc]
    return DEVICE
