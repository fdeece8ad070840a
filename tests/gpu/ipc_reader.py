"""The other process of the IPC test: opens handles (hex lines on standard input), prints the SHA-256 of their bytes."""

from __future__ import annotations

import hashlib
import sys

from quant.cuda import MemoryHandle, MemoryOpener, cuda_device
from quant.cuda.driver import DeviceBuffer


def main() -> None:
    card = cuda_device()
    opener = MemoryOpener(card)
    for line in sys.stdin:
        with opener.open(MemoryHandle.from_bytes(bytes.fromhex(line.strip()))) as memory:
            content = card.download(DeviceBuffer(memory.address, memory.size_bytes, memory), 0)
        print(hashlib.sha256(content.tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
