"""Decode steps of peers that have an environment of their own, beside our INT4 loop: same contexts, same rounds.

A peer that is not installed is named in the log and leaves no row.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import PeerError, PeerProcess, peer_python
from benchmarks.rows import Options, Row, compared, rotated

if TYPE_CHECKING:
    from benchmarks.decoding.own_side import OwnSide
    from benchmarks.decoding.recording import Recording

_TRANSFORMERS_NOTE = (
    "quanto, hqq: transformers' QuantizedCache, 4 bits, groups of 64, newest 128 tokens in bf16, same weights and "
    "contexts; it decodes the whole cache in each step."
)
_LLAMA_NOTE = (
    "llamacpp: llama.cpp through xllamacpp with flash attention on the GGUF that the model comes from (weights Q4_1, "
    "ours are bf16: it reads a quarter of our weight bytes); the first text of ours in all 8 slots."
)


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    variable: str
    environment: str
    module: str
    setting: str
    shown: str
    note: str


_TRANSFORMERS = ("KVSTORE_QUANTIZED_PYTHON", ".venv-quantized", "benchmarks.decoding.quantized_peer")
_LLAMA = ("KVSTORE_LLAMACPP_PYTHON", ".venv-llamacpp", "benchmarks.decoding.llamacpp_peer")
PEERS = (
    _Peer("quanto4", *_TRANSFORMERS, "quanto", "QuantizedCache, quanto", _TRANSFORMERS_NOTE),
    _Peer("hqq4", *_TRANSFORMERS, "hqq", "QuantizedCache, hqq", _TRANSFORMERS_NOTE),
    _Peer("llamacpp_q8_0", *_LLAMA, "q8_0", "llama.cpp, KV in q8_0", _LLAMA_NOTE),
    _Peer("llamacpp_q4_0", *_LLAMA, "q4_0", "llama.cpp, KV in q4_0", _LLAMA_NOTE),
)


def rows(side: OwnSide, name: str, sequences: Sequence[Recording], rounds: int, options: Options) -> Iterator[Row]:
    """One row a peer that is here. side: our loop, whose sequences have the contexts `sequences`."""
    with tempfile.TemporaryDirectory() as folder:
        written: Path | None = None
        for peer in PEERS:
            python = peer_python(peer.variable, peer.environment)
            if python is None:
                options.log(f"decode: {peer.shown} is not here; run make bench-peers or set {peer.variable}")
                continue
            written = written or _write(Path(folder), sequences)
            try:
                yield _measured(peer, python, side, written, rounds)
            except PeerError as error:
                options.log(f"decode: {peer.shown} left out: {error}")


def _measured(peer: _Peer, python: str, side: OwnSide, folder: Path, rounds: int) -> Row:
    process = PeerProcess(python, peer.module, str(folder), peer.setting)
    try:
        process.seconds("prepare")
        samples = rotated({"ours": lambda _: side.decode(1), "theirs": lambda _: process.seconds("decode", 1)}, rounds)
    finally:
        process.close()
    return compared(
        "decode",
        f"smollm2_4k_b8_int4_vs_{peer.name}",
        "ms",
        [1e3 * seconds for seconds in samples["ours"]],
        better="smaller",
        baseline=f"{peer.shown} ({process.version})",
        theirs=[1e3 * seconds for seconds in samples["theirs"]],
        note=peer.note,
    )


def _write(folder: Path, sequences: Sequence[Recording]) -> Path:
    """What a peer needs: where the model is, and each different context once."""
    import torch

    from engine_adapter.model_source import SMOLLM2, packaged_model_dir, packaged_model_parts

    contexts = {id(one): one for one in sequences}
    numbers = {identity: number for number, identity in enumerate(contexts)}
    for number, one in enumerate(contexts.values()):
        for kind, tensors in (("keys", one.keys), ("values", one.values)):
            array = torch.stack(list(tensors)).contiguous().view(torch.int16).numpy()
            array.tofile(folder / f"{kind}{number}.bin")
    group = sequences[0].keys[0]
    described = {
        "model": str(packaged_model_dir(SMOLLM2)),
        "gguf": [str(part) for part in packaged_model_parts(SMOLLM2)],
        "shape": [len(sequences[0].keys), *group.shape],
        "sequences": [numbers[id(one)] for one in sequences],
        "contexts": [{"token_ids": one.token_ids, "continuation": one.continuation} for one in contexts.values()],
    }
    (folder / "case.json").write_text(json.dumps(described), encoding="utf-8")
    return folder
