"""The stored vectors: both implementations reproduce them bit for bit."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.int4_records import decode_records, decode_records_rotated, encode_records_checked, validate_records
from tests.quant import plain_int4
from tests.quant.plain_int4 import Rows

VECTORS = [
    pytest.param(row, id=f"{path.stem}: {row['name']}")
    for path in sorted((Path(__file__).parent / "vectors").glob("*.json"))
    for row in json.loads(path.read_text())
]


def rows_of(row: dict[str, Any], part: str, dim: int) -> Rows:
    data = bytes.fromhex(row[part])
    if row["input"] == "bfloat16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    values = struct.unpack(f"<{len(data) // 4}f", data)
    return [list(values[i : i + dim]) for i in range(0, len(values), dim)] if dim else []


def digest(tensor: torch.Tensor | None) -> str:
    return hashlib.sha256(b"" if tensor is None else tensor.contiguous().numpy().tobytes()).hexdigest()


def test_there_are_vectors_for_every_listed_dim() -> None:
    rows = [param.values[0] for param in VECTORS]
    assert {64, 80, 96, 128, 192, 256, 512, 576} <= {row["key_dim"] for row in rows}
    assert {(row["key_bits"], row["value_bits"]) for row in rows} == {(4, 4), (4, 3), (5, 4), (5, 3)}
    assert {row["accepted"] for row in rows} == {True, False}


@pytest.mark.parametrize("row", VECTORS)
def test_reference_reproduces(row: dict[str, Any]) -> None:
    dims = row["key_dim"], row["value_dim"]
    bits = {"key_bits": row["key_bits"], "value_bits": row["value_bits"]}
    kind = torch.bfloat16 if row["input"] == "bfloat16" else torch.float32
    keys = torch.tensor([rows_of(row, "keys", dims[0])]).to(kind)
    values = torch.tensor([rows_of(row, "values", dims[1])]).to(kind) if dims[1] else None
    records, accepted = encode_records_checked(keys, values, **bits, error_bound=row["error_bound"])
    assert accepted.tolist() == [row["accepted"]]
    if not row["accepted"]:
        return
    assert records.numpy().tobytes().hex() == row["record"]
    assert validate_records(records, *dims, **bits).tolist() == [True]
    decoded_keys, decoded_values = decode_records(records, *dims, torch.float32, **bits)
    assert digest(decoded_keys) == row["decoded_keys_sha256"]
    assert digest(decoded_values) == row["decoded_values_sha256"]
    assert digest(decode_records_rotated(records, *dims, torch.float32, **bits)[1]) == row["decoded_rotated_sha256"]


@pytest.mark.parametrize("row", [param for param in VECTORS if param.values[0]["key_dim"] <= 64])  # type: ignore[index]
def test_plain_implementation_reproduces(row: dict[str, Any]) -> None:
    keys, values = rows_of(row, "keys", row["key_dim"]), rows_of(row, "values", row["value_dim"])
    record = plain_int4.encode(keys, values or None, row["key_bits"], row["value_bits"], row["error_bound"])
    assert (record.hex() if record else None) == row["record"]
