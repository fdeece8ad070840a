"""What the decode loop asks of a model runner, and checks: its shape, the memory it is attached to, its adapters.

Called by the decode loop's thread. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from allocator.errors import ConfigError, UsageError
from kvstore.identity import Adapter

if TYPE_CHECKING:
    from torch import Tensor

    from allocator import KVGeometry, Slab
    from engine_adapter.batch import StepBatch
    from engine_adapter.request import Request
    from kvstore import KVStore
    from kvstore.identity import Identity


@runtime_checkable
class Runner(Protocol):
    """A model over paged KV. `forward` writes the KV of every fed token to its place before anything reads it.

    One that has them is also asked for `cold_codec` (must be the store's), `calls_before_layer` (see EarlyPrefill) and
    `switches_adapters`: False, or none, where it computes with nothing but the adapter of the store's identity.
    """

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def position_limit(self) -> int | None:
        """Most tokens that a sequence may have, None without a limit."""
        ...

    @property
    def slab(self) -> Slab | None:
        """Where it reads and writes KV now: must be the store's."""
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits Tensor[sum of logits_count, vocab_size], rows in the order of the slices and their tokens.

        Raises SliceError for sequences that it cannot compute, whoever is beside them.
        """
        ...


def check_attached(runner: Runner, store: KVStore) -> None:
    """A runner over another slab would read and write KV that the store knows nothing of, under the store's names."""
    wanted, codec = store.slab, store.cold_codec
    found = runner.slab
    if found is not wanted or getattr(runner, "cold_codec", codec) is not codec:
        given = f"{found!r} with {getattr(runner, 'cold_codec', codec)!r}"
        raise ConfigError(
            f"the runner is attached to {given}; expected the store's {wanted!r} with {codec!r}: "
            "call runner.attach(store.slab, store.cold_codec)"
        )


def adapter_to_use(runner: Runner, own: Identity, request: Request) -> Adapter | None:
    """What the runner is to switch to for a request of a store of `own`; None where it cannot switch and need not."""
    usual = Adapter.of(own.adapter)
    wanted = usual if request.adapter is None else Adapter.of(request.adapter)
    if getattr(runner, "switches_adapters", False):
        return wanted
    if wanted != usual:
        raise UsageError(
            f"request {request.request_id!r}: got {wanted}; this runner computes with {usual} only. Expected "
            "HFRunner(use_adapter=...), which switches, or one adapter for all, in the store's Identity"
        )
    return None
