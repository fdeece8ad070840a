"""The C hash chain against hashlib: every way to compute SHA-256, every message length, every token list."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.errors import UsageError
from kvstore import HashChain, Identity
from kvstore.operations import HASH_CHAIN
from kvstore.token_ids import as_token_array
from quant import dispatch, native
from quant.native import check_hash

pytestmark = pytest.mark.skipif(native.kernels is None, reason=f"no native kernels: {native.reason}")
kernels = native.kernels
WAYS = [name for name, runs_here in kernels.sha_ways() if runs_here] if kernels is not None else ["none"]
ROOT = bytes(range(32))
TOKENS = st.integers(0, (1 << 32) - 1)


def by_hashlib(parent: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens), block_tokens):
        message = struct.pack(f"<I{block_tokens}II", block_tokens, *tokens[start : start + block_tokens], 0)
        hashes.append(parent := hashlib.sha256(b"\x01" + parent + message).digest())
    return hashes


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chain_is_that_of_hashlib(way: str, data: st.DataObject) -> None:
    block_tokens = data.draw(st.integers(1, 70))
    tokens = data.draw(st.lists(TOKENS, min_size=0, max_size=6)) * block_tokens
    parent = data.draw(st.binary(min_size=32, max_size=32))
    assert kernels.hash_chain(parent, array("I", tokens), block_tokens, way) == by_hashlib(parent, tokens, block_tokens)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_tokens", [*range(1, 36), 240, 241, 256, 1000, 5000])
def test_every_padded_length(way: str, block_tokens: int) -> None:
    """Blocks around each multiple of 64 bytes, and messages too long for the buffer on the stack."""
    tokens = [(number * 2654435761) % (1 << 32) for number in range(3 * block_tokens)]
    found = kernels.hash_chain(ROOT, np.array(tokens, dtype=np.uint32), block_tokens, way)
    assert found == by_hashlib(ROOT, tokens, block_tokens)


@pytest.mark.parametrize("way", WAYS)
def test_a_long_prompt_without_the_lock(way: str) -> None:
    """Long enough that Python's lock is given away meanwhile."""
    tokens = np.random.default_rng(3).integers(0, 1 << 32, 32_768, dtype=np.uint32)
    assert kernels.hash_chain(ROOT, tokens, 16, way) == by_hashlib(ROOT, tokens.tolist(), 16)


@pytest.mark.parametrize(
    ("parent", "tokens", "block_tokens", "message"),
    [
        (bytes(31), array("I", [1]), 1, "31 bytes"),
        (ROOT, array("I", [1, 2, 3]), 2, "12 bytes in items of 4"),
        (ROOT, array("Q", [1, 2]), 1, "items of 8"),
        (ROOT, b"12345678", 1, "items of 1"),
        (ROOT, array("I", [1]), 0, "got 0"),
        (ROOT, array("I", [1]), -1, "got -1"),
        (ROOT, array("I", [1]), 1 << 62, "got 4611686018427387904"),
        (ROOT, array("I", [1]), 1 << 32, "got 4294967296"),
        (ROOT, memoryview(bytes(13))[1:9].cast("I"), 1, "got 8 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(parent: bytes, tokens: object, block_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.hash_chain(parent, tokens, block_tokens)


def test_other_misuse_raises() -> None:
    with pytest.raises(ValueError, match="'md5' is not compiled in"):
        kernels.hash_chain(ROOT, array("I"), 1, "md5")
    with pytest.raises(TypeError, match="expected hash_chain"):
        kernels.hash_chain(ROOT)
    with pytest.raises(TypeError):
        kernels.hash_chain("text", array("I"), 1)
    with pytest.raises(TypeError):
        kernels.hash_chain(ROOT, [1, 2], 1)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.hash_chain(ROOT, np.zeros(8, dtype=np.uint32)[::2], 1)
    with pytest.raises(OverflowError):
        kernels.hash_chain(ROOT, array("I"), 1 << 64)


@given(st.lists(TOKENS, max_size=40))
def test_token_bytes_keep_every_value(ids: list[int]) -> None:
    expected = array("I", ids).tobytes()
    assert kernels.token_bytes(ids) == expected == kernels.token_bytes(tuple(ids))


@pytest.mark.parametrize(
    "wrong", [-1, 1 << 32, (1 << 64) - 1, 1 << 64, -(1 << 70), True, 1.0, "1", None, np.int64(3), np.uint32(3)]
)
def test_token_bytes_leave_all_but_plain_ids_to_others(wrong: object) -> None:
    assert kernels.token_bytes([1, wrong]) is None
    assert kernels.token_bytes(((wrong),)) is None


def test_token_bytes_take_lists_and_tuples_only() -> None:
    assert kernels.token_bytes(iter([1])) is None
    assert kernels.token_bytes(np.zeros(3, dtype=np.uint32)) is None
    assert kernels.token_bytes([]) == b""


def run(implementation: str, tokens: list[int]) -> list[bytes]:
    with dispatch.forced(HASH_CHAIN, "cpu", implementation):
        chain = HashChain(ROOT, 16)
        chain.extend(tokens[:7])
        for token in tokens[7:50]:  # one at a time, as decoding does
            chain.extend([token])
        chain.extend(tokens[50:])
        chain.truncate(len(tokens) // 2)
        chain.extend(tokens[len(tokens) // 2 :])
        return chain.hashes


def test_chains_are_the_same_natively_and_by_hashlib() -> None:
    tokens = [(number * 40503) % (1 << 32) for number in range(3000)]
    assert run("native", tokens) == run("hashlib", tokens) == by_hashlib(ROOT, tokens[:2992], 16)


@pytest.mark.parametrize("implementation", ["native", "hashlib"])
def test_long_lists_with_a_bad_token_name_it(implementation: str) -> None:
    with dispatch.forced(HASH_CHAIN, "cpu", implementation):
        for wrong in (-1, 1 << 32, True, 2.5, "x"):
            with pytest.raises(UsageError, match=r"index 150 is"):
                as_token_array([*range(150), wrong, *range(50)])  # type: ignore[list-item]
        assert as_token_array([*range(150), np.int64(7)]).tolist() == [*range(150), 7]  # type: ignore[list-item]
        assert as_token_array(tuple(range(150))).tolist() == list(range(150))


@pytest.mark.parametrize("setting", ["off", "auto"])
def test_published_vectors_hold_with_and_without_kernels(setting: str) -> None:
    """The page's root and the hashes after it, in a process of its own: the setting is read at import."""
    tests = Path(__file__).parents[2] / "kvstore" / "test_identity_vectors.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(
        command,
        env={**os.environ, "KVSTORE_KERNELS": setting},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_identity_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom kvstore import HashChain\nHashChain(bytes(32), 16).extend(list(range(160)))\n"
        "assert 'torch' not in sys.modules and 'quant.native' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


class Wrong:
    """The extension with one function spoilt."""

    def __init__(self, **spoilt: object) -> None:
        self.spoilt = spoilt

    def __getattr__(self, name: str) -> object:
        return self.spoilt.get(name) or getattr(kernels, name)


def test_self_test_finds_a_wrong_digest_and_a_lost_token() -> None:
    assert check_hash.check(kernels) == ""
    assert check_hash.check(Wrong()) == ""

    def of_less(parent: bytes, tokens: array[int], block_tokens: int) -> list[bytes]:
        return kernels.hash_chain(parent, tokens, block_tokens)[:-1]  # type: ignore[no-any-return]

    def of_another_token(parent: bytes, tokens: array[int], block_tokens: int) -> list[bytes]:
        other = tokens[:-1]
        other.append(tokens[-1] ^ 1)
        return kernels.hash_chain(parent, other, block_tokens)  # type: ignore[no-any-return]

    assert "differs from hashlib" in check_hash.check(Wrong(hash_chain=of_less))
    assert "differs from hashlib" in check_hash.check(Wrong(hash_chain=of_another_token))
    assert "lose their value" in check_hash.check(Wrong(token_bytes=lambda ids: array("I", ids).tobytes()[::-1]))

    def unchecked(ids: list[object]) -> bytes:
        return kernels.token_bytes(ids) or b"????"

    assert "taken for one" in check_hash.check(Wrong(token_bytes=unchecked))


def test_roots_of_identities_start_chains() -> None:
    root = Identity(model="m", weights="w", geometry=bytes(32)).root()
    assert HashChain(root, 4).extend([1, 2, 3, 4]) == by_hashlib(root, [1, 2, 3, 4], 4)


ARM_COMPILER, ARM_MACHINE = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(not (ARM_COMPILER and ARM_MACHINE), reason="no cross compiler for 64-bit Arm, or no emulator")
def test_arm_computes_the_same(tmp_path: Path) -> None:
    assert ARM_COMPILER
    assert ARM_MACHINE
    sources = Path(__file__).parents[3] / "quant" / "native" / "csrc"
    files = [str(sources / name) for name in ("hash.c", "sha_arm.c", "cpu.c")]
    driver, program = str(Path(__file__).parent / "hash_driver.c"), str(tmp_path / "driver")
    flags = ["-std=gnu11", "-O2", "-Wall", "-Werror", "-static", "-pthread", f"-I{sources}"]
    subprocess.run([ARM_COMPILER, *flags, driver, *files, "-o", program], check=True)
    done = subprocess.run([ARM_MACHINE, program], capture_output=True, text=True, check=True)
    tokens = [(number * 2654435761) % (1 << 32) for number in range(370)]
    expected = {
        f"{way} {size} {by_hashlib(ROOT, tokens[: 10 * size], size)[-1].hex()}"
        for way in ("sha", "plain")
        for size in (1, 3, 4, 16, 37)
    }
    assert set(done.stdout.splitlines()) == expected | {"best sha"}


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers need address space of their own")
def test_no_blocks_cost_no_message() -> None:
    """A message of 2**32 - 1 tokens has 16 GiB: a limit below that shows whether it is asked for."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from array import array\nfrom quant import native\n"
        "print(native.kernels.hash_chain(bytes(32), array('I'), 2**32 - 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
