"""INT4 kernels of one form, compiled apart and driven with addresses; and what they should find, in float64."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quant import native, rotate_back
from quant.int4_records import decode_records, encode_records_checked
from tests.quant.native.build_kit import COMPILER, SOURCES, run

AVX512 = ("f", "bw", "dq", "vl", "vnni")
WIDE = [f"-mavx512{name}" for name in AVX512] + ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
FORMS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "avx512": WIDE,
    "amx": [*WIDE, "-DKV_EMULATE_AMX"],
}
"""Compiler flags of each form; AMX on tiles in C, since few machines have real ones."""
LOG2_E = math.log2(math.e)
HERE = Path(__file__).parent


class Driven(ctypes.Structure):
    """`driven` of int4_driver.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "records", "table", "first", "last", "maximum", "sum", "acc")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("heads", "rows", "key_dim", "value_dim", "latent", "key_bits", "value_bits"),
                *("record_bytes", "pieces", "chunk", "masked"),
            )
        ),
        ("softcap", ctypes.c_double),
    ]


def runs_here(form: str) -> bool:
    """Can this CPU run the form?"""
    return form == "baseline" or ("avx512" if form == "amx" else form) in native.available_paths()


def build(form: str, folder: Path) -> ctypes.CDLL:
    """The driver with the form's kernels."""
    library = folder / f"{form}.so"
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = [str(COMPILER), *flags, "-shared", "-fPIC", f"-I{SOURCES}", f"-DKV_PATH={form}", *FORMS[form]]
    run([*command, str(HERE / "int4_driver.c"), "-o", str(library), "-lm"])
    return ctypes.CDLL(str(library))


def guarded(records: torch.Tensor) -> torch.Tensor:
    """The same bytes, ending where memory ends: what reads behind the last record dies."""
    size = -(-records.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(buffer.data_ptr() + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return buffer[size - records.numel() : size].copy_(records.reshape(-1)).view(records.shape)


@dataclass
class Case:
    """INT4 blocks of some heads, query rows and what they see. Query Tensor[heads, rows, key_dim]."""

    key_dim: int = 128
    value_dim: int = 128
    latent: bool = False
    key_bits: int = 4
    value_bits: int = 4
    rows: int = 4
    heads: int = 2
    pieces: int = 37
    chunk: int = 64
    softcap: float = 0.0
    window: tuple[torch.Tensor, torch.Tensor] | None = None  # first and last positions, int32[rows]
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.rows + self.key_dim)
        self.query = torch.randn(self.heads, self.rows, self.key_dim, generator=generator)
        blocks = self.pieces + 3
        keys = torch.randn(blocks * self.heads, 16, self.key_dim, generator=generator)
        keys = keys * torch.linspace(0.3, 2, self.key_dim) + 2 * torch.sin(torch.arange(self.key_dim) * 1.7)
        values = None if self.latent else torch.randn(blocks * self.heads, 16, self.value_dim, generator=generator)
        records, accepted = encode_records_checked(
            keys, values, key_bits=self.key_bits, value_bits=self.value_bits, error_bound=0.9
        )
        assert accepted.all()
        self.records = guarded(records)
        self.table = torch.randperm(blocks, generator=generator)[: self.pieces].int()

    def found(self, library: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor]:
        """(float64[heads, rows, value_dim], sums float32[heads, rows])."""
        scale = self.key_dim**-0.5 * (1 if self.softcap else LOG2_E)
        query = (self.query * scale).contiguous()
        ends = torch.zeros(self.rows, dtype=torch.int32), torch.full((self.rows,), 1 << 30, dtype=torch.int32)
        first, last = self.window or ends
        maximum, total = (torch.full((self.heads, self.rows), math.nan) for _ in range(2))
        acc = torch.full((self.heads, self.rows, self.value_dim), math.nan)
        tensors = (query, self.records, self.table, first, last, maximum, total, acc)
        driven = Driven(
            *(tensor.data_ptr() for tensor in tensors),
            *(self.heads, self.rows, self.key_dim, self.value_dim, self.latent, self.key_bits, self.value_bits),
            *(self.records.shape[1], self.pieces, self.chunk, self.window is not None, self.softcap),
        )
        assert library.drive(ctypes.byref(driven)) == 1, "wrote behind its scratch"
        out = acc / total[..., None]
        return (out if self.latent else rotate_back(out)).double(), total

    def expected(self) -> torch.Tensor:
        """Float64 on the decoded values; NaN for rows that see nothing."""
        blocks = len(self.records) // self.heads
        picked = self.records.view(blocks, self.heads, -1)[self.table.long()].transpose(0, 1).flatten(0, 1)
        dims = self.key_dim, 0 if self.latent else self.value_dim
        keys, values = decode_records(picked, *dims, key_bits=self.key_bits, value_bits=self.value_bits)
        keys = keys.view(self.heads, -1, self.key_dim).double()
        value = keys[..., : self.value_dim] if values is None else values.view(self.heads, -1, self.value_dim).double()
        scores = self.query.double() @ keys.transpose(1, 2) * self.key_dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.window is not None:
            position = torch.arange(scores.shape[-1])
            hidden = (position < self.window[0][:, None]) | (position > self.window[1][:, None])
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ value


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(RMS, largest), both relative to the expected RMS."""
    rms, error = expected.pow(2).mean().sqrt(), found - expected
    return float(error.pow(2).mean().sqrt() / rms), float(error.abs().max() / rms)
