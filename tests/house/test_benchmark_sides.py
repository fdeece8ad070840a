"""Peers in processes of their own, the sides of the decode suite, and the card's suite on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.decoding import stack
from benchmarks.decoding.own_side import OwnSide
from benchmarks.decoding.recording import recorded
from benchmarks.peers import PeerError, PeerProcess, peer_python
from benchmarks.rows import Options
from benchmarks.suites import gpu
from benchmarks.suites.decode import Logits, divergence

ROOT = Path(__file__).resolve().parents[2]
PEER = "tests.house.echo_peer"


def test_a_peer_answers_fails_and_dies_and_each_is_told_apart() -> None:
    peer = PeerProcess(sys.executable, PEER)
    assert peer.version == "1.2"
    assert peer.seconds("double", 1.5) == 3.0
    with pytest.raises(PeerError, match="ValueError: not today"):
        peer.seconds("fail")
    assert peer.seconds("double", 2) == 4.0
    with pytest.raises(PeerError, match="ended with code 7"):
        peer.seconds("die")
    peer.close()


def test_a_peer_that_is_named_wrongly_is_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_python("KVSTORE_NO_SUCH_PEER", ".venv-none") is None
    monkeypatch.setenv("KVSTORE_NO_SUCH_PEER", "/nowhere/python")
    with pytest.raises(RuntimeError, match="KVSTORE_NO_SUCH_PEER is '/nowhere/python'"):
        peer_python("KVSTORE_NO_SUCH_PEER", ".venv-none")


@pytest.fixture(scope="module")
def model() -> object:
    return stack.random_stack(stack.TINY, 2, 1_024)


def test_a_prepared_context_decodes_as_the_models_own_cache_does(model: object) -> None:
    """The recorded prefill lies where attention looks: full precision gives transformers' own logits."""
    from transformers import DynamicCache

    from benchmarks.decoding.cache_side import CacheSide

    tokens = torch.randint(0, stack.VOCABULARY, (260,), generator=torch.Generator().manual_seed(3)).tolist()
    context = recorded(model, tokens, 240)
    kept, expected = Logits(), Logits()
    cache = CacheSide(model, DynamicCache(config=model.config), [context] * 2)  # type: ignore[attr-defined]
    cache.keep = expected.keep
    cache.decode(6)
    side = OwnSide(model, "tiny", "raw", [context] * 2, 16)
    try:
        side.keep = kept.keep
        side.decode(4)
        step, own = side.decode_split(2)
        assert 0 < own < step
        assert side.cold_share() == 0
        kl, top1 = divergence(expected.rows, kept.rows)
        assert kl < 1e-4
        assert top1 > 0.9
        assert len(kept.rows[1]) == 6
        with pytest.raises(RuntimeError, match="continuation is used up"):
            side.decode(40)
    finally:
        side.close()


def test_with_int4_old_blocks_are_cold_and_no_block_is_shared(model: object) -> None:
    tokens = torch.randint(0, stack.VOCABULARY, (480,), generator=torch.Generator().manual_seed(4)).tolist()
    context = recorded(model, tokens, 448)
    side = OwnSide(model, "tiny", "int4", [context] * 2, 8)
    try:
        side.decode(2)
        blocks = 448 // 16
        assert side.cold_share() == pytest.approx((blocks - 1 - 128 // 16) / (blocks + 1), abs=0.04)
        tables = [set(side.store.tables(name)[0].tolist()) for name in side.store.sequence_ids()]
        assert not tables[0] & tables[1]
    finally:
        side.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_without_a_card_the_gpu_suite_says_so() -> None:
    for command in (["benchmarks.suites.gpu"], ["benchmarks", "--suite", "gpu", "--json", "-"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "no CUDA device" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_gpu_suites_rows_come_out_on_any_device() -> None:
    said: list[str] = []
    rows = list(gpu.device_rows(torch.device("cpu"), gpu.SMALL, Options(rounds=1, log=said.append)))
    cases = {row.case for row in rows}
    assert {
        "device_copy",
        "encode_int4_d128",
        "decode_int4_d128",
        "attention_int4_8k_b8",
        "attention_bf16_8k_b8",
    } <= cases
    assert "attention_int4_8k_b8_vs_sdpa" in cases
    assert any("need a card" in line for line in said)
    assert all(row.value > 0 for row in rows)
