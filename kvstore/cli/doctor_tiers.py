"""`kvstore doctor --tiers`: the tiers of the settings, asked to store and give back blocks for real.

Each is opened as a store opens it, given copies under a root that nobody else can have, timed, read back byte for byte,
and cleaned up. A disk directory that a running store holds is reported as held, not as broken.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from allocator import KVGeometry
from allocator.errors import KVError

if TYPE_CHECKING:
    from kvstore.config import KVStoreConfig
    from kvstore.tier import Tier

Report = dict[str, Any]


class _Round(NamedTuple):
    put_seconds: float
    get_seconds: float
    one_block_seconds: float
    codes: set[str]
    wrong_blocks: int


_BLOCKS = 32
_LAYERS, _KV_HEADS, _HEAD_DIM = 32, 8, 128  # a block of an 8B model: 2 MiB
_WAIT_SECONDS = 20.0
_NONE = "no tier below the device is configured (host_bytes, disk_path, redis_url), so none was looked at"
_SEND_BUFFER = Path("/proc/sys/net/core/wmem_default")
_SEND_BUFFER_BYTES = 4 << 20


def tiers_report(config_path: Path | None) -> Report:
    """What --json writes under "tiers". ConfigError for settings that are none."""
    from kvstore.config import KVStoreConfig

    config = KVStoreConfig.load(config_path)
    rows = [_check(name, config) for name in _named(config)]
    problems = [f"tier {row['name']}: {row['state']}" for row in rows if not row["healthy"]]
    return {"tiers": rows, "problems": problems if rows else [_NONE]}


def print_tiers(report: Report) -> None:
    if not report["tiers"]:
        typer.echo(_NONE)
    for row in report["tiers"]:
        typer.echo(f"tier {row['name']:<8} {row['state']}{' at ' + row['place'] if row['place'] else ''}")
        if row["healthy"]:
            typer.echo(
                f"{'':<14}{row['used_bytes'] / 2**20:,.0f} of {row['capacity_bytes'] / 2**20:,.0f} MiB used; "
                f"{row['blocks']} blocks of {row['block_bytes'] / 2**20:.1f} MiB: write "
                f"{row['put_bytes_per_second'] / 1e9:.2f} GB/s, read {row['get_bytes_per_second'] / 1e9:.2f} GB/s, "
                f"one block {row['get_latency_seconds'] * 1e3:.2f} ms"
            )
        if "advice" in row:
            typer.echo(f"{'':<14}{row['advice']}")


def _named(config: KVStoreConfig) -> list[str]:
    asked = (("host", config.host_bytes), ("disk", config.disk_path), ("remote", config.redis_url))
    return [name for name, setting in asked if setting]


def _place(name: str, config: KVStoreConfig) -> str:
    """The directory, or the server's address without credentials."""
    if name == "remote":
        from kvstore.redis_tier.url import redacted

        return redacted(config.redis_url)
    return config.disk_path if name == "disk" else ""


def _check(name: str, config: KVStoreConfig) -> Report:
    row: Report = {"name": name, "healthy": False, "place": _place(name, config)}
    try:
        tier = _open(name, config)
    except (KVError, OSError) as error:
        return row | {"state": f"cannot be opened: {error}"}
    try:
        return row | _measure(tier) | (_send_buffer_advice(config.redis_url) if name == "remote" else {})
    except (KVError, OSError) as error:
        return row | {"state": f"failed: {error}"}
    finally:
        tier.close()


def _send_buffer_advice(url: str) -> Report:
    """On a Unix socket a server sends as much at a time as the system's default lets it; {} where that is enough."""
    try:
        default_bytes = int(_SEND_BUFFER.read_text(encoding="ascii")) if url.startswith("unix:") else _SEND_BUFFER_BYTES
    except (OSError, ValueError):
        return {}
    if default_bytes >= _SEND_BUFFER_BYTES:
        return {}
    return {
        "advice": f"faster with net.core.wmem_default={_SEND_BUFFER_BYTES} (now {default_bytes}) set before the server "
        "starts: it sends a block in pieces of that size"
    }


def _geometry() -> KVGeometry:
    return KVGeometry.uniform(layers=_LAYERS, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM)


def _open(name: str, config: KVStoreConfig) -> Tier:
    """That tier alone, as a store with these settings opens it."""
    from dataclasses import replace

    from allocator import ExtentLayout
    from kvstore.assembly import own_tiers

    others: dict[str, dict[str, Any]] = {
        "host": {"disk_path": "", "redis_url": ""},
        "disk": {"host_bytes": 0, "redis_url": ""},
        "remote": {"host_bytes": 0, "disk_path": ""},
    }
    geometry = _geometry()
    slot_bytes = geometry.full_slot_bytes(0)
    layout = ExtentLayout(4 * slot_bytes, (slot_bytes,))
    settings = replace(config, **others[name], io_threads="thread", host_prefault=False)
    (tier,) = own_tiers(geometry, settings, layout, lambda _cause: None)
    return tier


def _measure(tier: Tier) -> Report:
    """Blocks in, blocks out, compared, and gone again; twice, since the first round also touches fresh memory."""
    block_bytes = _geometry().full_slot_bytes(0)
    capacity = tier.capacity_bytes
    count = max(1, min(_BLOCKS, capacity // 8 // block_bytes)) if capacity else _BLOCKS
    rounds = [_round(tier, count, block_bytes) for _ in range(2)]
    codes = {code for one in rounds for code in one.codes}
    wrong = sum(one.wrong_blocks for one in rounds)
    if codes or wrong:
        causes = ", ".join(f"{cause} {number}" for cause, number in tier.counters().items() if number)
        return {"state": f"not well: {', '.join(sorted(codes)) or f'{wrong} blocks came back wrong'} ({causes})"}
    return {
        "healthy": True,
        "state": "works",
        "blocks": count,
        "block_bytes": block_bytes,
        "used_bytes": tier.used_bytes,
        "capacity_bytes": capacity,
        "put_bytes_per_second": count * block_bytes / min(one.put_seconds for one in rounds),
        "get_bytes_per_second": count * block_bytes / min(one.get_seconds for one in rounds),
        "get_latency_seconds": min(one.one_block_seconds for one in rounds),
    }


def _round(tier: Tier, count: int, block_bytes: int) -> _Round:
    import numpy as np

    from kvstore.copy_key import CopyKey
    from kvstore.tier import ResultCode

    root = secrets.token_bytes(32)  # nobody's: no store can ask for these copies, or meet them
    heads, layers = (0, _KV_HEADS), (0, _LAYERS)
    keys = [CopyKey(root, 0, secrets.token_bytes(32), "raw", True, heads, layers) for _ in range(count)]
    payloads = [np.random.default_rng(n).integers(0, 256, block_bytes, dtype=np.uint8) for n in range(count)]
    buffers = [np.zeros(block_bytes, np.uint8) for _ in range(count)]
    items = [(key, [payload]) for key, payload in zip(keys, payloads, strict=True)]
    try:
        put_seconds, put_codes = _timed(tier, lambda: tier.submit_put(items))
        get_seconds, get_codes = _timed(tier, lambda: tier.submit_get(list(zip(keys, buffers, strict=True))))
        wrong = sum(not np.array_equal(a, b) for a, b in zip(payloads, buffers, strict=True))
        one_seconds, _ = _timed(tier, lambda: tier.submit_get([(keys[0], buffers[0])]))
    finally:
        tier.delete(keys)
    codes = {str(code) for code in (*put_codes, *get_codes) if code is not ResultCode.OK}
    return _Round(put_seconds, get_seconds, one_seconds, codes, wrong)


def _timed(tier: Tier, submit: Any) -> tuple[float, Sequence[Any]]:
    """Seconds from submit to completion, and the results. KVError when none comes."""
    started = time.perf_counter()
    submit()
    while True:
        done = tier.poll()
        took = time.perf_counter() - started
        if done:
            return took, done[0].results
        if took > _WAIT_SECONDS:
            raise KVError(f"no answer within {_WAIT_SECONDS:g} s")
        time.sleep(0.0002)
