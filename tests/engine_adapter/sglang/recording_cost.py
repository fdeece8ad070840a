"""What recording costs beside the storage's own work: processor time of both, for prompts of 2,000 pages.

PYTHONPATH=. .venv-sglang/bin/python -m tests.engine_adapter.sglang.recording_cost
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.engine_adapter.sglang import stand_ins

stand_ins.import_sglang()

from engine_adapter.sglang_storage.recording import Requests, _numbers  # noqa: E402
from kvstore.trace_recorder import TraceRecorder  # noqa: E402
from tests.engine_adapter.sglang import kit  # noqa: E402

PAGES, NEW, ROUNDS, PAGE_TOKENS = 2000, 32, 7, 64


def main() -> None:
    """A prompt of 2,000 pages (128,000 tokens), all of it stored but 32 pages of 256 KiB, which are written."""
    with tempfile.TemporaryDirectory() as folder:
        pool = kit.fill(kit.mha_pool(dim=2048, heads=4, page=kit.PAGE))
        extra = {"disk_path": f"{folder}/disk", "disk_bytes": "8 GiB"}
        ours, recording = [], []
        with kit.storage(pool, extra) as made:
            recorder = TraceRecorder(Path(folder) / "trace.jsonl", os.urandom(32), PAGE_TOKENS)
            requests = Requests(recorder, PAGE_TOKENS, 256)
            for turn in range(ROUNDS):
                keys = kit.chain(PAGES, 1_000_000 * turn)
                known, new = keys[:-NEW], keys[-NEW:]
                began = time.process_time()
                made.batch_exists(keys)
                for start in range(0, NEW, kit.PAGES):
                    part = new[start : start + kit.PAGES]
                    made.batch_set_v1(part, kit.indices(range(len(part))))
                ours.append(time.process_time() - began)
                began = time.thread_time()
                requests.asked([], _numbers(keys), float(turn))
                requests.wrote(_numbers(known), _numbers(new), float(turn))
                requests.end_due(float(turn + 10), all_=True)
                recording.append(time.thread_time() - began)
            recorder.close()
    print(f"storage {1e3 * median(ours):.2f} ms of processor time a prompt, recording {1e3 * median(recording):.2f} ms")


if __name__ == "__main__":
    main()
