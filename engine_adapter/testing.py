"""A toy model with exact arithmetic, for tests of anything that manages KV: public, so that other adapters can use it.

`ToyRunner` writes its keys and values into the real slab through the slot mappings of a step and reads everything it
attends to back through the block tables. All values are small integers (exact in the slab's dtype) and every next token
depends on every channel of every visible position of every layer, weighted by distance, so one stale, shifted, foreign,
half-copied or dropped block changes the output. `toy_generate` computes the same without any cache: the oracle.
Single-threaded, CPU only, no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator import COLD, ConfigError, IntegrityError
from engine_adapter.batch import FORM_INT4, SequenceSlice, StepBatch

if TYPE_CHECKING:
    from allocator import CacheGroup, KVGeometry, Slab
    from kvstore import KVStore

Ints = NDArray[np.int64]
ColdReader = Callable[[int, int], tuple[Tensor, "Tensor | None"]]
"""(group, INT4 slot) -> keys Tensor[layers, kv_heads, block_tokens, key_dim], values likewise or None."""

_LARGEST_EXACT = {"float32": 65521, "bfloat16": 251, "float16": 2039}


@dataclass(frozen=True, slots=True)
class ToyModel:
    """The arithmetic, modulo a prime: embedding, keys and values, attention, logits. Knows nothing of blocks."""

    geometry: KVGeometry
    vocab_size: int = 97

    @property
    def modulus(self) -> int:
        """The largest prime below which every integer is exact in the geometry's dtype."""
        try:
            return _LARGEST_EXACT[self.geometry.dtype]
        except KeyError:
            expected = sorted(_LARGEST_EXACT)
            raise ConfigError(f"the toy model is exact in {expected}, got {self.geometry.dtype}") from None

    @property
    def layer_count(self) -> int:
        return sum(len(group.layers) for group in self.geometry.groups)

    def group_of(self, layer: int) -> CacheGroup:
        return self.geometry.groups[self.geometry.group_of_layer(layer)[0]]

    def embed(self, token_ids: Ints, positions: Ints) -> Ints:
        """States int64[n] that enter layer 0."""
        return (token_ids * 40503 + positions * 26543 + token_ids * positions * 77 + 12345) % self.modulus

    def channels(self, states: Ints, layer: int, width: int, salt: int) -> Ints:
        """Keys or values of a layer: int64[n, width], each channel another function of the state."""
        index = np.arange(width, dtype=np.int64)
        return (states[:, None] * (2 * index + 3) + layer * 7919 + index * 10473 + salt) % self.modulus

    def summary(self, channels: Ints, layer: int, salt: int) -> Ints:
        """What attention sees of the channels int64[n, width] of each position: int64[n]; no channel has weight 0."""
        index = np.arange(channels.shape[1], dtype=np.int64)
        weights = (index * index * 131 + index * 37 + layer * 11 + salt) % (self.modulus - 1) + 1
        return (channels @ weights) % self.modulus

    def distance_weights(self, distances: Ints, window_tokens: int | None) -> Ints:
        """Weight of a position `distances` tokens back: 0 ahead of the query and beyond the window, else at least 1."""
        weights = (distances * distances * 3 + distances * 31 + 7) % (self.modulus - 1) + 1
        visible = distances >= 0
        if window_tokens is not None:
            visible &= distances < window_tokens
        return np.where(visible, weights, 0)

    def next_states(self, states: Ints, attended: Ints, layer: int) -> Ints:
        return (states * 48271 + attended * 6961 + layer + 1) % self.modulus

    def logits(self, states: Ints) -> NDArray[np.float32]:
        """float32[n, vocab]: the state's residue is the clear first choice; the rest of the state sets the slope."""
        tokens = np.arange(self.vocab_size, dtype=np.int64)
        ahead = (tokens[None, :] - states[:, None]) % self.vocab_size
        slope = 0.5 + (states // self.vocab_size % 512) / 1024
        return (-slope[:, None] * ahead).astype(np.float32)


class ToyRunner:
    """Runs `ToyModel` over a slab, as a real runner would: per layer all slices write, then all slices read."""

    calls_before_layer = True

    def __init__(
        self, geometry: KVGeometry, slab: Slab, *, vocab_size: int = 97, read_cold: ColdReader | None = None
    ) -> None:
        self.model = ToyModel(geometry, vocab_size)
        self.position_limit: int | None = None
        self.forward_count = 0
        self.computed_tokens = 0
        self.slab = slab
        self._read_cold = read_cold

    @classmethod
    def over(cls, store: KVStore, *, vocab_size: int = 97) -> ToyRunner:
        """A runner over the store's slab that also reads INT4 blocks (then no longer exact)."""
        slab, codec = store.slab, store.cold_codec
        if slab is None:
            raise ConfigError("the toy runner needs a store with device bytes; this one has none")
        if codec is None:
            return cls(store.geometry, slab, vocab_size=vocab_size)

        def read_cold(group: int, slot: int) -> tuple[Tensor, Tensor | None]:
            return decode_cold_slot(store, group, slot)

        return cls(store.geometry, slab, vocab_size=vocab_size, read_cold=read_cold)

    @property
    def geometry(self) -> KVGeometry:
        return self.model.geometry

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits float32[sum of logits_count, vocab]. Raises IntegrityError for a table that cannot be right."""
        self.forward_count += 1
        self.computed_tokens += batch.token_count
        self._check_writes(batch)
        states = [
            self.model.embed(np.asarray(part.token_ids, dtype=np.int64), np.arange(part.start, part.end))
            for part in batch
        ]
        for layer in range(self.model.layer_count):
            for part, state in zip(batch, states, strict=True):
                self._write(part, state, layer)
            if batch.before_layer is not None:
                batch.before_layer(layer)
            for place, part in enumerate(batch):
                states[place] = self._attend(part, states[place], layer)
        rows = [state[len(state) - part.logits_count :] for part, state in zip(batch, states, strict=True)]
        return torch.from_numpy(self.model.logits(np.concatenate(rows)))

    def _check_writes(self, batch: StepBatch) -> None:
        """Every token goes where its own table says, into full precision, and no two tokens go to one place."""
        block_tokens = self.geometry.block_tokens
        for group in range(len(self.geometry.groups)):
            for part in batch:
                positions = np.arange(part.start, part.end)
                entries = part.tables[group][positions // block_tokens]
                expected = (entries >> 1) * block_tokens + positions % block_tokens
                if (entries < 0).any() or (entries & 1).any() or (expected != part.slot_mappings[group]).any():
                    raise IntegrityError(
                        f"{part.sequence_id}: positions {part.start}..{part.end - 1} of group {group} have entries "
                        f"{entries.tolist()} and places {part.slot_mappings[group].tolist()}"
                    )
            places = np.concatenate([part.slot_mappings[group] for part in batch])
            if len(np.unique(places)) != len(places):
                raise IntegrityError(f"two tokens of one step are written to one place of group {group}")

    def _write(self, part: SequenceSlice, states: Ints, layer: int) -> None:
        group_index, inside = self.geometry.group_of_layer(layer)
        group, block_tokens = self.geometry.groups[group_index], self.geometry.block_tokens
        slots, offsets = np.divmod(part.slot_mappings[group_index], block_tokens)
        where = (torch.from_numpy(slots), inside, slice(None), torch.from_numpy(offsets))
        keys = self.model.channels(states, layer, group.kv_heads * group.key_dim, 1)
        view = self.slab.keys_view(group_index)
        view[where] = torch.from_numpy(keys).reshape(-1, group.kv_heads, group.key_dim).to(view.dtype)
        if group.value_dim:
            values = self.model.channels(states, layer, group.kv_heads * group.value_dim, 2)
            view = self.slab.values_view(group_index)
            view[where] = torch.from_numpy(values).reshape(-1, group.kv_heads, group.value_dim).to(view.dtype)

    def _attend(self, part: SequenceSlice, states: Ints, layer: int) -> Ints:
        group_index, inside = self.geometry.group_of_layer(layer)
        group, block_tokens = self.geometry.groups[group_index], self.geometry.block_tokens
        first = 0 if group.window_tokens is None else max(0, part.start - group.window_tokens + 1)
        first_block, end_block = first // block_tokens, (part.end - 1) // block_tokens + 1
        entries = part.tables[group_index][first_block:end_block]
        if (entries < 0).any() or len(entries) != end_block - first_block:
            raise IntegrityError(
                f"{part.sequence_id}: group {group_index} reads positions {first}..{part.end - 1}, but the table is "
                f"{part.tables[group_index].tolist()}"
            )
        seen = self._summaries(group_index, inside, layer, entries)
        seen = seen[first - first_block * block_tokens : part.end - first_block * block_tokens]
        distances = np.arange(part.start, part.end)[:, None] - np.arange(first, part.end)[None, :]
        weights = self.model.distance_weights(distances, group.window_tokens)
        return self.model.next_states(states, (weights @ seen) % self.model.modulus, layer)

    def _summaries(self, group_index: int, inside: int, layer: int, entries: Ints) -> Ints:
        """Summary of each position of the blocks `entries`, read from the slab: int64[blocks * block_tokens]."""
        group = self.geometry.groups[group_index]
        slots = torch.from_numpy(entries >> 1)
        cold = np.flatnonzero(entries & 1 == FORM_INT4)
        full_slots = torch.where(torch.from_numpy(entries & 1 == FORM_INT4), torch.zeros_like(slots), slots)
        keys = self.slab.keys_view(group_index)[full_slots, inside].to(torch.float32)
        values = self.slab.values_view(group_index)[full_slots, inside].to(torch.float32) if group.value_dim else None
        for place in cold.tolist():
            if self._read_cold is None:
                raise IntegrityError(f"table entry {int(entries[place])} is INT4, but this runner has no codec")
            cold_keys, cold_values = self._read_cold(group_index, int(entries[place] >> 1))
            keys[place] = cold_keys[inside]
            if values is not None and cold_values is not None:
                values[place] = cold_values[inside]
        total = self.model.summary(self._channels(keys), layer, 3)
        if values is not None:
            total = (total + self.model.summary(self._channels(values), layer, 5)) % self.model.modulus
        return total

    def _channels(self, blocks: Tensor) -> Ints:
        """int64[blocks * block_tokens, kv_heads * dim] of blocks Tensor[blocks, kv_heads, block_tokens, dim]."""
        flat = blocks.permute(0, 2, 1, 3).reshape(blocks.shape[0] * blocks.shape[2], -1)
        whole = torch.nan_to_num(flat, nan=-1.0, posinf=-2.0, neginf=-3.0).round().to(torch.int64)
        return np.asarray(whole.numpy() % self.model.modulus, dtype=np.int64)


def decode_cold_slot(store: KVStore, group: int, slot: int) -> tuple[Tensor, Tensor | None]:
    """Keys and values float32 of one INT4 slot, decoded with the store's cold codec."""
    from kvstore.device_blocks import block_shapes

    codec, slab = store.cold_codec, store.slab
    if codec is None or slab is None:
        raise ConfigError("the store keeps no INT4 blocks")
    payload = slab.slot_bytes_view(2 * group + COLD, slot).numpy().tobytes()
    return codec.decode(payload, block_shapes(store.geometry)[group], torch.float32)


def toy_states(model: ToyModel, token_ids: Sequence[int]) -> Ints:
    """Final states int64[n] of a whole stream, computed at once and without any cache."""
    states = model.embed(np.asarray(token_ids, dtype=np.int64), np.arange(len(token_ids)))
    distances = np.arange(len(token_ids))[:, None] - np.arange(len(token_ids))[None, :]
    for layer in range(model.layer_count):
        group = model.group_of(layer)
        seen = model.summary(model.channels(states, layer, group.kv_heads * group.key_dim, 1), layer, 3)
        if group.value_dim:
            values = model.channels(states, layer, group.kv_heads * group.value_dim, 2)
            seen = (seen + model.summary(values, layer, 5)) % model.modulus
        weights = model.distance_weights(distances, group.window_tokens)
        states = model.next_states(states, (weights @ seen) % model.modulus, layer)
    return states


def toy_generate(
    model: ToyModel, prompt: Sequence[int], count: int, choose: Callable[[Tensor, int], int] | None = None
) -> list[int]:
    """The oracle: `count` tokens behind `prompt`, each from a full computation over all tokens before it.

    `choose` gets (logits Tensor[vocab], output position); greedy when absent.
    """
    tokens = list(prompt)
    for position in range(count):
        logits = torch.from_numpy(model.logits(toy_states(model, tokens)[-1:]))[0]
        tokens.append(int(logits.argmax()) if choose is None else choose(logits, position))
    return tokens[len(prompt) :]


class ScriptedDrafter:
    """Drafts from known continuations: right for the first `right_tokens` drafts of each call, wrong after that.

    `streams` are whole token streams (prompt and true output). Where none starts with the tokens so far, the draft is
    all wrong, or empty if `silent`.
    """

    def __init__(
        self, streams: Sequence[Sequence[int]], *, draft_tokens: int, right_tokens: int, vocab_size: int = 97
    ) -> None:
        self._streams = [list(stream) for stream in streams]
        self._draft_tokens = draft_tokens
        self._right_tokens = right_tokens
        self._vocab_size = vocab_size

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        known = list(token_ids)
        for stream in self._streams:
            if len(stream) > len(known) and stream[: len(known)] == known:
                ahead = stream[len(known) : len(known) + min(count, self._draft_tokens)]
                return [t if i < self._right_tokens else (t + 1) % self._vocab_size for i, t in enumerate(ahead)]
        return []
