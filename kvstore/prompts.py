"""From token ids to a checked hash chain: the one place where a prompt gets its name.

Holds the store's identity and epoch. The epoch counts for every identity that is served, so that a reset reaches all of
them. Refuses whatever would give KV a name that belongs to other KV: a chain of before a reset, or hashed elsewhere
under another identity that nobody named here, an identity of another geometry, media placeholders that no media covers.

A store that does not share, but has tiers from which others can read, salts its roots with random bytes of its own: no
other process can ask for its copies, and it cannot ask for theirs.

`chain` may be called without the store's lock; `begin_epoch` needs it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from allocator import ConfigError, UsageError
from kvstore.arguments import length, whole
from kvstore.identity import Adapter, HashChain, Identity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Items

    from allocator import KVGeometry
    from kvstore.identity import Media
    from kvstore.tier import Tier

_DESCRIBED_LIMIT = 4096
_SALT_BYTES = 32
_MARK_BYTES = 16
_SALTED_TAG = b"kvstore root of one process"


def _words(identity: Identity) -> dict[str, str]:
    """What an operator is shown of an identity. Bytes are shown as hex digits."""
    adapter = Adapter.of(identity.adapter)
    words = {
        "model": identity.model,
        "weights": identity.weights,
        "adapter": None if adapter is None else adapter.name,
        "tenant": identity.tenant,
        "epoch": str(identity.epoch),
    }
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in words.items() if value is not None
    }


class Prompts:
    """identity: the store's own. placeholder_ids: tokens that stand for media. share: others may use the copies.

    reachable: there are tiers below in which others could find them.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        identity: Identity,
        *,
        placeholder_ids: Iterable[int],
        share: bool,
        reachable: bool,
    ) -> None:
        self._fingerprint = geometry.fingerprint()
        self._geometry = geometry
        self._block_tokens = geometry.block_tokens
        self._placeholder_ids = frozenset(whole("placeholder_ids", one, 0, 2**32 - 1) for one in placeholder_ids)
        self._share = share
        self._salt = os.urandom(_SALT_BYTES) if reachable and not share else b""
        self._mark = os.urandom(_MARK_BYTES)  # of the chains that were made here
        if not isinstance(identity, Identity):
            raise ConfigError(f"identity: got {type(identity).__name__}; expected kvstore.Identity")
        if not identity.model:
            raise ConfigError(
                f"identity: its model is {identity.model!r}; expected a name, since what has none is shared"
            )
        if not self._fits(identity):
            raise ConfigError(
                f"identity: its geometry {identity.geometry!r} is not the store's; expected {geometry!r} or its "
                "fingerprint, since blocks of another shape would get the same names"
            )
        if share:
            identity.require_shareable()
        self._described_to: tuple[Tier, ...] = ()
        self._described: set[bytes] = set()
        self._current = identity, self._root(identity)

    def _root(self, identity: Identity) -> bytes:
        root = identity.root()
        return hashlib.sha256(_SALTED_TAG + self._salt + root).digest() if self._salt else root

    @property
    def identity(self) -> Identity:
        return self._current[0]

    def is_current(self, chain: HashChain) -> bool:
        """False for a chain that was made before the last reset."""
        return chain.origin is None or chain.origin[0] == self.identity.epoch

    def _fits(self, identity: Identity) -> bool:
        given = identity.geometry
        if given is self._geometry:
            return True
        return (given if isinstance(given, bytes) else given.fingerprint()) == self._fingerprint

    def begin_epoch(self, epoch: int) -> None:
        """A reset: no name given before will be given again."""
        identity = replace(self.identity, epoch=epoch)
        self._current = identity, self._root(identity)
        self._described.clear()
        self._tell(identity, self._current[1])

    def describe_to(self, tiers: Items[Tier]) -> None:
        """From now on tell these tiers what each root stands for, in words for operators; also from other threads."""
        self._described_to = tuple(tiers)
        self._described.clear()
        self._tell(*self._current)

    def _tell(self, identity: Identity, root: bytes) -> None:
        """Words for a root that has not been described since the last reset."""
        if root not in self._described:
            if len(self._described) >= _DESCRIBED_LIMIT:
                self._described.clear()
            self._described.add(root)
            for tier in self._described_to:
                tier.describe_root(root, _words(identity))

    def chain(self, token_ids: Items[int] | HashChain, media: Items[Media], identity: Identity | None) -> HashChain:
        """The caller's own chain over a prompt of at least one token, hashed here or (a HashChain) before."""
        if isinstance(token_ids, HashChain):
            return self._hashed_before(token_ids, media, identity)
        if not length(token_ids):
            raise UsageError("an empty prompt has nothing to compute: give at least one token id")
        own, root = self._current
        if identity is not None:
            root = self._root_of(identity, own.epoch)
        chain = HashChain(root, self._block_tokens, placeholder_ids=self._placeholder_ids)
        chain.origin = own.epoch, self._mark
        chain.extend(token_ids, media)
        return chain

    def _root_of(self, identity: Identity, epoch: int) -> bytes:
        if not isinstance(identity, Identity):
            raise UsageError(f"identity: got {type(identity).__name__}; expected kvstore.Identity or None")
        if not self._fits(identity):
            raise UsageError(
                f"identity: its geometry {identity.geometry!r} is not the store's; expected {self._geometry!r}"
            )
        if self._share:
            identity.require_shareable()
        served = identity if identity.epoch >= epoch else replace(identity, epoch=epoch)
        root = self._root(served)
        self._tell(served, root)
        return root

    def _hashed_before(self, chain: HashChain, media: Items[Media], identity: Identity | None) -> HashChain:
        if chain.block_tokens != self._block_tokens:
            raise UsageError(
                f"the prompt was hashed in blocks of {chain.block_tokens}, this store's are {self._block_tokens}"
            )
        epoch, mark = chain.origin or (self.identity.epoch, b"")
        if epoch != self.identity.epoch:
            raise UsageError(
                f"the prompt was hashed before a reset (epoch {epoch}, now {self.identity.epoch}); "
                "expected a chain prepared since"
            )
        if mark != self._mark and self._salt:
            raise UsageError(
                "the prompt was hashed outside this store, which has names of its own where `share` is off; "
                "expected a chain from its prepare"
            )
        if mark != self._mark and identity is None and chain.root != self._current[1]:
            raise UsageError(
                "the prompt was hashed elsewhere, under another identity than this store's own; expected a chain from "
                "its prepare, or that identity said here too"
            )
        if media:
            raise UsageError("media: the prompt was hashed already; expected its media to be given to prepare")
        if identity is not None and chain.root != self._root_of(identity, self.identity.epoch):
            raise UsageError("identity: the prompt was hashed under another one; expected the same, or none here")
        if not self._placeholder_ids <= chain.placeholder_ids:
            missing = sorted(self._placeholder_ids - chain.placeholder_ids)
            raise UsageError(f"the prompt was hashed without the placeholder ids {missing}; expected prepare's chain")
        if not chain.token_count:
            raise UsageError("an empty prompt has nothing to compute: give at least one token id")
        return chain.fork()
