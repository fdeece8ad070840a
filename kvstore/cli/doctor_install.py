"""`kvstore doctor --install`: what is installed, in which version, and what an absent part would add. Imports none."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

import typer

DISTRIBUTION = "kvstore-llm"
Report = dict[str, Any]

_PARTS = (
    # distribution, module, what it is for
    ("torch", "torch", "tensors: the slab, the codecs, the decode loop"),
    ("numpy", "numpy", "tables of blocks"),
    ("lmdb", "lmdb", "disk tier: its index"),
    ("redis", "redis", "remote tier"),
    ("hiredis", "hiredis", "remote tier: replies"),
    ("zstandard", "zstandard", "second stage of raw copies"),
    ("xxhash", "xxhash", "checksums of frames"),
    ("msgspec", "msgspec", "messages of the daemon"),
    ("prometheus_client", "prometheus_client", "metrics"),
    ("transformers", "transformers", "Hugging Face models [transformers]"),
    ("starlette", "starlette", "HTTP: server and daemon [daemon]"),
    ("uvicorn", "uvicorn", "HTTP: server and daemon [daemon]"),
    ("pyzmq", "zmq", "KV events for routers [daemon]"),
    ("triton", "triton", "attention on CUDA cards [triton]"),
    ("cupy-cuda13x", "cupy", "CUDA kernels for moving and coding blocks [cuda13]"),
    ("vllm", "vllm", "vLLM as engine [vllm]"),
)


def install_report() -> Report:
    """What --json writes under "install". A required part that is absent is a problem; an optional one is listed."""
    required = _required()
    parts, problems = [], []
    for distribution, module, purpose in _PARTS:
        found = _version(distribution) if find_spec(module) is not None else None
        needed = distribution.replace("_", "-") in required
        present = find_spec(module) is not None
        parts.append(
            {"name": distribution, "version": found, "present": present, "required": needed, "purpose": purpose}
        )
        if needed and not present:
            problems.append(f"{distribution} is required and not installed: {purpose}")
    own = _version(DISTRIBUTION)
    if own is None:
        problems.append(f"{DISTRIBUTION} itself is not installed: commands of upper packages are not registered")
    return {
        "version": own,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "parts": parts,
        "problems": problems,
    }


def print_install(report: Report) -> None:
    typer.echo(f"{DISTRIBUTION} {report['version'] or 'not installed'}, Python {report['python']}, {report['system']}")
    width = max(len(one["name"]) for one in report["parts"])
    for one in report["parts"]:
        state = (one["version"] or "present") if one["present"] else "absent"
        typer.echo(f"  {one['name']:<{width}}  {state:<14} {one['purpose']}")
    for problem in report["problems"]:
        typer.echo(f"problem   {problem}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _required() -> set[str]:
    """Names of the distributions that ours needs without any extra; ours not installed: torch and numpy at least."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {"torch", "numpy"}
    names = set()
    for line in lines:
        if "extra ==" not in line:
            name = line.split(";")[0]
            for mark in "<>=!~[ ":
                name = name.split(mark)[0]
            names.add(name.strip().lower().replace("_", "-"))
    return names
