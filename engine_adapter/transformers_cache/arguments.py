"""What a model was called with, as far as a cache must know it: tokens, padding, positions, and what may be cut off.

Whatever would make the KV something else than a function of the tokens at positions 0, 1, 2, ... is refused here.
Pure reading of arguments, by the thread that runs the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allocator import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_adapter.transformers_cache.rows import Row

_BY_COLUMN = ("input_ids", "position_ids")
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # kept whole: masks read them by position
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "mm_encoder_outputs")
_WHOLE_OUTPUT = ("labels", "output_hidden_states", "output_attentions")


class PassArguments:
    """One call's arguments. columns: how many are fed. pads: per row, columns of left padding since the beginning.

    past: columns in the cache before. `cut` removes leading columns that need not be computed.
    """

    def __init__(self, kwargs: dict[str, Any], past: int, pads: list[int]) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs = kwargs
        self.past = past
        self.pads = pads
        self._ids: list[list[int]] = kwargs["input_ids"].tolist()
        self.columns = len(self._ids[0])

    def tokens(self) -> list[list[int]]:
        """Token ids of each row that are fed, padding left out."""
        return [ids[max(0, pad - self.past) :] for ids, pad in zip(self._ids, self.pads, strict=True)]

    def reusable_columns(self) -> int:
        """How many leading columns may be left out: the caller must want no output of them."""
        wanted = self.kwargs.get("logits_to_keep")
        if not isinstance(wanted, int) or wanted < 1 or any(self.kwargs.get(name) for name in _WHOLE_OUTPUT):
            return 0
        return max(0, self.columns - wanted)

    def cut(self, columns: int, media_to_come: bool) -> None:
        """Leave out the first `columns`, and all media unless one is still to come."""
        if not columns:
            return
        if not media_to_come:
            for name in _MEDIA:
                self.kwargs.pop(name, None)
        for name in _BY_COLUMN:
            if isinstance(found := self.kwargs.get(name), torch.Tensor) and found.shape[-1] == self.columns:
                self.kwargs[name] = found[..., columns:]
        self._ids = [ids[columns:] for ids in self._ids]
        self.past += columns
        self.columns -= columns


def read_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], past: int, rows: Sequence[Row], named_media: bool, sees: bool
) -> PassArguments:
    """Check a call and take it apart. UsageError where the cache could not be right.

    named_media: it knows of some. sees: the model takes media at all.
    """
    kwargs = dict(kwargs)
    if args:
        if len(args) > 1 or "input_ids" in kwargs:
            raise UsageError("give the model its arguments by name; at most input_ids by position")
        kwargs["input_ids"] = args[0]
    if kwargs.get("inputs_embeds") is not None:
        raise UsageError("inputs_embeds: this cache names KV by token ids and media, so it needs input_ids")
    brought = [name for name in _MEDIA if kwargs.get(name) is not None and kwargs[name] != {}]
    if bool(brought) != (named_media and not rows):
        raise UsageError(
            f"the pass brings {', '.join(brought) or 'no media'}, and the cache was told of "
            f"{'some' if named_media else 'none'}; expected cache(media=...) and the media themselves in the first "
            "pass of a cache, and none later"
        )
    ids = kwargs.get("input_ids")
    if rows and isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.numel():
        raise UsageError(
            f"input_ids: no token behind the {past} that this cache has; expected a text that goes on where it ends "
            "(another prompt needs a cache of its own: cache())"
        )
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        raise UsageError("input_ids: expected a Tensor[rows, tokens] of at least one token")
    if rows and len(rows) != ids.shape[0]:
        raise UsageError(f"input_ids has {ids.shape[0]} rows; this cache has {len(rows)}")
    _check_token_types(kwargs, named_media, sees)
    pads = _pads(kwargs.get("attention_mask"), ids.shape[0], ids.shape[1], past, rows)
    _check_positions(kwargs.get("position_ids"), ids, past, pads)
    return PassArguments(kwargs, past, pads)


def _check_token_types(kwargs: dict[str, Any], named_media: bool, sees: bool) -> None:
    """They say where media are; without any, a model that takes them makes another KV of the same tokens."""
    for name in _TOKEN_TYPES:
        given = kwargs.get(name)
        if given is not None and not (sees and (named_media or not bool(torch.as_tensor(given).any()))):
            raise UsageError(
                f"{name}: they would change the KV of the same token ids; expected none, or in a model that takes "
                "media those of the media that cache(media=...) names"
            )


def _pads(mask: Any, batch: int, columns: int, past: int, rows: Sequence[Row]) -> list[int]:
    """Columns of left padding of each row."""
    known = [row.pad if row.ids else past for row in rows] if rows else [0] * batch
    if mask is None:
        return known
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or tuple(mask.shape) != (batch, past + columns):
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UsageError(
            f"attention_mask: got {shape}; expected [{batch}, {past + columns}], past columns and new ones, "
            "or None without padding"
        )
    seen = mask != 0
    found = (seen.cumsum(1) == 0).sum(1)
    pads = [int(pad) for pad in found.tolist()]
    if int(seen.sum()) != batch * (past + columns) - sum(pads):
        raise UsageError("attention_mask: padding is allowed on the left only (tokenizer.padding_side = 'left')")
    for row, pad in zip(rows, pads, strict=False):
        if row.ids and row.pad != pad:
            raise UsageError(f"attention_mask: a row had {row.pad} columns of padding before, now {pad}")
    return pads


def _check_positions(position_ids: Any, ids: torch.Tensor, past: int, pads: list[int]) -> None:
    """K holds its position, so a row's tokens must stand at 0, 1, 2, ... wherever their columns are."""
    columns = ids.shape[1]
    if position_ids is None:
        if any(0 < pad < past + columns for pad in pads):
            raise UsageError("position_ids: rows with padding need them (generate makes them of the attention_mask)")
        return
    column = torch.arange(past, past + columns, device=position_ids.device)
    expected = column[None, :] - torch.tensor(pads, device=position_ids.device)[:, None]
    wrong = (expected >= 0) & (position_ids.view(-1, *position_ids.shape[-2:]) != expected)
    if bool(wrong.any()):
        raise UsageError("position_ids: expected 0, 1, 2, ... for the tokens of each row, counted without its padding")
