"""Who a page is: what its bytes mean, whose head range they are, and the copy key that says so.

SGLang names a page by a hash over its tokens and all before (and the request's cache namespace), and by nothing else:
model, weights, dtype, layout, page size, ranks and layers come in here. Immutable values; any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allocator import DTYPE_BYTES, CacheGroup, ConfigError, GroupKind, KVGeometry
from kvstore.copy_key import CopyKey
from kvstore.identity import Identity, encode_field

SCHEME = "sglang pages 1"
CODEC = "sglang-pages"
KV_POOL = "kv"
SHARDED_POOLS = ("mamba",)  # state that tensor-parallel ranks share out, even where the latents are each rank's own
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Rank:
    """Which part of the model this process holds. is_replicated: every tensor-parallel rank has the whole KV (MLA).

    split: in how many head ranges each page is stored, so that engines of other tensor-parallel sizes find theirs.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    is_replicated: bool = False
    split: int = 1

    @classmethod
    def of(cls, config: Any) -> Rank:
        """From SGLang's HiCacheStorageConfig. ConfigError for what cannot be told apart."""
        if getattr(config, "dcp_size", 1) > 1:
            raise ConfigError(f"decode context parallel size: got {config.dcp_size}; expected 1: not supported")
        split = config.tp_lcm_size // config.tp_size if config.should_split_heads else 1
        return cls(
            config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            config.dp_rank,
            config.is_mla_model,
            split,
        )

    @property
    def is_first(self) -> bool:
        """Of those that are asked the same."""
        return not (self.tp_rank or self.pp_rank or self.cp_rank)

    @property
    def directory(self) -> str:
        return f"dp{self.dp_rank}-pp{self.pp_rank}-cp{self.cp_rank}-tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class PoolForm:
    """What the bytes of one pool's pages mean, beside the model.

    heads: of this rank's pages, or of their parts in order; ranges of the model's heads (of ranks, where a pool has no
    heads). digest: of everything else that decides the bytes. is_shared: rank 0 writes for all.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    digest: bytes
    is_shared: bool = False

    @classmethod
    def of(cls, pool: Any, name: str, rank: Rank, pieces: Sequence[int], kv_dtype: str) -> PoolForm:
        """pool: SGLang's host pool. pieces: bytes of each piece of one page (or part). kv_dtype: for a uint8 pool."""
        heads = getattr(pool, "head_num", None)
        is_shared = rank.is_replicated and heads is None and name not in SHARDED_POOLS
        split = rank.split if name == KV_POOL and not is_shared else 1
        if is_shared:
            total, ranges = 1, [(0, 1)]
        else:
            own = heads or 1
            if own % split:
                raise ConfigError(f"tp_lcm_size: got {split} parts for {own} heads a rank; expected a divisor")
            total, part, first = own * rank.tp_size, own // split, rank.tp_rank * own
            ranges = [(first + at, first + at + part) for at in range(0, own, part)]
        dtype = str(pool.dtype).removeprefix("torch.")
        fields = {
            "scheme": SCHEME,
            "pool": name,
            "layout": pool.layout,
            "page_tokens": pool.page_size,
            "dtype": dtype,
            "kv_dtype": kv_dtype if dtype == "uint8" or dtype.startswith("float8") else "",
            "layers": [getattr(pool, one, 0) for one in ("start_layer", "end_layer", "layer_num", "num_mamba_layers")],
            "heads": total if heads is not None or is_shared else ["ranks", total],
            "head_dims": [getattr(pool, one, 0) for one in ("head_dim", "v_head_dim", "kv_cache_dim")],
            "pieces": list(pieces),
            "cp": [rank.cp_rank, rank.cp_size],
        }
        return cls(name, tuple(ranges), hashlib.sha256(encode_field(fields, "page")).digest(), is_shared)


@dataclass(slots=True)
class Names:
    """Copy keys of one engine's pages. facts: what else the engine was told that shapes KV values."""

    model: str
    weights: str
    tenant: str | None
    facts: tuple[tuple[str, str], ...] = ()
    _keys: dict[tuple[PoolForm, int, str], list[CopyKey]] = field(default_factory=dict)

    def of(self, form: PoolForm, epoch: int, version: str) -> list[CopyKey]:
        """One key for each part of a page, with a hash that `with_hash` replaces. version: of weights set in place."""
        found = self._keys.get((form, epoch, version))
        if found is None:
            if len(self._keys) >= 256:
                self._keys.clear()
            root = Identity(
                model=self.model,
                weights=self.weights,
                geometry=form.digest,
                tenant=self.tenant,
                epoch=epoch,
                extra=[SCHEME, [list(one) for one in self.facts], version],
            ).root()
            group = 0 if form.name == KV_POOL else 1
            found = [CopyKey(root, group, root, CODEC, True, heads, (0, 1)) for heads in form.heads]
            self._keys[form, epoch, version] = found
        return found


def page_hash(key: str) -> bytes:
    """32 bytes of SGLang's name for a page: a SHA-256 in hex is taken as it is, anything else is hashed."""
    if len(key) == 2 * _HASH_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(b"sglang key\x00" + key.encode()).digest()


def check_pool(pool: Any, name: str) -> None:
    """ConfigError for a host pool whose pages cannot be copied in place."""
    if getattr(pool, "kv_buffer", "none of its own") is None:
        raise ConfigError(f"pool {name!r} has no KV of its own (compressed caches): not supported")
    if getattr(pool, "dcp_size", 1) > 1:
        raise ConfigError(f"pool {name!r}: got decode context parallel size {pool.dcp_size}; expected 1")
    if pool.layout not in LAYOUTS:
        raise ConfigError(
            f"pool {name!r}: got --hicache-mem-layout {pool.layout}; expected one of {', '.join(LAYOUTS)}"
        )


def frame_geometry(pool: Any, rank: Rank, kv_dtype: str) -> KVGeometry:
    """What frames say of a page's shape, for operators; identity is not made of it."""
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        dtype = "float8_e5m2" if "e5m2" in kv_dtype else "float8_e4m3fn"
    heads = getattr(pool, "head_num", None)
    layers = tuple(range(pool.start_layer, pool.start_layer + max(1, pool.layer_num)))
    if heads is None:
        width = getattr(pool, "kv_cache_dim", 1)
        group = CacheGroup(kind=GroupKind.LATENT, layers=layers, kv_heads=1, key_dim=width, value_dim=0)
    else:
        total, dim = heads * rank.tp_size, pool.head_dim
        value_dim = getattr(pool, "v_head_dim", dim) or dim
        group = CacheGroup(kind=GroupKind.FULL, layers=layers, kv_heads=total, key_dim=dim, value_dim=value_dim)
    return KVGeometry(groups=(group,), block_tokens=pool.page_size, dtype=dtype)
