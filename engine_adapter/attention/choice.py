"""What the attention backends offer to the dispatch: which of them runs decode and prefill, on which device.

`kvstore doctor` calls `offer_attention` through an entry point; `get_backend` asks here when it is given no name.
Imports no torch: whether a backend runs is asked of the dispatch, and only the chosen one is loaded.
"""

from __future__ import annotations

from functools import partial

from quant.dispatch import (
    Implementation,
    cuda_absence,
    implementation_of,
    module_absence,
    native_absence,
    native_variant,
    offer,
)

DECODE, PREFILL = "decode_attention", "prefill_attention"
_TRITON = "engine_adapter.attention.triton_paged"


def best_backend(device: str = "cpu") -> str:
    """Name of the backend that decodes on a torch device ("cpu", "cuda:0"); "torch" where nothing else is offered."""
    kind = device.partition(":")[0]
    found = implementation_of(DECODE, kind) if kind in ("cpu", "cuda") else "torch"
    return "torch" if found == "none" else found


def offer_attention() -> None:
    """Offer what this package has. Called once, when the package of the backends is imported."""
    native = Implementation("native", partial(native_absence, "attend"), native_variant)
    triton = Implementation("triton", _triton_absence)
    for operation in (DECODE, PREFILL):
        offer(operation, "cpu", [native, Implementation("torch")])
    offer(DECODE, "cuda", [triton, Implementation("torch", cuda_absence)])
    offer(PREFILL, "cuda", [Implementation("torch", cuda_absence)])


def _native_absence() -> str:
    return native_absence("attend", "write_tokens")


def _triton_absence() -> str:
    return cuda_absence() or module_absence(_TRITON, "triton")
