"""Who a block is: the root of an identity and the hash chain over a sequence's tokens.

Two computations of KV may share a block only if everything that shaped its values is equal. What shaped them is folded
into 32 bytes: the root (model, weights, geometry, adapter, tenant, epoch, extra) and, block by block, the tokens and
media before and in the block. The bytes are specified in docs/formats/identity.md and never depend on the process,
the machine or PYTHONHASHSEED.

Pure Python and numpy, no lock: a HashChain belongs to one sequence and to the thread that holds the store's lock.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from allocator.errors import ConfigError, UsageError
from kvstore.operations import native_hashing
from kvstore.token_ids import TOKEN_LIMIT, TokenIds
from kvstore.token_ids import as_token_array as as_token_array

SCHEME_VERSION = 1
HASH_BYTES = 32

_ROOT_TAG = b"kvstore identity\x00"
_BLOCK_TAG = b"\x01"
_PIECE_BLOCKS = 128  # hashed at once
_LOOKAHEAD_TAG = b"\x02"
_MEDIA_TAG = b"\x03"


@runtime_checkable
class Fingerprinted(Protocol):
    """Anything that can state its geometry in bytes (allocator.KVGeometry does)."""

    def fingerprint(self) -> bytes: ...


def encode_field(value: object, where: str) -> bytes:
    """Tag, uint64 length and payload of one value: no two different values have the same bytes.

    Raises UsageError for a type that has no canonical form (floats, sets, objects) and for text that is not Unicode.
    """
    if value is None:
        return b"N" + bytes(8)
    if isinstance(value, bool):
        return _tagged(b"T", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"I", b"%d" % value)
    if isinstance(value, str):
        try:
            return _tagged(b"S", value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: text is not valid Unicode: {value!r}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return _tagged(b"B", bytes(value))
    if isinstance(value, Mapping):
        names = list(value)
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"{where}: mapping keys must be text, got {names!r}")
        pairs = [encode_field(name, where) + encode_field(value[name], f"{where}.{name}") for name in sorted(names)]
        return _tagged(b"M", b"".join(pairs))
    if isinstance(value, list | tuple):
        return _tagged(b"L", b"".join(encode_field(one, f"{where}[{i}]") for i, one in enumerate(value)))
    raise UsageError(
        f"{where}: got {value!r} of type {type(value).__name__}; expected None, bool, int, str, bytes, or a list, "
        "tuple or mapping of these"
    )


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload


@dataclass(frozen=True, slots=True)
class Adapter:
    """A fine-tuned overlay of the weights. All three parts count: names repeat, and so do ids after a restart."""

    name: str | bytes | None
    id: int | str | bytes | None = None
    digest: str | bytes | None = None

    @classmethod
    def of(cls, value: object) -> Adapter | None:
        """From None, an Adapter, a name, (name, id, digest), or a mapping with these names."""
        if value is None or isinstance(value, Adapter):
            return value
        if isinstance(value, str | bytes):
            return cls(value)
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - {"name", "id", "digest"})
            if unknown or "name" not in value:
                raise UsageError(f"adapter: expected the keys name, id, digest, got {sorted(value)!r}")
            return cls(value["name"], value.get("id"), value.get("digest"))
        parts = list(value) if isinstance(value, tuple | list) else []
        if len(parts) == 3:
            return cls(parts[0], parts[1], parts[2])
        raise UsageError(f"adapter: got {value!r}; expected None, a name, Adapter or (name, id, digest)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that shapes KV values beside the tokens, and who may share them.

    model      name of the model
    weights    digest or revision of the weights; None: unknown, then no other process can use the blocks
    geometry   an object with fingerprint() -> bytes (allocator.KVGeometry), or those bytes: shapes, stored dtype,
               scale identity and position scheme, of the whole model
    adapter    Adapter, name, (name, id, digest) or None
    tenant     salt: identities with different salts share nothing; None differs from empty
    epoch      raised by every reset
    extra      the caller's own namespace: scalars, or lists, tuples and mappings of them

    Every argument is checked here: UsageError says what was given and expected.
    """

    model: str | bytes
    weights: str | bytes | None
    geometry: Fingerprinted | bytes
    adapter: object = None
    tenant: str | bytes | None = None
    epoch: int = 0
    extra: object = ()

    def __post_init__(self) -> None:
        for name, optional in (("model", False), ("weights", True), ("tenant", True)):
            value = getattr(self, name)
            if not (isinstance(value, str | bytes) or (optional and value is None)):
                expected = "str, bytes or None" if optional else "str or bytes"
                raise UsageError(f"{name}: got {value!r} of type {type(value).__name__}; expected {expected}")
            encode_field(value, name)
        if not isinstance(self.geometry, bytes | Fingerprinted):
            raise UsageError(f"geometry: got {type(self.geometry).__name__}; expected bytes or .fingerprint()")
        if isinstance(self.epoch, bool) or not isinstance(self.epoch, int) or self.epoch < 0:
            raise UsageError(f"epoch: got {self.epoch!r}; expected an int >= 0")
        adapter = Adapter.of(self.adapter)
        object.__setattr__(self, "adapter", adapter)
        if adapter is not None:
            _check_adapter(adapter)
        encode_field(self.extra, "extra")

    def root(self) -> bytes:
        """The 32 bytes every chain of this identity starts from."""
        geometry = self.geometry if isinstance(self.geometry, bytes) else self.geometry.fingerprint()
        if not isinstance(geometry, bytes):
            raise UsageError(f"geometry.fingerprint() gave {type(geometry).__name__}; expected bytes")
        adapter = Adapter.of(self.adapter)
        fields: tuple[tuple[str, object], ...] = (
            ("scheme", SCHEME_VERSION),
            ("model", self.model),
            ("weights", self.weights),
            ("geometry", geometry),
            ("adapter", None if adapter is None else (adapter.name, adapter.id, adapter.digest)),
            ("tenant", self.tenant),
            ("epoch", self.epoch),
            ("extra", self.extra),
        )
        state = hashlib.sha256(_ROOT_TAG)
        for name, value in fields:
            state.update(encode_field(name, name) + encode_field(value, name))
        return state.digest()

    def next_epoch(self) -> Identity:
        """The same identity after a reset: nothing stored before matches it."""
        return replace(self, epoch=self.epoch + 1)

    def require_shareable(self) -> None:
        """Raise ConfigError unless the weights are known: KV of unknown weights must not be found by others."""
        if not self.weights:
            raise ConfigError(
                f"weights: got {self.weights!r} while sharing is on; expected a digest or revision of the weights, "
                "since blocks of other weights under the same model name would be taken for ours"
            )


def _check_adapter(adapter: Adapter) -> None:
    for name, kinds in (("name", str | bytes | None), ("id", int | str | bytes | None), ("digest", str | bytes | None)):
        value = getattr(adapter, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"adapter.{name}: got {value!r} of type {type(value).__name__}; expected {kinds}")


@dataclass(frozen=True, slots=True)
class Media:
    """One image, sound or video among the tokens: it fills `length` placeholder tokens from `start` on.

    digest is the SHA-256 (32 bytes) of whatever decides its features: content and preprocessing. start is the absolute
    token position in the sequence.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != HASH_BYTES:
            raise UsageError(f"media digest: got {self.digest!r}; expected 32 bytes (SHA-256 of the media)")
        for name, least in (("start", 0), ("length", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < TOKEN_LIMIT:
                raise UsageError(f"media {name}: got {value!r}; expected an int in [{least}, 2**32)")

    @property
    def stop(self) -> int:
        return self.start + self.length

    def record(self) -> bytes:
        """32 bytes that stand for content and length in a block's hash."""
        return hashlib.sha256(_MEDIA_TAG + self.digest + self.length.to_bytes(4, "little")).digest()


class HashChain:
    """The block hashes of one growing sequence of tokens.

    root             32 bytes, Identity.root()
    block_tokens     tokens of a store block
    placeholder_ids  token ids that stand for media: one that no Media covers is a UsageError, so that a prompt without
                     its images never hits (or feeds) the blocks of a prompt with them
    """

    __slots__ = (
        "_groups",
        "_hashes",
        "_media",
        "_media_starts",
        "_placeholders",
        "_tokens",
        "block_tokens",
        "origin",
        "root",
    )

    def __init__(self, root: bytes, block_tokens: int, *, placeholder_ids: Iterable[int] = ()) -> None:
        if not isinstance(root, bytes) or len(root) != HASH_BYTES:
            raise UsageError(f"root: got {root!r}; expected 32 bytes from Identity.root()")
        if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or not 0 < block_tokens < TOKEN_LIMIT:
            raise UsageError(f"block_tokens: got {block_tokens!r}; expected an int >= 1")
        self.root = root
        self.block_tokens = block_tokens
        self._placeholders = frozenset(as_token_array(list(placeholder_ids)))
        self._tokens = array("I")
        self._hashes: list[bytes] = []
        self._media: list[Media] = []
        self._media_starts: list[int] = []
        self._groups: dict[int, list[bytes]] = {}
        self.origin: tuple[int, bytes] | None = None  # epoch and mark of the store that made it

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return self._placeholders

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    @property
    def hashes(self) -> list[bytes]:
        """One hash per full block, in order. The chain's own list: read it, do not change it."""
        return self._hashes

    def token_ids(self) -> list[int]:
        """The tokens behind the hashes, those of the unfinished block included."""
        return self._tokens.tolist()

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens of a range of positions."""
        return tuple(self._tokens[start:stop])

    def tokens_equal(self, start: int, token_ids: TokenIds) -> bool:
        """Are the tokens from `start` on these ones? False where the chain is too short."""
        if type(token_ids) is list and len(token_ids) == 1:
            return 0 <= start < len(self._tokens) and self._tokens[start] == token_ids[0]
        tokens = as_token_array(token_ids)
        return start >= 0 and self._tokens[start : start + len(tokens)] == tokens

    def extend(self, token_ids: TokenIds, media: Sequence[Media] = ()) -> list[bytes]:
        """Append tokens and return the hashes of the blocks that they completed.

        media: the media that start among these tokens, in order; one may reach past them. Each is named once. On a
        UsageError nothing is changed.
        """
        tokens = self._tokens
        if not media and not self._placeholders and type(token_ids) is list and len(token_ids) == 1:
            token = token_ids[0]
            if type(token) is int and 0 <= token < TOKEN_LIMIT:
                tokens.append(token)
                return self._complete() if len(tokens) % self.block_tokens == 0 else []
        fresh = as_token_array(token_ids)
        if media or self._placeholders:
            self._check_media(fresh, media)
            self._media.extend(media)
            self._media_starts.extend(one.start for one in media)
        if tokens:
            tokens.extend(fresh)
        else:
            self._tokens = tokens = fresh
        return self._complete() if len(tokens) // self.block_tokens > len(self._hashes) else []

    def settle(self, start: int, token_ids: TokenIds) -> None:
        """Make the tokens from `start` on these ones, where `start` is at most `token_count`: `extend` at the end of
        the chain; nothing where they stand already, as those of a prompt do; else `rewrite`. UsageError as `extend`.
        """
        tokens = self._tokens
        if len(tokens) != start:
            if start + len(token_ids) > len(tokens) or not self.tokens_equal(start, token_ids):
                self.rewrite(start, token_ids)
            return
        if type(token_ids) is list and len(token_ids) == 1 and not self._placeholders:
            token = token_ids[0]
            if type(token) is int and 0 <= token < TOKEN_LIMIT:
                tokens.append(token)
                if not len(tokens) % self.block_tokens:
                    self._complete()
                return
        self.extend(token_ids)

    def rewrite(self, start: int, token_ids: TokenIds) -> None:
        """Make the tokens from `start` on these ones, forgetting what differs; media over tokens that stay are kept.

        On a UsageError nothing is changed.
        """
        fresh = as_token_array(token_ids)
        known = self._tokens[start : start + len(fresh)]
        same = len(known)
        if known != fresh[:same]:
            same = int(np.flatnonzero(np.asarray(known) != np.asarray(fresh[:same]))[0])
        undo = self.fork()
        try:
            self.truncate(start + same)
            self.extend(np.asarray(fresh[same:]))
        except UsageError:
            self._tokens, self._hashes, self._groups = undo._tokens, undo._hashes, undo._groups
            self._media, self._media_starts = undo._media, undo._media_starts
            raise

    def truncate(self, token_count: int) -> None:
        """Keep the first token_count tokens (rollback). Media that start behind them are forgotten."""
        count = len(self._tokens)
        if isinstance(token_count, bool) or not isinstance(token_count, int) or not 0 <= token_count <= count:
            raise UsageError(f"truncate: got {token_count!r}; expected an int in [0, {count}]")
        del self._tokens[token_count:]
        del self._hashes[token_count // self.block_tokens :]
        kept = bisect_left(self._media_starts, token_count)
        del self._media[kept:], self._media_starts[kept:]
        for lookahead_tokens, keys in self._groups.items():
            del keys[max(0, token_count - lookahead_tokens) // self.block_tokens :]

    def fork(self) -> HashChain:
        """An independent chain with the same past."""
        other = HashChain.__new__(HashChain)
        other.root, other.block_tokens, other._placeholders = self.root, self.block_tokens, self._placeholders
        other.origin = self.origin
        other._tokens, other._hashes = self._tokens[:], self._hashes[:]
        other._media, other._media_starts = self._media[:], self._media_starts[:]
        other._groups = {lookahead: keys[:] for lookahead, keys in self._groups.items()}
        return other

    def group_hashes(self, lookahead_tokens: int) -> list[bytes]:
        """Hashes for a cache group whose KV at a position also depends on the next `lookahead_tokens` tokens.

        A block has one only once its successors are known, so this list may be shorter than `hashes`. With 0 it is
        `hashes`. Draft heads (EAGLE, MTP) have 1.
        """
        if lookahead_tokens == 0:
            return self._hashes
        if isinstance(lookahead_tokens, bool) or not isinstance(lookahead_tokens, int) or lookahead_tokens < 0:
            raise UsageError(f"lookahead_tokens: got {lookahead_tokens!r}; expected an int >= 0")
        keys = self._groups.setdefault(lookahead_tokens, [])
        count = max(0, len(self._tokens) - lookahead_tokens) // self.block_tokens
        for index in range(len(keys), count):
            stop = (index + 1) * self.block_tokens
            keys.append(self._hash_span(_LOOKAHEAD_TAG, self._hashes[index], stop, stop + lookahead_tokens))
        return keys

    def _complete(self) -> list[bytes]:
        """Hash every full block that has no hash yet."""
        block, first = self.block_tokens, len(self._hashes)
        start, stop = first * block, len(self._tokens) // block * block
        last = self._hashes[-1] if first else self.root
        if self._media and self._media_starts[-1] >= start:
            fresh = []
            for begin in range(start, stop, block):
                last = self._hash_span(_BLOCK_TAG, last, begin, begin + block)
                fresh.append(last)
        elif (native := native_hashing()) is not None:
            fresh = native.hash_chain(last, memoryview(self._tokens)[start:stop], block)
        elif stop - start == block:
            fresh = [self._hash_span(_BLOCK_TAG, last, start, stop)]
        else:
            fresh = self._hash_plain(last, start, stop)
        self._hashes += fresh
        return fresh

    def _hash_plain(self, last: bytes, start: int, stop: int) -> list[bytes]:
        """Hashes of a run of full blocks without media; piece by piece, so that what is copied stays in the cache."""
        block, sha256 = self.block_tokens, hashlib.sha256
        tokens = np.frombuffer(self._tokens, dtype=np.uint32)[start:stop].reshape(-1, block)
        rows = np.zeros((min(len(tokens), _PIECE_BLOCKS), block + 2), dtype="<u4")
        rows[:, 0] = block
        hashes: list[bytes] = []
        for first in range(0, len(tokens), _PIECE_BLOCKS):
            piece = tokens[first : first + _PIECE_BLOCKS]
            rows[: len(piece), 1:-1] = piece
            messages = struct.unpack(f"{4 * (block + 2)}s" * len(piece), rows[: len(piece)].tobytes())
            hashes += [last := sha256(b"\x01" + last + message).digest() for message in messages]
        return hashes

    def _hash_span(self, tag: bytes, parent: bytes, start: int, stop: int) -> bytes:
        span = self._tokens[start:stop]
        if sys.byteorder == "big":  # pragma: no cover
            span.byteswap()
        first, last = bisect_left(self._media_starts, start), bisect_left(self._media_starts, stop)
        parts = [tag, parent, (stop - start).to_bytes(4, "little"), span.tobytes()]
        parts.append((last - first).to_bytes(4, "little"))
        for media in self._media[first:last]:
            parts += [media.record(), (media.start - start).to_bytes(4, "little")]
        return hashlib.sha256(b"".join(parts)).digest()

    def _check_media(self, fresh: array[int], media: Sequence[Media]) -> None:
        base = len(self._tokens)
        end = base + len(fresh)
        covered_to = self._media[-1].stop if self._media else 0
        spans = [(base, min(covered_to, end))] if covered_to > base else []
        for one in media:
            if not isinstance(one, Media):
                raise UsageError(f"media: got {one!r}; expected kvstore.identity.Media")
            if not base <= one.start < end:
                raise UsageError(f"media starts at token {one.start}; expected it among those given, [{base}, {end})")
            if one.start < covered_to:
                raise UsageError(f"media at token {one.start} overlaps or precedes the one that ends at {covered_to}")
            covered_to = one.stop
            spans.append((one.start, min(one.stop, end)))
        if not self._placeholders:
            return
        bare = np.isin(np.frombuffer(fresh, dtype=np.uint32), list(self._placeholders)) if fresh else np.zeros(0, bool)
        for start, stop in spans:
            bare[start - base : stop - base] = False
        if bare.any():
            index = int(np.flatnonzero(bare)[0])
            raise UsageError(
                f"token id at index {index} is {fresh[index]}, a placeholder of media, but no media covers it; "
                "expected a Media with its digest"
            )
