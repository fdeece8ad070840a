"""`python -m kvstore.testing.sim` is `kvstore simulate`."""

from __future__ import annotations

import sys

from kvstore.cli import main

if __name__ == "__main__":
    sys.exit(main(["simulate", *sys.argv[1:]]))
