"""A tier that misbehaves on purpose, over any real one.

Every fault is drawn from a hash of (seed, operation, key, attempt), so that one call more elsewhere does not reshuffle
the rest and a failing run can be repeated. Damaged bytes are real: they pass through the inner tier and are found by a
checksum taken when they were put, as a framed tier would find them; then the result is CORRUPT. With verify=False they
go unnoticed, which a test of the caller's own checks may want.

Same threads as the inner tier's callers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import xxhash

from allocator.block_marks import Steps
from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.tier import (
    ByteRow,
    Completion,
    Fading,
    GetItem,
    PutItem,
    ResultCode,
    Tier,
    Transfer,
    TransferKind,
    as_byte_row,
)

_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Faults:
    """Probability of each fault, in [0, 1]. The first five are drawn per key, the rest per transfer."""

    lost: float = 0.0  # a put says OK, and the copy is gone
    torn: float = 0.0  # a put stores a part, then rubbish
    flipped: float = 0.0  # one bit of a stored copy turns
    partial: float = 0.0  # this key of a batch fails, others do not
    vanished: float = 0.0  # a stored copy is gone when it is read
    late: float = 0.0  # the completion comes some polls later
    reordered: float = 0.0  # completions of one poll change places
    duplicated: float = 0.0  # a completion comes a second time, later
    late_polls: int = 3

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "late_polls" and not 0 <= value <= 1:
                raise UsageError(f"faults {one.name}: got {value!r}; expected a probability in [0, 1]")

    @classmethod
    def everywhere(cls, rate: float) -> Faults:
        """Every fault at one rate."""
        rates: dict[str, Any] = {one.name: rate for one in fields(cls) if one.name != "late_polls"}
        return cls(**rates)


class FaultyTier(Tier):
    """See the module."""

    def __init__(self, inner: Tier, faults: Faults, *, seed: int, verify: bool = True) -> None:
        self.inner = inner
        self.name = inner.name
        self.private_memory = inner.private_memory
        self.put_batch_copies = inner.put_batch_copies
        self.faults = faults
        self.injected: Counter[str] = Counter()
        self._seed = seed
        self._verify = verify
        self._attempts: Counter[tuple[str, bytes]] = Counter()
        self._checksums: dict[CopyKey, bytes] = {}
        self._targets: dict[int, list[list[ByteRow]]] = {}  # transfer number -> rows of its gets
        self._doomed: dict[int, dict[int, ResultCode]] = {}  # transfer number -> index -> result, copy deleted
        self._waiting: list[tuple[int, Completion]] = []  # polls left

    # faults ----------------------------------------------------------------------------------------------------------

    def _strikes(self, fault: str, operation: str, name: bytes) -> bool:
        rate: float = getattr(self.faults, fault)
        if rate <= 0:
            return False
        attempt = self._attempts[f"{fault} {operation}", name]
        self._attempts[f"{fault} {operation}", name] += 1
        text = f"{self._seed} {fault} {operation} {attempt} ".encode() + name
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64
        if drawn < rate:
            self.injected[fault] += 1
            return True
        return False

    def _damaged(self, key: CopyKey, rows: list[ByteRow]) -> list[ByteRow]:
        name = key.to_bytes()
        whole = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0, np.uint8)
        if whole.nbytes and self._strikes("torn", "put", name):
            whole[whole.nbytes // 2 :] ^= _POISON
            return [whole]
        if whole.nbytes and self._strikes("flipped", "put", name):
            place = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") % (8 * whole.nbytes)
            whole[place // 8] ^= 1 << (place % 8)
            return [whole]
        return rows

    # the contract ----------------------------------------------------------------------------------------------------

    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        sent: list[PutItem] = []
        doomed: dict[int, ResultCode] = {}
        for index, item in enumerate(items):
            key, pieces, *rest = item
            if not isinstance(key, CopyKey):
                raise UsageError(f"put: got {key!r}; expected a CopyKey")
            rows = [as_byte_row(one) for one in (pieces if isinstance(pieces, list | tuple) else [pieces])]
            if not self.inner.contains([key])[0]:
                self._checksums[key] = _checksum(rows)
            if self._strikes("lost", "put", key.to_bytes()):
                doomed[index] = ResultCode.OK
            elif self._strikes("partial", "put", key.to_bytes()):
                doomed[index] = ResultCode.FAILED
            sent.append(PutItem(key, self._damaged(key, rows), *rest))
        transfer = self.inner.submit_put(sent)
        if doomed:
            self._doomed[transfer.id] = doomed
        return transfer

    def submit_get(self, items: Sequence[GetItem | tuple[Any, ...]], *, by_layer: bool = False) -> Transfer:
        items = list(items)
        vanished = [
            item[0]
            for item in items
            if isinstance(item[0], CopyKey) and self._strikes("vanished", "get", item[0].to_bytes())
        ]
        self.inner.delete(vanished)
        transfer = self.inner.submit_get(items, by_layer=by_layer)
        self._targets[transfer.id] = [
            [as_byte_row(one) for one in (buffer if isinstance(buffer, list | tuple) else [buffer])]
            for _, buffer in items
        ]
        return transfer

    @property
    def delivers_layers(self) -> bool:  # type: ignore[override]
        return self.inner.delivers_layers

    def poll(self) -> list[Completion]:
        ready = [completion for polls, completion in self._waiting if polls <= 0]
        self._waiting = [(polls - 1, completion) for polls, completion in self._waiting if polls > 0]
        for completion in self.inner.poll():
            settled = self._settle(completion)
            name = settled.transfer.id.to_bytes(8, "little")
            if self._strikes("late", "poll", name):
                self._waiting.append((self.faults.late_polls, settled))
            else:
                ready.append(settled)
            if self._strikes("duplicated", "poll", name):
                self._waiting.append((self.faults.late_polls + 1, settled))
        if len(ready) > 1 and self._strikes("reordered", "poll", b""):
            ready.reverse()
        return ready

    def _settle(self, completion: Completion) -> Completion:
        transfer = completion.transfer
        results = list(completion.results)
        if transfer.kind is TransferKind.PUT:
            for index, code in self._doomed.pop(transfer.id, {}).items():
                if results[index] is ResultCode.OK:
                    self.inner.delete([transfer.keys[index]])
                    results[index] = code
            return Completion(transfer, tuple(results))
        targets = self._targets.pop(transfer.id, [])
        for index, (key, rows) in enumerate(zip(transfer.keys, targets, strict=False)):
            if results[index] is not ResultCode.OK:
                continue
            if self._strikes("partial", "get", key.to_bytes()):
                results[index] = ResultCode.FAILED
            elif self._verify and self._checksums.get(key) != _checksum(rows):
                self.inner.delete([key])
                results[index] = ResultCode.CORRUPT
            else:
                continue
            for row in rows:
                row.fill(_POISON)
        return Completion(transfer, tuple(results))

    # passed on -------------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        return self.inner.contains(keys)

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        return self.inner.leading_run(key, hashes)

    def cancel(self, transfer: Transfer) -> bool:
        return self.inner.cancel(transfer)

    def delete(self, keys: Sequence[CopyKey]) -> int:
        return self.inner.delete(keys)

    def clear(self) -> None:
        self.inner.clear()

    def pending_count(self, keys: Sequence[CopyKey]) -> int:
        return self.inner.pending_count(keys)

    def read_epoch(self) -> int:
        return self.inner.read_epoch()

    def raise_epoch(self, least: int) -> int:
        return self.inner.raise_epoch(least)

    def seen_epoch(self) -> int | None:
        return self.inner.seen_epoch()

    def follow_epoch(self, epoch: int) -> None:
        self.inner.follow_epoch(epoch)

    def describe_root(self, root: bytes, description: Mapping[str, str]) -> None:
        self.inner.describe_root(root, description)

    def fading(self, count: int | None) -> list[Fading]:
        return self.inner.fading(count)

    def touch(self, keys: Sequence[CopyKey]) -> None:
        self.inner.touch(keys)

    def keep(self, keys: Sequence[CopyKey], steps: Steps) -> None:
        self.inner.keep(keys, steps)

    @property
    def marked_count(self) -> int:
        return self.inner.marked_count

    def expire(self, now: float) -> None:
        self.inner.expire(now)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        self.inner.set_quota(tenant, quota_bytes)

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        return self.inner.pin(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        self.inner.unpin(keys)

    def set_waker(self, waker: Callable[[], None] | None) -> None:
        self.inner.set_waker(waker)

    def counters(self) -> dict[str, int]:
        return self.inner.counters() | {f"injected_{fault}": count for fault, count in self.injected.items()}

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    def close(self) -> None:
        self.inner.close()


def _checksum(rows: Sequence[ByteRow]) -> bytes:
    state = xxhash.xxh3_128()
    for row in rows:
        state.update(row.data)
    return state.digest()
