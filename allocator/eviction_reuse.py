"""What is learned about reuse: how likely a block comes back, at which age, and how long to keep which class for it.

Used by `allocator.eviction_learned` alone, under the pool's lock. Bounded memory, no random numbers. A request costs
a few numpy operations over its blocks; the end of an epoch (a quarter of the capacity) a look at the ages of what is
remembered, which is one number a request and class of its blocks, however many blocks those are.

A *class* is (blocks that the request brought anew, uses of the block so far), both in powers of two: what a request
adds says most about whether its chain is used again, and how often a block was used says the rest. Which way, differs
between workloads, so nothing is assumed. A table of fixed size remembers blocks by key, long past their eviction; where
two keys meet, the newer one stays. Who asks, and a block's place in the chain, multiply what its class promises
(`eviction_factors`).

Time is counted in blocks seen. Ages fall into bins of half powers of two of the capacity. For each class and bin two
decayed sums are kept: the time that blocks spent at that age, and how many were used again at it. Their quotient is the
hazard; from it follow what keeping a class up to an age T brings, F(T), and what it costs in residence, the integral of
1 - F. The ages T that bring most at a total residence of one capacity are those that maximise
worth * F(T) - rent * residence(T) at the rent where the sum is the capacity. The worth of a block is what losing it
costs beside the mean, in half powers of two; 1 where nothing is said. That is LRU when all classes are alike. Thin
evidence is drawn towards the mean of the wider class.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.eviction_factors import Cells, ReuseFactors

Keys: TypeAlias = "npt.NDArray[np.uint64]"
Levels: TypeAlias = "npt.NDArray[np.intp]"
Floats: TypeAlias = "npt.NDArray[np.float64]"

BINS: Final = 24
LEVELS: Final = BINS + 1
_FIRST_HALVINGS = 14  # the first bin ends at capacity / 2^7, the last at capacity * 2^4.5
_NEW_CLASSES = 16
_USE_CLASSES = 4
_CLASSES = _NEW_CLASSES * _USE_CLASSES
_TABLE_MAX_BITS = 22
_SCAN_MAX_BITS = 19  # records that the end of an epoch looks at
_EPOCHS_PER_CAPACITY = 4
_EPOCH_BLOCKS_MIN = 32
_DECAY = 0.985
_PRICE_FADE = 0.01
_WIDE_EVENTS = 30.0  # pseudo-events of the mean of all, for blocks that a request brought
_FINE_EVENTS = 400.0  # pseudo-events of that, for uses within it
_RENT_STEPS = 40
_STEPS_MAX = 6
_WORTH_ONE = _STEPS_MAX
WORTHS: Floats = np.exp2(np.arange(-_STEPS_MAX, _STEPS_MAX + 1) / 2)
_FORK_CHILDREN = 8  # a block with more is part of a trunk that many sessions share


class ReuseMemory:
    """Sees every request and says at which level (0..LEVELS - 1) each of its blocks belongs.

    `ages[level]` is how long, in blocks seen, a block of that level is worth keeping after its last use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        steps = (np.arange(BINS) - _FIRST_HALVINGS) / 2
        self.ages: Floats = np.concatenate([[0.0], self.capacity * 2.0**steps])
        self.clock = 0
        self.levels: Levels = np.full((len(WORTHS), _CLASSES), _FIRST_HALVINGS + 1, dtype=np.intp)  # all alike: LRU
        self._mean_price = 0.0
        size = 1 << min(_TABLE_MAX_BITS, max(10, (32 * self.capacity).bit_length()))
        self._mask = np.uint64(size - 1)
        self._stride = max(1, size >> _SCAN_MAX_BITS)  # of a large table every such record is counted, for all
        self._key = np.zeros(size, dtype=np.uint64)
        self._last = np.zeros(size, dtype=np.int64)
        self._class = np.zeros(size, dtype=np.int16)
        self._open: dict[int, int] = {}  # records by last use and class: how many of those that are counted
        self._uses = np.zeros(size, dtype=np.uint8)
        self._group = np.zeros(size, dtype=np.uint8)
        self._children = np.zeros(size, dtype=np.uint8)
        self._cell = np.zeros(size, dtype=np.int16)
        self._epoch_blocks = max(_EPOCH_BLOCKS_MIN, self.capacity // _EPOCHS_PER_CAPACITY)
        self._widths: Floats = np.diff(self.ages)
        self.epoch = 0
        self._epoch_end = self._epoch_blocks
        # of this epoch, as they came: (class, age) of records that were used again or lost, classes of all blocks
        self._used: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]] = []
        self._lost: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]] = []
        self._touched: list[Levels] = []
        self._cells_used: list[Cells] = []
        self._cells_touched: list[Cells] = []
        self._factors = ReuseFactors(_DECAY)
        self._chance = np.ones(_CLASSES)  # that a block of a class comes back at all
        self._open_time = np.zeros((_CLASSES, BINS))
        self._events = np.zeros((_CLASSES, BINS))
        self._exposure = np.zeros((_CLASSES, BINS))
        self._rate = np.zeros(len(WORTHS) * _CLASSES)

    def worths(self, prices: Floats) -> Levels:
        """Which of the worths each block has, by what losing it costs beside what it cost so far on average."""
        mean = float(prices.mean())
        self._mean_price += (mean - self._mean_price) * (_PRICE_FADE if self._mean_price else 1)
        relative = 2 * np.log2(np.maximum(prices, 1e-30) / max(self._mean_price, 1e-30))
        steps = np.clip(np.rint(relative), -_STEPS_MAX, _STEPS_MAX)
        nearest: Levels = (steps + _WORTH_ONE).astype(np.intp)
        return nearest

    def observe(self, keys: Keys, worths: Levels | None = None, owner: int = 0) -> tuple[Levels, int]:
        """(level of each block, sampling group 0..255 of the chain's tail), for a chain given head first."""
        places = (keys & self._mask).astype(np.intp)
        there = self._key[places]
        known = there == keys
        known_count = int(np.count_nonzero(known))
        if known_count < len(keys):
            lost = places[there.astype(bool) ^ known]
            self._record(self._lost, lost)
        uses = np.zeros(len(keys), dtype=np.intp)
        if known_count == len(keys):
            self._record(self._used, places)
            uses = np.minimum(self._uses[places] + 1, _USE_CLASSES - 1)
        elif known_count:
            used = places[known]
            self._record(self._used, used)
            uses[known] = np.minimum(self._uses[used] + 1, _USE_CLASSES - 1)
            known_count = len(keys) - int(np.argmax(known[::-1]))
            uses = np.maximum.accumulate(uses[::-1])[::-1]  # a parent was used no less than its child, if records
        new = min((len(keys) - known_count).bit_length(), _NEW_CLASSES - 1)
        classes = new * _USE_CLASSES + uses
        cells = self._factors.cells(owner, len(keys))
        rows: Levels = self._factors.steps[cells] + _WORTH_ONE
        if worths is not None:
            rows = np.clip(rows + worths - _WORTH_ONE, 0, len(WORTHS) - 1)
        self._touched.append(rows * _CLASSES + classes)
        if known_count:
            self._cells_used.append(self._cell[places[known]])
        self._cells_touched.append(cells)
        group = self._grouped(keys, places, known, known_count)
        self.clock += len(keys)
        counted = np.unique(places if self._stride == 1 else places[places & (self._stride - 1) == 0])
        self._count_open(counted, -1)
        self._key[places] = keys
        self._last[places] = self.clock
        self._class[places] = classes
        self._cell[places] = cells
        self._count_open(counted, 1)
        self._uses[places] = uses
        if self.clock >= self._epoch_end:
            self._end_epoch()
        return self.levels[rows, classes], group

    def _record(self, records: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]], places: Levels) -> None:
        if self._stride > 1:
            places = places[places & (self._stride - 1) == 0]
        if len(places):
            records.append((self._class[places], self.clock - self._last[places]))

    def _count_open(self, places: Levels, by: int) -> None:
        """Adds records to those that are remembered, or takes them away. Of one request most have one tag."""
        tags, counts = np.unique(self._last[places] * _CLASSES + self._class[places], return_counts=True)
        for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
            if tag >= _CLASSES:  # else nothing was there
                left = self._open.get(tag, 0) + by * count
                if left:
                    self._open[tag] = left
                else:
                    del self._open[tag]

    def _grouped(self, keys: Keys, places: Levels, known: npt.NDArray[np.bool_], known_count: int) -> int:
        """Gives new blocks their parent's sampling group, or one of their own where a session leaves the trunk."""
        if known_count == len(keys):
            return int(self._group[places[-1]])
        first = int(np.argmin(known))
        own = int(keys[first] >> np.uint64(56))
        if first:
            parent = places[first - 1]
            children = self._children[parent]
            if children < _FORK_CHILDREN:
                self._children[parent] = children + 1
                own = int(self._group[parent])
        fresh = places[first:][~known[first:]]
        self._group[fresh] = own
        self._children[fresh] = 0
        return int(self._group[places[-1]])

    def _end_epoch(self) -> None:
        """Moves what the epoch counted into the decayed sums, and chooses levels anew."""
        used, used_ages = self._by_cell(self._used)
        lost, lost_ages = self._by_cell(self._lost)
        open_time = self._time_by_bin(*self._open_by_cell())
        spent = self._time_by_bin(used + lost, used_ages + lost_ages) + open_time - self._open_time
        self._open_time = open_time
        self._exposure = self._exposure * _DECAY + np.maximum(spent, 0)
        self._events = self._events * _DECAY + used[:, :BINS]
        touched = np.concatenate(self._touched)
        self._rate = self._rate * _DECAY + np.bincount(touched, minlength=len(self._rate))
        self._factors.end_epoch(self._cells_used, self._cells_touched, self._chance[touched % _CLASSES])
        self._used, self._lost, self._touched = [], [], []
        self._cells_used, self._cells_touched = [], []
        self.epoch += 1
        self._epoch_end = self.clock + self._epoch_blocks
        self._choose_levels()

    def _by_cell(self, records: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]]) -> tuple[Floats, Floats]:
        """float64[classes, LEVELS] each: how many of the records have that class and age, and the sum of their ages."""
        size = _CLASSES * LEVELS
        if not records:
            return np.zeros((_CLASSES, LEVELS)), np.zeros((_CLASSES, LEVELS))
        classes = np.concatenate([one for one, _ in records]).astype(np.intp)
        ages = np.concatenate([one for _, one in records]).astype(np.float64)
        cells = classes * LEVELS + np.searchsorted(self.ages[1:], ages)
        counts = np.bincount(cells, minlength=size).astype(np.float64) * self._stride
        sums = np.bincount(cells, ages, minlength=size).astype(np.float64) * self._stride
        return counts.reshape(_CLASSES, LEVELS), sums.reshape(_CLASSES, LEVELS)

    def _open_by_cell(self) -> tuple[Floats, Floats]:
        """`_by_cell` for the records that are remembered."""
        size = _CLASSES * LEVELS
        tags = np.fromiter(self._open.keys(), np.int64, len(self._open))
        counts = np.fromiter(self._open.values(), np.float64, len(self._open)) * self._stride
        ages = (self.clock - tags // _CLASSES).astype(np.float64)
        cells = tags % _CLASSES * LEVELS + np.searchsorted(self.ages[1:], ages)
        summed = np.bincount(cells, counts, minlength=size).astype(np.float64)
        sums = np.bincount(cells, counts * ages, minlength=size).astype(np.float64)
        return summed.reshape(_CLASSES, LEVELS), sums.reshape(_CLASSES, LEVELS)

    def _time_by_bin(self, count: Floats, age: Floats) -> Floats:
        """Time spent in each bin by records that ended (or stand) in the cells given, with the sums of their ages."""
        beyond = np.cumsum(count[:, ::-1], axis=1)[:, ::-1][:, 1:]
        inside: Floats = beyond * self._widths + age[:, :BINS] - count[:, :BINS] * self.ages[:BINS]
        return inside

    def _choose_levels(self) -> None:
        gain, residence = self._gain_and_residence()
        self._chance = gain[:, -1]
        worth_gain = (WORTHS[:, None, None] * gain).reshape(-1, LEVELS)
        residence = np.tile(residence, (len(WORTHS), 1))
        rate = self._rate / max(float(self._rate.sum()), 1.0)
        seen = rate > 0
        gain_seen, residence_seen, rate_seen = worth_gain[seen], residence[seen], rate[seen]
        rows = np.arange(len(rate_seen))
        low, high = 1e-6 / self.capacity, 1e3
        for _ in range(_RENT_STEPS):
            rent = (low * high) ** 0.5
            best = np.argmax(gain_seen - rent * residence_seen, axis=1)
            if float((rate_seen * residence_seen[rows, best]).sum()) > self.capacity:
                low = rent
            else:
                high = rent
        self.levels = np.argmax(worth_gain - high * residence, axis=1).reshape(len(WORTHS), _CLASSES)

    def _gain_and_residence(self) -> tuple[Floats, Floats]:
        """float64[classes, LEVELS] each: share used again by the end of an age, mean residence up to it."""
        overall = (self._events.sum(axis=0) + 1e-9) / (self._exposure.sum(axis=0) + self._epoch_blocks)
        wide_shape = (_NEW_CLASSES, _USE_CLASSES, BINS)
        events = self._events.reshape(wide_shape).sum(axis=1)
        exposure = self._exposure.reshape(wide_shape).sum(axis=1)
        wide = (events + _WIDE_EVENTS) / (exposure + _WIDE_EVENTS / overall)
        wide = np.repeat(wide, _USE_CLASSES, axis=0)
        hazard = (self._events + _FINE_EVENTS) / (self._exposure + _FINE_EVENTS / wide)
        present = np.ones((_CLASSES, LEVELS))
        present[:, 1:] = np.exp(-np.cumsum(hazard * self._widths, axis=1))
        residence = np.zeros((_CLASSES, LEVELS))
        residence[:, 1:] = np.cumsum((present[:, :-1] + present[:, 1:]) / 2 * self._widths, axis=1)
        return 1 - present, residence
