"""Does the LMCache of this interpreter work as a peer? `python -m benchmarks.lmcache_check` prints its version.

Imports what the tiers and daemon suites will call: storage, memory, Redis connector, hashing, the server. Exit code 1
with the first thing that is missing.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

MODULES = (
    "lmcache.v1.cache_engine",
    "lmcache.v1.config",
    "lmcache.v1.memory_management",
    "lmcache.v1.storage_backend.storage_manager",
    "lmcache.v1.storage_backend.connector.redis_connector",
    "lmcache.v1.token_database",
    "lmcache.v1.multiprocess.server",
)


def main() -> int:
    """Import everything; say what happened."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a peer may fail in any way; what failed is what counts
            print(f"LMCache is no peer here: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(f"lmcache {metadata.version('lmcache')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
