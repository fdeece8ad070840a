"""Writes tests/quant/vectors/*.json from the plain implementation. Run by hand when the format changes:

python -m tests.quant.make_vectors
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

from tests.quant import plain_int4
from tests.quant.plain_int4 import Rows, f32

FOLDER = Path(__file__).parent / "vectors"


def pack(rows: Rows) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def bf16(x: float) -> float:
    return plain_int4.bf16_value(plain_int4.bf16_bits(f32(x)))


def normal(seed: int, dim: int, outliers: float = 1.0, bfloat: bool = True) -> Rows:
    """Gaussian rows with an offset and a scale per channel; channel 1 is `outliers` times as large."""
    draw = random.Random(seed)
    offset = [draw.gauss(0, 1) for _ in range(dim)]
    size = [math.exp(draw.gauss(0, 0.5)) for _ in range(dim)]
    size[1] *= outliers
    rows = [[offset[c] + size[c] * draw.gauss(0, 1) for c in range(dim)] for _ in range(16)]
    return [[bf16(x) if bfloat else f32(x) for x in row] for row in rows]


def filled(x: float, dim: int) -> Rows:
    return [[f32(x)] * dim for _ in range(16)]


def changed(rows: Rows, t: int, d: int, x: float) -> Rows:
    copy = [list(row) for row in rows]
    copy[t][d] = f32(x) if math.isfinite(x) else x
    return copy


def half_steps(dim: int) -> Rows:
    """Values whose rotation is one channel of 15 steps and the others nearly half a step, which all round to zero."""
    rotated = plain_int4.butterflies([15.0] + [0.499] * (dim - 1), rounded=False)
    return [[f32(plain_int4.sign(d) * rotated[d]) for d in range(dim)] for _ in range(16)]


def row(
    name: str, keys: Rows, values: Rows | None, kb: int = 4, vb: int = 4, bound: float = 0.15
) -> dict[str, Any]:
    dims = len(keys[0]), len(values[0]) if values else 0
    record = plain_int4.encode(keys, values, kb, vb, bound)
    parts = [pack(keys), pack(values or [])]
    short = all(part[i] == part[i + 1] == 0 for part in parts for i in range(0, len(part), 4))
    found: dict[str, Any] = {
        "name": name, "key_dim": dims[0], "value_dim": dims[1], "key_bits": kb, "value_bits": vb,
        "error_bound": bound, "input": "bfloat16" if short else "float32",
    }  # fmt: skip
    for part, data in zip(("keys", "values"), parts, strict=True):
        found[part] = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4)).hex() if short else data.hex()
    found["accepted"] = record is not None
    found["record"] = record.hex() if record else None
    if record:
        for part, decoded in zip(("keys", "values", "rotated"), plain_int4.decode(record, *dims, kb, vb), strict=True):
            found[f"decoded_{part}_sha256"] = hashlib.sha256(pack(decoded)).hexdigest()
    return found


def special(dim: int = 16) -> list[dict[str, Any]]:
    ones = filled(1.0, dim)
    random_rows = normal(5, dim, bfloat=False)
    constants = {"tenth": 0.1, "millionth": 1e-6, "60000": 6e4, "minus-one": -1.0, "1e-30": 1e-30, "3": 3.0, "-2e33": -2e33}
    rows = [row(f"constant {name}", filled(x, dim), filled(x, dim)) for name, x in constants.items()]
    rows += [
        row("all zero", filled(0.0, dim), filled(0.0, dim)),
        row("all negative zero", filled(-0.0, dim), filled(-0.0, dim)),
        row("one value differs", changed(filled(0.1, dim), 7, 3, 0.2), changed(filled(0.1, dim), 7, 3, 0.2)),
        row("one value differs, negative", changed(filled(-5.0, dim), 15, 15, 3.0), changed(ones, 0, 0, -3.0)),
        row("subnormals", [[f32((t * dim + d - 99) * 2.0**-149) for d in range(dim)] for t in range(16)], ones),
        row("subnormal values", ones, [[f32((t * dim + d) * 2.0**-140) for d in range(dim)] for t in range(16)]),
        row("wide range of channels", [[f32(x * 10.0 ** (d - 8)) for d, x in enumerate(r)] for r in random_rows], ones),
        row("wide range of tokens", ones, [[f32(x * 10.0 ** (t - 8)) for x in r] for t, r in enumerate(random_rows)]),
        row("just below the limit", changed(random_rows, 0, 0, 2.0**111 * 1.99), changed(random_rows, 1, 1, -(2.0**111))),
        row("at the limit", changed(random_rows, 0, 0, 2.0**112), random_rows),
        row("3e38", filled(3e38, dim), ones),
        row("nan in keys", changed(random_rows, 4, 4, math.nan), random_rows),
        row("nan in values", random_rows, changed(random_rows, 4, 4, math.nan)),
        row("inf in values", random_rows, changed(random_rows, 9, 1, -math.inf)),
        row("too lossy values", random_rows, half_steps(64)),
        row("values at 3 bits are held to a wider bound", random_rows, half_steps(16), vb=3),
        row("too lossy keys at a bound of 0.05", random_rows, ones, bound=0.05),
    ]
    return rows


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    files = {"special": special()}
    for kb in (4, 5):
        for vb in (4, 3):
            files[f"bits-k{kb}-v{vb}"] = [row("random, float32", normal(1, 24, 50.0, False), normal(2, 16, 1, False), kb, vb)]
    for dim in (8, 64, 80, 96, 128, 192, 256, 512):
        files[f"dim-{dim}"] = [row("random with an outlier channel", normal(dim, dim, 50.0), normal(dim + 1, dim))]
    files["dim-192-128"] = [row("keys wider than values", normal(3, 192), normal(4, 128))]
    files["latent-576"] = [row("random latent", normal(576, 576, 20.0), None)]
    files["latent-576-k5"] = [row("random latent, 5 bits", normal(577, 576), None, kb=5)]
    for name, rows in files.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
