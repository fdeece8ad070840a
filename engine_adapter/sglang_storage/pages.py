"""Pages of SGLang's host pools as rows of bytes, where they lie. Any thread; the pool must outlive what is returned."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.copy_key import CopyKey
from kvstore.tier import ByteRow


class Page(NamedTuple):
    """One copy: its key, its bytes in order, and the hash of the page before it."""

    key: CopyKey
    rows: list[ByteRow]
    parent: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


def rows_at(pointers: Sequence[int], sizes: Sequence[int]) -> list[ByteRow]:
    """uint8 [size] at each pointer, writable, no copy.

    One array spans them all and is cut, which is quicker than one made for each; nothing between them is touched.
    """
    if not pointers:
        return []
    base = min(pointers)
    span = max(pointer + size for pointer, size in zip(pointers, sizes, strict=True)) - base
    whole = np.frombuffer(memoryview((ctypes.c_uint8 * span).from_address(base)), np.uint8)
    return [whole[at - base : at - base + size] for at, size in zip(pointers, sizes, strict=True)]


def page_rows(pool: Any, host_indices: Any, page_count: int, split: int = 1) -> list[list[ByteRow]]:
    """The pieces of each page of `host_indices`, and of each of its `split` head ranges apart.

    pool: SGLang's; its get_page_buffer_meta says where a page lies. host_indices: int64 Tensor[pages * page tokens].
    """
    if split > 1:
        pointers, sizes = pool.get_split_heads_page_buffer_meta(host_indices, split)
    else:
        pointers, sizes = pool.get_page_buffer_meta(host_indices)
    rows = rows_at([int(one) for one in pointers], [int(one) for one in sizes])
    count = page_count * split
    pieces = len(rows) // count if count else 0
    if pieces * count != len(rows):
        raise ValueError(f"host pool gave {len(rows)} pieces for {page_count} pages; expected as many for each")
    return [rows[at : at + pieces] for at in range(0, len(rows), pieces)] if pieces else []


def gather(pages: Sequence[Page], row: ByteRow) -> list[ByteRow]:
    """Copy the pages one behind the other to the start of `row`; each page's part of it."""
    parts, at = [], 0
    for page in pages:
        first = at
        for piece in page.rows:
            row[at : at + piece.nbytes] = piece
            at += piece.nbytes
        parts.append(row[first:at])
    return parts


def cut(pages: Sequence[Page], row: ByteRow) -> list[ByteRow]:
    """The parts of `row` that pages one behind the other would have."""
    parts, at = [], 0
    for page in pages:
        parts.append(row[at : at + page.size_bytes])
        at += page.size_bytes
    return parts


def scatter(part: ByteRow, page: Page) -> None:
    """Copy a page's bytes to its pieces."""
    at = 0
    for piece in page.rows:
        piece[:] = part[at : at + piece.nbytes]
        at += piece.nbytes
