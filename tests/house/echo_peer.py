"""A peer for the tests of `benchmarks.peers`: doubles a number, fails, or dies."""

from __future__ import annotations

import os

from benchmarks.peers import serve


class Echo:
    def double(self, number: float) -> float:
        print("what a library says must not land between the answers")
        return 2 * number

    def fail(self) -> float:
        raise ValueError("not today")

    def die(self) -> float:
        os._exit(7)


if __name__ == "__main__":
    serve(Echo(), "1.2")
