"""Tensors to bytes and back: the KV block codecs.

Public names. `import quant` does not import torch: names that need it are loaded on first use (PEP 562).

    BlockShape, BlockCodec, get_codec, register, codec_names, codec_from_parameters
    BlockTooLossy, HeadError, CodecError
    Int4Codec, RawCodec, Int8KCodec
    RecordLayout, record_layout, record_bytes          where things lie in an int4 record
    encode_records, decode_records, decode_records_rotated, rotate_back, unpack_records, validate_records
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quant.codec import (
    BlockCodec,
    BlockShape,
    BlockTooLossy,
    CodecError,
    HeadError,
    codec_from_parameters,
    codec_names,
    get_codec,
    register,
)
from quant.record_layout import RecordLayout, record_bytes, record_layout

if TYPE_CHECKING:
    from quant.int4 import Int4Codec
    from quant.int4_records import (
        decode_records,
        decode_records_rotated,
        encode_records,
        unpack_records,
        validate_records,
    )
    from quant.int8k import Int8KCodec
    from quant.raw import RawCodec
    from quant.rotation import rotate_back

_LAZY = {
    "Int4Codec": "quant.int4",
    "Int8KCodec": "quant.int8k",
    "RawCodec": "quant.raw",
    "decode_records": "quant.int4_records",
    "decode_records_rotated": "quant.int4_records",
    "encode_records": "quant.int4_records",
    "rotate_back": "quant.rotation",
    "unpack_records": "quant.int4_records",
    "validate_records": "quant.int4_records",
}

__all__ = [
    "BlockCodec",
    "BlockShape",
    "BlockTooLossy",
    "CodecError",
    "HeadError",
    "Int4Codec",
    "Int8KCodec",
    "RawCodec",
    "RecordLayout",
    "codec_from_parameters",
    "codec_names",
    "decode_records",
    "decode_records_rotated",
    "encode_records",
    "get_codec",
    "record_bytes",
    "record_layout",
    "register",
    "rotate_back",
    "unpack_records",
    "validate_records",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
