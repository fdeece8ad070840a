"""Finding, converting and loading models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allocator import ConfigError
from engine_adapter import model_source
from engine_adapter.conversion_scratch import clear_stale
from engine_adapter.model_source import (
    CACHE_VARIABLE,
    SMOLLM2,
    PackagedModel,
    load_model,
    model_cache_dir,
    packaged_model_dir,
    weights_digest,
)
from tests.engine_adapter.paged_kit import tiny_model


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert model_cache_dir() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    assert model_cache_dir() == Path.home() / ".cache" / "kvstore-llm"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    absent = PackagedModel(name="absent", parts=(("no_such_package_here", "x.gguf"),), install="pip install absent")
    with pytest.raises(FileNotFoundError, match="no_such_package_here not installed; run `pip install absent`"):
        packaged_model_dir(absent)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path, torch.float32)
    with pytest.raises(FileNotFoundError, match="no weights"):
        weights_digest(tmp_path)


@pytest.mark.parametrize("dtype", ["float99", "int8", 5, "nn"])
def test_a_dtype_that_is_none_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match="dtype: got"):
        load_model(tmp_path, dtype)


def test_weights_digest_follows_content_not_the_note(tmp_path: Path) -> None:
    first, same, other = tmp_path / "first", tmp_path / "same", tmp_path / "other"
    tiny_model("llama", seed=1).save_pretrained(first)
    tiny_model("llama", seed=1).save_pretrained(same)
    tiny_model("llama", seed=2).save_pretrained(other)
    digest = weights_digest(first)
    assert digest == weights_digest(same) != weights_digest(other)
    note = {"weights_sha256": "00", "weight_files": model_source._file_marks(first)}
    (first / "kvstore-source.json").write_text(json.dumps(note))
    assert weights_digest(first) == "00", "a note that fits the files is believed"
    weights = first / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert weights_digest(first) not in ("00", digest)
    (first / "kvstore-source.json").write_text("{half a no")
    assert weights_digest(first) not in ("00", digest)


def _fresh(folder: Path, content: str, note: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(content)
    (folder / "kvstore-source.json").write_text(json.dumps(note))
    return folder


def test_a_finished_folder_appears_in_one_step_and_the_first_of_equals_wins(tmp_path: Path) -> None:
    wanted = {"conversion": 1}
    final, replaced = tmp_path / "model", tmp_path / "replaced"
    _fresh(final, "stale", {"conversion": 0})
    model_source._publish(_fresh(tmp_path / "a", "first", wanted), final, replaced, wanted)
    assert (final / "weights").read_text() == "first"
    assert (replaced / "weights").read_text() == "stale"
    model_source._publish(_fresh(tmp_path / "b", "second", wanted), final, replaced, wanted)
    assert (final / "weights").read_text() == "first"


CONVERTING = """
import sys
from pathlib import Path
from engine_adapter.conversion_scratch import scratch_folder
with scratch_folder(Path(sys.argv[1]), "model") as scratch:
    (scratch / "half").write_bytes(bytes(100))
    print(scratch, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_conversion_left_goes_and_a_living_one_s_stays(tmp_path: Path) -> None:
    killed, living = (
        subprocess.Popen(
            [sys.executable, "-c", CONVERTING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        for _ in range(2)
    )  # fmt: skip
    with killed, living:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, used = (Path(one.stdout.readline().decode().strip()) for one in (killed, living))  # type: ignore[union-attr]
        killed.kill()
        killed.wait()
        older, newer, other = tmp_path / ".model-older", tmp_path / ".model-newer", tmp_path / "model"
        for folder in (older, newer, other):
            folder.mkdir()
        os.utime(older, (0, 0))
        clear_stale(tmp_path, "model")
        assert sorted(one for one in tmp_path.iterdir() if one.is_dir()) == sorted((used, newer, other))
        assert (used / "half").exists()
        assert not Path(f"{left}.lock").exists()
        living.communicate()
        assert sorted(tmp_path.iterdir()) == sorted((newer, other))


@pytest.mark.model
def test_packaged_model_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if model_source._locate(*SMOLLM2.parts[0]) is None:
        pytest.skip(f"not installed: {SMOLLM2.install}")
    folder = packaged_model_dir()
    monkeypatch.setattr(model_source, "_convert", None)  # calling it again would be a TypeError
    assert packaged_model_dir() == folder
    assert not list(folder.parent.glob(f".{SMOLLM2.name}-*")), "a half-converted folder was left behind"
    loaded = load_model(None, "float32")
    assert loaded.model.dtype == torch.float32
    assert loaded.weights == model_source._hash_files([folder / "model.safetensors"])
    assert loaded.tokenizer.decode(loaded.tokenizer("hello world")["input_ids"]) == "hello world"
