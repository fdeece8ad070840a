"""Does the C hash chain compute what it should? Asked at import, before it is used; see quant.native.selftest.

Against hashlib, which the standard library has everywhere, over one message of each padded length. No torch, no numpy.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

_BLOCK_TOKENS = (1, 3, 4, 16, 37)  # messages that end before, in and behind the last 64 bytes of their padding
_IDS = [0, 1, 255, 256, 65_535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


def check(extension: Any) -> str:
    """What is wrong, "" when all is well."""
    way = extension.sha_best()
    for block_tokens in _BLOCK_TOKENS:
        tokens = array("I", (_IDS * 9)[: 2 * block_tokens])
        last, expected = bytes(range(32)), []
        for start in (0, block_tokens):
            span = tokens[start : start + block_tokens]
            message = b"\x01" + last + b"".join(word.to_bytes(4, "little") for word in (block_tokens, *span, 0))
            expected.append(last := hashlib.sha256(message).digest())
        if extension.hash_chain(bytes(range(32)), tokens, block_tokens) != expected:
            return f"the chain of two blocks of {block_tokens} tokens, SHA-256 by {way}, differs from hashlib's"
    if extension.token_bytes(_IDS) != array("I", _IDS).tobytes():
        return "token ids lose their value on the way to uint32"
    if any(extension.token_bytes([0, wrong]) is not None for wrong in (-1, 1 << 32, 1 << 64, True, 1.0)):
        return "a token id out of range, or no int, is taken for one"
    return ""
