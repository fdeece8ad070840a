"""The `Cache` that `generate` is given: its layers write to the store's slab and read back from it.

Two ways of attending. With the model's own attention (eager, sdpa) `update` returns all that a layer has to see, as
transformers' DynamicCache does, gathered from the blocks; INT4 blocks are decoded on the way. With the paged attention
function `update` returns what it was given, and the function reads the blocks where they lie.

Used by one thread, the one that runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from allocator import GroupKind, IntegrityError, UsageError
from engine_adapter.transformers_cache.passes import ForwardPass

if TYPE_CHECKING:
    from engine_adapter.transformers_cache.rows import Rows


class StoreLayer(CacheLayerMixin):  # type: ignore[misc] # untyped
    """What transformers asks of one layer: lengths and mask sizes. KV goes through `StoreCache.update`."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: Rows, window_tokens: int | None) -> None:
        super().__init__()
        self._rows = rows
        self._window_tokens = window_tokens
        self.is_sliding = window_tokens is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the store's."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("update the cache, not its layer: StoreCache.update(keys, values, layer)")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that attention sees, the first of them)."""
        first = first_column(self._rows.columns, self._window_tokens)
        return self._rows.columns + query_length - first, first

    def get_seq_length(self) -> int:
        return self._rows.columns

    def get_max_length(self) -> int:
        return -1 if self._window_tokens is None else self._window_tokens


def first_column(columns: int, window_tokens: int | None) -> int:
    """The first of `columns` past columns that the next token can see."""
    return 0 if window_tokens is None else max(columns - window_tokens + 1, 0)


class StoreCache(Cache):  # type: ignore[misc] # untyped
    """A cache over the store, made by `ModelStore.cache()`. For one call of `generate`, or several that continue it.

    It ends when it is dropped, or with `finish()`: then its tokens stay in the store, as hits for later calls.
    """

    def __init__(self, rows: Rows, windows: Mapping[int, int | None], layer_count: int) -> None:
        """windows: of each layer that has KV of its own; the others of the `layer_count` reuse another's."""
        super().__init__(
            layers=[
                StoreLayer(rows, windows[layer]) if layer in windows else DummyLayer() for layer in range(layer_count)
            ]
        )
        self.rows = rows
        self.running: ForwardPass | None = None

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens, over all rows, whose KV was found in the store and not computed."""
        return sum(row.reused for row in self.rows.rows)

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """Where they came from; their sum is `reused_tokens`."""
        return self.rows.by_tier

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write KV of the running pass in one layer; returns what the layer's attention has to see.

        key_states: Tensor[rows, kv_heads, tokens, key_dim], value_states likewise (of a latent layer: latent and rope).
        """
        step = self.running
        if step is None and self.rows.is_closed:
            raise UsageError("the ModelStore of this cache is closed")
        if step is None:
            raise UsageError(
                "this cache is used outside a forward pass of the model that its ModelStore was opened for"
            )
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise UsageError("the store keeps no gradients; run the model under torch.no_grad()")
        if layer_idx in step.reached:
            raise IntegrityError(f"layer {layer_idx} updates the cache twice in one pass")
        step.reached.add(layer_idx)
        if step.kind_of(layer_idx) is not GroupKind.LATENT:
            return step.update(layer_idx, key_states, value_states)
        both = torch.cat((key_states, value_states), -1)
        seen, _ = step.update(layer_idx, both, None)
        latent, rope = seen.split((key_states.shape[-1], value_states.shape[-1]), -1)
        return latent, rope

    # ---- what generate does to a cache as a whole

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a negative count, as transformers has it."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop({tokens_to_remove}): expected a negative count of tokens to remove")
        if tokens_to_remove:
            self.rows.cut(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row beam_idx[i] was. Blocks are shared, nothing is copied."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        if repeats < 1:
            raise UsageError(f"batch_repeat_interleave({repeats}): expected 1 or more")
        self._take([row for row in range(len(self.rows.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; an index or a mask of rows."""
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        count = len(self.rows.rows)
        self._take([index + count if index < 0 else index for index in indices.tolist()])

    def reset(self) -> None:
        """Begin anew with the same object: what it computed stays findable."""
        self.finish()

    def finish(self) -> None:
        """End the sequences of this cache; dropping the object does the same."""
        self.rows.finish()

    def activate_past_recording(self) -> None:
        """Nothing to do: what the last pass wrote can always be taken back, windows included."""

    def _take(self, sources: list[int]) -> None:
        if self.rows.rows:
            self.rows.take(sources)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError("a StoreCache cannot be copied; begin the shared prompt again: it is found in the store")
