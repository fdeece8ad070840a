"""The live sequences of one store, by id, and who of them may be asked for what. Under the store's lock."""

from __future__ import annotations

from collections.abc import Callable

from allocator import UnknownSequence, UsageError
from kvstore.arguments import text_id
from kvstore.sequence import RUNNING, Sequence


class LiveSequences(dict[str, Sequence]):
    """closed: the store is; every question is refused from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def end(self, release: Callable[[Sequence], None]) -> None:
        """`release` takes each sequence out and gives its blocks back."""
        for sequence in [*self.values()]:
            release(sequence)

    def check_open(self) -> None:
        if self.closed:
            raise UsageError("this store is closed")

    def _find(self, sequence_id: str) -> Sequence | None:
        try:
            return self.get(sequence_id)
        except TypeError:  # no hash, so no id
            text_id("sequence_id", sequence_id)
            raise

    def live(self, sequence_id: str) -> Sequence:
        self.check_open()
        if (sequence := self._find(sequence_id)) is None:
            raise UnknownSequence(f"no live sequence {sequence_id!r}: never admitted, or finished, aborted, preempted")
        return sequence

    def running(self, sequence_id: str) -> Sequence:
        """One that has all that it was to load."""
        sequence = self._find(sequence_id)
        if sequence is not None and sequence.state is RUNNING:
            return sequence
        self.live(sequence_id)
        raise UsageError(f"sequence {sequence_id!r} is still loading: call step until fetch says done")

    def computing(self, sequence_id: str) -> Sequence:
        """One that may compute: it runs, or loads by layers and waits for each before it is read."""
        sequence = self._find(sequence_id)
        if sequence is not None and (sequence.state is RUNNING or sequence.by_layer):
            return sequence
        return self.running(sequence_id)
