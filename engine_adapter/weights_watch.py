"""Notices that a model was converted (`half`, `to`, parameters put in others' place) after its weights were named.

What it computes then is not what the name says, and would be shared under it. Asked before each pass, on the model's
thread. What is written into parameters where they lie is not noticed: `KVStore.reset` is for that.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from allocator import UsageError

_LAYER = re.compile(r"\.(\d+)\.")


class _Witness(NamedTuple):
    """A parameter as it was, among its module's. storage is held, so that nothing else can come to lie there."""

    name: str
    among: dict[str, Any]
    attribute: str
    dtype: torch.dtype
    address: int
    storage: torch.UntypedStorage


class WeightsWatch:
    """The smallest parameter of each layer, and of what is in no layer, stands for the others."""

    def __init__(self, model: torch.nn.Module) -> None:
        smallest: dict[str, tuple[int, str]] = {}
        for name, parameter in model.named_parameters():
            if type(parameter) is torch.nn.Parameter:  # quantised ones may have no storage to look at
                layer = _LAYER.search(name)
                place = layer[1] if layer else ""
                smallest[place] = min(smallest.get(place, (parameter.numel(), name)), (parameter.numel(), name))
        self._witnesses = [_witness(model, name) for _, name in smallest.values()]

    def check(self, expected: str) -> None:
        """UsageError where the model is not what it was: what was found, and what is expected instead."""
        for one in self._witnesses:
            now = one.among.get(one.attribute)
            if now is None or now.dtype != one.dtype or now.data_ptr() != one.address:
                there = "gone" if now is None else f"{now.dtype}, at another place"
                raise UsageError(
                    f"the model was converted after its weights were named: {one.name} was {one.dtype} and is now "
                    f"{there}; KV of the one would be taken for the other's. Expected {expected}"
                )

    def renewed(self, model: torch.nn.Module) -> WeightsWatch:
        """For the parameters as they are now, where these are meant. The dtype is part of the name, and stays."""
        found = WeightsWatch(model)
        dtypes = {one.name: one.dtype for one in self._witnesses}
        return found if {one.name: one.dtype for one in found._witnesses} == dtypes else self


def _witness(model: torch.nn.Module, name: str) -> _Witness:
    owner, _, attribute = name.rpartition(".")
    among = model.get_submodule(owner)._parameters
    parameter: Any = among[attribute]
    return _Witness(name, among, attribute, parameter.dtype, parameter.data_ptr(), parameter.untyped_storage())
