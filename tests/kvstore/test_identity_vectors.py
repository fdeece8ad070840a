"""identity.md against a second implementation, and the page's own vectors."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from kvstore import HashChain, Identity, Media

PAGE = (Path(__file__).parents[2] / "docs" / "formats" / "identity.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"\b[0-9a-f]{64}\b", PAGE)


def field(value: object) -> bytes:
    if value is None:
        tag, payload = b"N", b""
    elif value is True or value is False:
        tag, payload = b"T", bytes([value])
    elif isinstance(value, int):
        tag, payload = b"I", str(value).encode("ascii")
    elif isinstance(value, str):
        tag, payload = b"S", value.encode("utf-8")
    elif isinstance(value, bytes):
        tag, payload = b"B", value
    elif isinstance(value, tuple):
        tag, payload = b"L", b"".join(field(one) for one in value)
    else:
        assert isinstance(value, dict)
        tag, payload = b"M", b"".join(field(name) + field(value[name]) for name in sorted(value))
    return tag + struct.pack("<Q", len(payload)) + payload


def root_by_the_page(**given: object) -> bytes:
    fields = {"scheme": 1, "model": None, "weights": None, "geometry": None, "adapter": None, "tenant": None}
    fields |= {"epoch": 0, "extra": ()} | given
    return hashlib.sha256(b"kvstore identity\0" + b"".join(field(n) + field(v) for n, v in fields.items())).digest()


def block_by_the_page(tag: int, parent: bytes, tokens: list[int], entries: list[tuple[bytes, int, int]] = ()) -> bytes:  # type: ignore[assignment]
    message = bytes([tag]) + parent + struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    message += struct.pack("<I", len(entries))
    for digest, length, offset in entries:
        message += hashlib.sha256(b"\x03" + digest + struct.pack("<I", length)).digest() + struct.pack("<I", offset)
    return hashlib.sha256(message).digest()


FULL = {
    "model": "org/model-7b",
    "weights": bytes(range(32)),
    "geometry": hashlib.sha256(b"geometry").digest(),
    "adapter": ("a", 1, b"X"),
    "tenant": "",
    "epoch": 2,
    "extra": ("ns", None, True, -5, {"k": b"v"}),
}


def test_roots_agree_with_the_page() -> None:
    assert len(VECTORS) == 10
    small = Identity(model="m", weights="w", geometry=bytes(32)).root()
    assert small == root_by_the_page(model="m", weights="w", geometry=bytes(32)) == bytes.fromhex(VECTORS[0])
    full = Identity(**FULL).root()  # type: ignore[arg-type]
    assert full == root_by_the_page(**FULL) == bytes.fromhex(VECTORS[1])


def test_chains_agree_with_the_page() -> None:
    root = bytes.fromhex(VECTORS[0])
    tokens = [1, 2, 3, 4, 5, 6, 7, 4294967295, 9]
    chain = HashChain(root, 4)
    first, second = chain.extend(tokens)
    assert first == block_by_the_page(1, root, tokens[:4]) == bytes.fromhex(VECTORS[2])
    assert second == block_by_the_page(1, first, tokens[4:8]) == bytes.fromhex(VECTORS[3])
    assert chain.group_hashes(1) == [
        block_by_the_page(2, first, [5]),
        block_by_the_page(2, second, [9]),
    ]
    assert [one.hex() for one in chain.group_hashes(1)] == VECTORS[4:6]


def test_media_agree_with_the_page() -> None:
    root = bytes.fromhex(VECTORS[0])
    digest = hashlib.sha256(b"image").digest()
    tokens = [1, 2, 3, 3, 3, 6, 7, 8]
    chain = HashChain(root, 4)
    first, second = chain.extend(tokens, [Media(digest, 2, 3)])
    assert Media(digest, 2, 3).record() == bytes.fromhex(VECTORS[6])
    assert first == block_by_the_page(1, root, tokens[:4], [(digest, 3, 2)]) == bytes.fromhex(VECTORS[7])
    assert second == block_by_the_page(1, first, tokens[4:]) == bytes.fromhex(VECTORS[8])
    assert chain.group_hashes(1) == [bytes.fromhex(VECTORS[9])] == [block_by_the_page(2, first, [3])]


def test_media_among_the_successors_of_a_lookahead_block_count() -> None:
    root = bytes.fromhex(VECTORS[0])
    digest = hashlib.sha256(b"image").digest()
    chain = HashChain(root, 4)
    (first,) = chain.extend([1, 2, 3, 4, 5, 6], [Media(digest, 5, 9)])
    assert chain.group_hashes(2) == [block_by_the_page(2, first, [5, 6], [(digest, 9, 1)])]
