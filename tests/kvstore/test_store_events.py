"""The event stream: order, gaps that show, epochs, bounded memory."""

from __future__ import annotations

import pytest

from kvstore import AllCleared, BlockRemoved, BlockStored, EventStream, UsageError


def stored(number: int) -> BlockStored:
    return BlockStored("host", 0, (bytes([number]),), None, "raw", True, 16)


def test_events_come_in_order_with_numbers() -> None:
    stream = EventStream()
    assert not stream.has_subscribers
    stream.publish(stored(0))
    reader = stream.subscribe()
    assert stream.has_subscribers
    stream.publish(stored(1))
    stream.publish(BlockRemoved("host", 0, (b"\x01",), "raw", True))
    events = reader.drain()
    assert [one.sequence for one in events] == [1, 2]
    assert events[0].event == stored(1)
    assert reader.drain() == []
    reader.close()
    stream.publish(stored(2))
    assert reader.drain() == []


def test_case_117_a_slow_reader_sees_the_gap_and_memory_is_bounded() -> None:
    stream = EventStream()
    slow, quick = stream.subscribe(4), stream.subscribe(100)
    for number in range(50):
        stream.publish(stored(number))
    events = slow.drain()
    assert [one.sequence for one in events] == [46, 47, 48, 49]
    assert slow.lost_count == 46
    assert len(quick.drain()) == 50
    assert quick.lost_count == 0


def test_case_117_a_new_epoch_voids_what_was_known() -> None:
    stream = EventStream(epoch=3)
    reader = stream.subscribe()
    stream.publish(stored(1))
    stream.begin_epoch(4)
    stream.publish(stored(2))
    seen = [(one.epoch, one.sequence, type(one.event)) for one in reader.drain()]
    assert seen == [(3, 0, BlockStored), (4, 0, AllCleared), (4, 1, BlockStored)]
    assert stream.epoch == 4
    with pytest.raises(UsageError, match="expected more than 4"):
        stream.begin_epoch(4)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_queue_has_a_length(limit: object) -> None:
    with pytest.raises(UsageError, match="queue_limit"):
        EventStream(queue_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="queue_limit"):
        EventStream().subscribe(limit)  # type: ignore[arg-type]
