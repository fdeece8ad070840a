"""These tests need SGLang's wheel, which has an environment of its own: `make test-sglang`. Elsewhere: skipped."""

from __future__ import annotations

import importlib.util

from tests.engine_adapter.sglang import stand_ins

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    stand_ins.import_sglang()
else:
    collect_ignore_glob = ["test_*.py"]
