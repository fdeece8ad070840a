"""A second int4 implementation, in plain Python, written from docs/formats/int4.md alone. Slow on purpose.

It shares no code with `quant`. binary32 arithmetic is done in binary64 and rounded once, which is exact for
+ - * / (53 >= 2 * 24 + 2). Rows are lists of 16 tokens, each a list of floats that are binary32 values.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

Rows = list[list[float]]
LIMIT = 2.0**112


def f32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def constant(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


STEP = {15: constant(0x3D888889), 31: constant(0x3D042108), 7: constant(0x3E124925)}
NEGATED_127TH = constant(0xBC010204)
BASE_FACTOR = constant(0x3B1B1017)


def e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


POSITIVE = [e4m3_value(code) for code in range(0x7F)]


def e4m3_code(x: float) -> int:
    """Nearest of the finite codes, ties to the even code."""
    return min(range(0x7F), key=lambda code: (abs(POSITIVE[code] - x), code & 1))


def bf16_bits(x: float) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", x))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits: int) -> float:
    return constant(bits << 16)


def splitmix64(d: int) -> int:
    mask = (1 << 64) - 1
    u = (0x6B76696E7434 + (d + 1) * 0x9E3779B97F4A7C15) & mask
    u = (u ^ (u >> 30)) * 0xBF58476D1CE4E5B9 & mask
    u = (u ^ (u >> 27)) * 0x94D049BB133111EB & mask
    return u ^ (u >> 31)


def sign(d: int) -> int:
    return -1 if splitmix64(d) >> 63 else 1


def power_of_two(dim: int) -> int:
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    return size


def butterflies(y: list[float], rounded: bool) -> list[float]:
    y, size, h = list(y), power_of_two(len(y)), 1
    while h < size:
        for start in range(0, len(y), 2 * h):
            for j in range(start, start + h):
                a, b = y[j], y[j + h]
                y[j], y[j + h] = (f32(a + b), f32(a - b)) if rounded else (a + b, a - b)
        h *= 2
    return y


@dataclass
class Scales:
    base: int
    codes: list[int]

    def decoded(self, i: int) -> float:
        return f32(e4m3_value(self.codes[i]) * bf16_value(self.base))

    def inverse(self, i: int) -> float:
        return f32(1.0 / self.decoded(i))


def make_scales(true: list[float]) -> Scales:
    base = bf16_bits(max(f32(max(true) * BASE_FACTOR), 2.0**-100))
    return Scales(base, [e4m3_code(max(f32(s / bf16_value(base)), 2.0**-9)) for s in true])


def rint(x: float) -> int:
    return round(x)


def clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def usable(rows: Rows) -> bool:
    return all(abs(x) < LIMIT for row in rows for x in row)


class Tally:
    """E and G of section 7."""

    def __init__(self) -> None:
        self.errors = 0
        self.signal = 0

    def add(self, code: int, v: float, q: int, z: int) -> None:
        weight = rint(e4m3_value(code)) ** 2
        self.errors += weight * rint(f32(64.0 * f32(v - q))) ** 2
        self.signal += weight * (q - z) ** 2

    def accepts(self, bound: float) -> bool:
        return not float(self.errors) > float(self.signal) * (bound * bound * 4096.0)


def encode_keys(x: Rows, bits: int, bound: float) -> tuple[Scales, list[int], Rows, bool]:
    top, dim = (1 << bits) - 1, len(x[0])
    low = [min(row[c] for row in x) for c in range(dim)]
    high = [max(row[c] for row in x) for c in range(dim)]
    true = [
        max(f32(f32(high[c] - low[c]) * STEP[top]), f32(low[c] * NEGATED_127TH), f32(low[c] / 128)) for c in range(dim)
    ]
    scales, zeros, tally = make_scales(true), [0] * dim, Tally()
    codes: Rows = [[0] * dim for _ in range(16)]
    for c in range(dim):
        z = rint(f32(-low[c] * scales.inverse(c)))
        if not -128 <= z <= 127:
            scales.codes[c] += 1
            z = rint(f32(-low[c] * scales.inverse(c)))
        assert -128 <= z <= 127
        assert scales.codes[c] <= 0x7E
        zeros[c] = z
        for t in range(16):
            v = f32(f32(x[t][c] * scales.inverse(c)) + z)
            codes[t][c] = clamp(rint(v), 0, top)
            tally.add(scales.codes[c], v, int(codes[t][c]), z)
    return scales, zeros, codes, tally.accepts(bound)


def encode_values(x: Rows, bits: int, bound: float) -> tuple[Scales, list[int], Rows, bool]:
    top, dim = (1 << bits) - 1, len(x[0])
    w = f32(1.0 / math.sqrt(power_of_two(dim)))
    rotated = [butterflies([sign(d) * row[d] for d in range(dim)], rounded=True) for row in x]
    low = [f32(min(*y, 0.0) * w) for y in rotated]
    high = [f32(max(*y, 0.0) * w) for y in rotated]
    scales = make_scales([f32(f32(high[t] - low[t]) * STEP[top]) for t in range(16)])
    zeros, tally, codes = [0] * 16, Tally(), []
    for t in range(16):
        zeros[t] = z = clamp(rint(f32(-low[t] * scales.inverse(t))), 0, top)
        factor = f32(scales.inverse(t) * w)
        vs = [f32(f32(y * factor) + z) for y in rotated[t]]
        codes.append([clamp(rint(v), 0, top) for v in vs])
        for v, q in zip(vs, codes[t], strict=True):
            tally.add(scales.codes[t], v, q, z)
    return scales, zeros, codes, tally.accepts(bound if bits == 4 else bound * 15.0 / 7.0)


class Parts:
    """Where the parts of a record begin (section 2)."""

    def __init__(self, dk: int, dv: int, kb: int, vb: int) -> None:
        sizes = [
            ("k_codes", 8 * dk),
            ("v_codes", (8 if vb == 4 else 4) * dv),
            ("k_plane", 2 * dk if kb == 5 else 0),
            ("v_plane", 2 * dv if vb == 3 else 0),
            ("k_scales", dk),
            ("k_zeros", dk),
            ("v_scales", 16 if dv else 0),
            ("v_zeros", 8 if dv else 0),
            ("k_base", 2),
            ("v_base", 2 if dv else 0),
        ]
        self.at: dict[str, int] = {}
        total = 0
        for name, size in sizes:
            self.at[name] = total
            total += size
        self.used = total
        self.size = (total + 63) // 64 * 64


def key_place(c: int, t: int, dk: int) -> tuple[int, int]:
    half = c % (dk // 2)
    return 64 * (half // 4) + 4 * t + half % 4, 4 * (c >= dk // 2)


def value_place(d: int, t: int, dv: int) -> tuple[int, int]:
    return 4 * dv * (t % 8 // 4) + 4 * d + t % 4, 4 * (t >= 8)


def encode(keys: Rows, values: Rows | None, kb: int = 4, vb: int = 4, bound: float = 0.15) -> bytes | None:
    """The record, or None when it is refused."""
    dk, dv = len(keys[0]), len(values[0]) if values else 0
    if not usable(keys) or not usable(values or []):
        return None
    parts = Parts(dk, dv, kb, vb)
    at, out = parts.at, bytearray(parts.size)
    scales, zeros, codes, good = encode_keys(keys, kb, bound)
    for c in range(dk):
        out[at["k_scales"] + c] = scales.codes[c]
        out[at["k_zeros"] + c] = zeros[c] & 255
        for t in range(16):
            q = int(codes[t][c])
            byte, shift = key_place(c, t, dk)
            out[byte] |= (q & 15) << shift
            if kb == 5:
                out[at["k_plane"] + 8 * (c // 4) + t // 2] |= (q >> 4) << (4 * (t % 2) + c % 4)
    struct.pack_into("<H", out, at["k_base"], scales.base)
    if values:
        scales, zeros, codes, fine = encode_values(values, vb, bound)
        good = good and fine
        for t in range(16):
            out[at["v_scales"] + t] = scales.codes[t]
            out[at["v_zeros"] + t % 8] |= zeros[t] << (4 * (t >= 8))
            for d in range(dv):
                q = int(codes[t][d])
                if vb == 4:
                    byte, shift = value_place(d, t, dv)
                    out[at["v_codes"] + byte] |= q << shift
                else:
                    out[at["v_codes"] + 4 * d + t % 4] |= (q & 3) << (2 * (t // 4))
                    out[at["v_plane"] + dv // 2 * (t // 4) + d // 2] |= (q >> 2) << (4 * (d % 2) + t % 4)
        struct.pack_into("<H", out, at["v_base"], scales.base)
    return bytes(out) if good else None


def decode(record: bytes, dk: int, dv: int, kb: int = 4, vb: int = 4) -> tuple[Rows, Rows, Rows]:
    """(keys, values, values in rotated space), binary32."""
    parts = Parts(dk, dv, kb, vb)
    at = parts.at
    assert len(record) == parts.size

    def bf16_at(name: str) -> float:
        return bf16_value(struct.unpack_from("<H", record, at[name])[0])

    keys: Rows = [[0.0] * dk for _ in range(16)]
    for c in range(dk):
        s = f32(e4m3_value(record[at["k_scales"] + c]) * bf16_at("k_base"))
        z = struct.unpack_from("<b", record, at["k_zeros"] + c)[0]
        for t in range(16):
            byte, shift = key_place(c, t, dk)
            q = record[byte] >> shift & 15
            if kb == 5:
                q |= (record[at["k_plane"] + 8 * (c // 4) + t // 2] >> (4 * (t % 2) + c % 4) & 1) << 4
            keys[t][c] = f32((q - z) * s)
    values: Rows = []
    rotated: Rows = []
    for t in range(16 if dv else 0):
        s = f32(e4m3_value(record[at["v_scales"] + t]) * bf16_at("v_base"))
        z = record[at["v_zeros"] + t % 8] >> (4 * (t >= 8)) & 15
        codes = []
        for d in range(dv):
            if vb == 4:
                byte, shift = value_place(d, t, dv)
                codes.append((record[at["v_codes"] + byte] >> shift & 15) - z)
            else:
                high = record[at["v_plane"] + dv // 2 * (t // 4) + d // 2] >> (4 * (d % 2) + t % 4) & 1
                codes.append((record[at["v_codes"] + 4 * d + t % 4] >> (2 * (t // 4)) & 3 | high << 2) - z)
        factor = f32(s * f32(1.0 / math.sqrt(power_of_two(dv))))
        whole = butterflies([float(code) for code in codes], rounded=False)
        rotated.append([f32(code * s) for code in codes])
        values.append([f32(int(sign(d) * whole[d]) * factor) for d in range(dv)])
    return keys, values, rotated
