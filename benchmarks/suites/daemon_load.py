"""A client of the daemon in a process of its own: looks up 16 hashes as often as it can, for the `daemon` suite.

    python -m benchmarks.suites.daemon_load SOCKET SECONDS

Waits for a line on standard input, then prints how many lookups it made.
"""

from __future__ import annotations

import sys
import time

from kvstore.daemon import DaemonTier
from kvstore.testing.transfer_contract import key_of

HASHES = 16


def main() -> None:
    tier = DaemonTier(sys.argv[1], timeout_seconds=5)
    keys = [key_of(number, codec="small") for number in range(HASHES)]
    hashes = [key.hash for key in keys]
    if tier.leading_run(keys[0], hashes) != HASHES:
        sys.exit("the copies that are looked up are not there")
    print("ready", flush=True)
    sys.stdin.readline()
    count, until = 0, time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        for _ in range(20):
            tier.leading_run(keys[0], hashes)
        count += 20
    print(count if tier.is_up else 0, flush=True)
    tier.close()


if __name__ == "__main__":
    main()
