"""`python -m kvstore.cli` is `kvstore`."""

from __future__ import annotations

import sys

from kvstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
