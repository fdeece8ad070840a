"""`kvstore inspect` on real directories and real servers: what it finds, what it deletes, what does not break it."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.cli.inspect_report import duration, size
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.parsing import FrameSpec, build_scatter
from kvstore.inspection import MOST_FAMILIES, Selection
from kvstore.redis_tier.inspection import NamespaceInspector, parse_name
from kvstore.redis_tier.tier import RedisTier
from kvstore.redis_tier.url import parse_redis_url
from kvstore.testing.transfer_contract import key_of, payload_of
from tests.kvstore.disk_kit import INLINE, OK, SLOT, only_slot_file, program, stored
from tests.servers import Cluster, Server

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[3]
SECRET = "a secret of tests, 32 bytes long"


def specs(key: CopyKey, payload_bytes: int) -> FrameSpec:
    return FrameSpec(key, 16, 64, 64, "bfloat16", payload_bytes)


def fill(tier: DiskTier | RedisTier, count: int = 6) -> None:
    """Raw copies of 4 KiB and INT4 ones of 80 KiB with parameters, of another root."""
    raw = [key_of(n) for n in range(count)]
    int4 = [int4_key(n) for n in range(count)]
    for keys, payload_bytes in ((raw, INLINE), (int4, SLOT)):
        tier.submit_put([(key, [payload_of(key, payload_bytes)]) for key in keys])
        assert set(tier.poll()[-1].results) == {OK}


def int4_key(number: int) -> CopyKey:
    return key_of(number, root=b"\x55" * 32, codec="int4", exact=False, parameters=b"k5v4")


def directory_of(path: Path, **settings: Any) -> Path:
    tier = DiskTier(path, 8 * MIB, specs=specs, **settings)
    fill(tier)
    tier.close()
    return path


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run the command with --json -; exit code and findings."""

    def run(*words: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main(["inspect", *map(str, words), "--json", "-"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    return run


# directories ---------------------------------------------------------------------------------------------------------


def test_a_directory_is_listed_and_verified(tmp_path: Path, inspect: Callable[..., Any]) -> None:
    directory = directory_of(tmp_path / "kv")
    before = sorted((file.name, file.read_bytes()) for file in directory.iterdir() if "lock" not in file.name)
    code, found = inspect(directory)
    assert (code, found["copies"], found["corrupt"], found["roots"], found["gone"]) == (0, 12, {}, 2, 0)
    families = {one["codec"]: one for one in found["families"]}
    assert families["raw"] | {"age_seconds": 0} == families["raw"] | {
        "copies": 6, "exact": True, "group": 0, "heads": "0-2", "layers": "0-4", "root": "07" * 32, "age_seconds": 0,
        "shape": "16 tokens, K 64, V 64, bfloat16", "parameters": "0",
    }  # fmt: skip
    assert families["int4"]["bytes"] >= 6 * SLOT
    assert families["int4"]["age_seconds"]["most"] < 100
    assert before == sorted((file.name, file.read_bytes()) for file in directory.iterdir() if "lock" not in file.name)
    assert inspect(directory, "--codec", "int4", "--no-verify")[1]["copies"] == 6
    assert inspect(directory, "--root", "0707")[1]["copies"] == 6


def test_corrupt_copies_are_named_and_deleted_when_asked(tmp_path: Path, inspect: Callable[..., Any]) -> None:
    directory = directory_of(tmp_path / "kv")
    with only_slot_file(directory).open("r+b") as file:
        size_bytes = int(file.name.rpartition("-")[2])
        file.seek(2 * size_bytes + 5000)
        file.write(b"other")
        file.seek(4 * size_bytes)
        file.write(bytes(64))
    code, found = inspect(directory)
    assert (code, found["corrupt"]) == (1, {"payload_checksum": 1, "magic": 1})
    assert {one["copy"].rpartition(":")[2] for one in found["corrupt_copies"]} == {f"{n:064x}" for n in (2, 4)}
    assert inspect(directory, "--no-verify")[0] == 0, "nothing was read"
    code, found = inspect(directory, "--delete-corrupt", "--yes")
    assert (code, found["deleted"]) == (0, 2)
    assert inspect(directory)[1]["copies"] == 10
    code, found = inspect(directory, "--delete", "--codec", "int4", "--yes")
    assert (code, found["deleted"]) == (0, 4)
    assert not list(directory.glob("slots-*")), "the room of deleted copies is still held"
    tier = DiskTier(directory, 8 * MIB, specs=specs)
    assert stored(tier, range(6)) == list(range(6))
    tier.close()


def test_a_directory_in_use_can_be_looked_at_and_is_not_deleted_from(
    tmp_path: Path, inspect: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        import sys
        from kvstore.disk_tier.tier import DiskTier
        from tests.kvstore.disk_kit import INLINE, put
        tier = DiskTier(sys.argv[1], 4 << 20)
        put(tier, range(8), INLINE)
        print("go", flush=True)
        sys.stdin.read()
        put(tier, range(8, 16), INLINE)
        tier.close()
    """
    holder = program(text, tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"go\n"
    code, found = inspect(tmp_path)
    assert (code, found["copies"]) == (0, 8)
    assert found["notes"][0] == f"in use by process {holder.pid}"
    assert main(["inspect", str(tmp_path), "--delete", "--codec", "raw", "--yes"]) == 1
    assert f"in use by process {holder.pid}" in capsys.readouterr().err
    holder.communicate(timeout=60)
    assert holder.returncode == 0
    code, found = inspect(tmp_path)
    assert (code, found["copies"], found["notes"]) == (0, 16, [])
    assert found["file_bytes"] >= found["bytes"]


def test_signed_copies(tmp_path: Path, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = directory_of(tmp_path / "kv", secret=SECRET.encode())
    code, found = inspect(directory)
    assert (code, found["signed_unchecked"], found["corrupt"]) == (0, 12, {})
    monkeypatch.setenv("KVSTORE_SECRET", SECRET)
    code, found = inspect(directory)
    assert (code, found["signed_unchecked"], found["unsigned"], found["corrupt"]) == (0, 0, 0, {})
    monkeypatch.setenv("KVSTORE_SECRET", "another secret of some bytes")
    code, found = inspect(directory)
    assert (code, found["corrupt"]) == (1, {"forged": 12})
    code, found = inspect(directory_of(tmp_path / "unsigned"))
    assert (code, found["unsigned"], found["corrupt"]) == (0, 12, {})


def test_an_index_that_cannot_be_read(tmp_path: Path, inspect: Callable[..., Any]) -> None:
    directory = directory_of(tmp_path / "kv")
    index = directory / "index.lmdb"
    os.truncate(index, index.stat().st_size // 2)
    assert inspect(directory) == (1, None)
    code, found = inspect(directory, "--delete-corrupt", "--yes")
    assert (code, found["copies"]) == (0, 0)
    assert inspect(directory)[0] == 0


# bad usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["."],
        ["--delete", "--yes", "."],
        ["--delete", "--delete-corrupt", "--codec", "raw", "--yes", "."],
        ["--delete-corrupt", "--no-verify", "--yes", "."],
        ["--delete", "--codec", "raw", "."],
        ["--model", "toy", "."],
        ["--json", "/no/such/folder/file", "."],
        ["gopher://host"],
        [],
    ],
)
def test_bad_usage(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inspect", *(str(tmp_path) if word == "." else word for word in words)])
    assert code == (1 if words == ["."] else 2)
    assert capsys.readouterr().err


def test_the_target_may_come_from_the_settings(
    tmp_path: Path, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_DISK_PATH", str(directory_of(tmp_path / "kv")))
    assert inspect()[1]["copies"] == 12
    monkeypatch.setenv("KVSTORE_REDIS_URL", "redis://127.0.0.1:1")
    assert inspect()[0] == 2, "two places are set"


def test_text_goes_to_standard_output_and_nothing_else(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "kv")
    command = [sys.executable, "-m", "kvstore.cli", "inspect", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    head, _, header, *rows = done.stdout.splitlines()
    assert head.startswith(f"{directory}: 12 copies, ")
    assert header.split()[:4] == ["root", "group", "codec", "form"]
    assert [row.split()[2] for row in rows[:2]] == ["raw", "int4"]
    assert (size(5 * MIB), size(12), duration(7200), duration(0.2)) == ("5.0 MiB", "12 B", "2h", "0s")


# servers -------------------------------------------------------------------------------------------------------------


def remote(url: str, **settings: Any) -> RedisTier:
    return RedisTier(url, spec_of=specs, **settings)


def test_a_namespace_is_listed_verified_and_deleted_from(inspect: Callable[..., Any]) -> None:
    with Server() as server, server.client() as client:
        tier = remote(server.unix_url, ttl_seconds=1000)
        tier.describe_root(key_of(1).root, {"model": "toy", "tenant": "a\x1b[31m"})
        fill(tier)
        tier.read_epoch()
        code, found = inspect(server.unix_url)
        assert (code, found["copies"], found["roots"], found["corrupt"], found["foreign"]) == (0, 12, 2, {}, 0)
        families = {one["codec"]: one for one in found["families"]}
        assert families["raw"]["description"] == {"model": "toy", "tenant": "a\\x1b[31m"}
        assert families["int4"]["shape"] == "16 tokens, K 64, V 64, bfloat16"
        assert 900 < families["raw"]["ttl_left_seconds"]["least"] <= 1000
        assert families["raw"]["idle_seconds"]["most"] is not None
        name = tier._names.of(key_of(3))
        client.setrange(name, 1000, b"other bytes")
        client.set(tier._names.of(key_of(70)), b"")
        code, found = inspect(server.unix_url)
        assert (code, found["corrupt"]) == (1, {"payload_checksum": 1, "length": 1})
        code, found = inspect(server.unix_url, "--delete-corrupt", "--yes")
        assert (code, found["deleted"], client.exists(name)) == (0, 2, 0)
        code, found = inspect(server.unix_url, "--delete", "--model", "toy", "--yes")
        assert (code, found["deleted"]) == (0, 5)
        code, found = inspect(server.unix_url)
        assert (code, found["copies"], [one["codec"] for one in found["families"]]) == (0, 6, ["int4"])
        tier.close()


def test_looking_is_no_use_of_a_copy(inspect: Callable[..., Any]) -> None:
    with Server() as server, server.client() as client:
        tier = remote(server.unix_url)
        fill(tier, 2)
        name = tier._names.of(key_of(1))
        client.execute_command("CLIENT", "NO-TOUCH", "ON")
        life = client.pttl(name)
        time.sleep(2.1)
        assert inspect(server.unix_url)[0] == 0
        assert client.object("idletime", name) >= 2
        assert client.pttl(name) < life - 2000
        tier.close()


def test_a_cluster_is_walked_node_by_node(inspect: Callable[..., Any]) -> None:
    with Cluster() as cluster:
        tier = remote(cluster.url)
        fill(tier, 30)
        code, found = inspect(cluster.url)
        assert (code, found["copies"], found["corrupt"]) == (0, 60, {})
        code, found = inspect(cluster.url, "--delete", "--codec", "raw", "--yes")
        assert (code, found["deleted"]) == (0, 30)
        cluster.nodes[2].kill()
        code, found = inspect(cluster.url)
        assert code == 1
        assert 0 < found["copies"] < 30
        assert "cannot be reached" in found["problems"][0]
        tier.close()


def test_a_server_that_is_not_there(inspect: Callable[..., Any]) -> None:
    code, found = inspect("redis://127.0.0.1:1")
    assert code == 1
    assert "cannot be reached" in found["problems"][0]
    with Server("requirepass sesame") as server:
        code, found = inspect(server.unix_url.replace("unix://", "unix://:wrong@"))
        assert code == 1
        assert "wrong" not in json.dumps(found)


def hostile_server(server: Server, draw: random.Random) -> None:
    with server.client() as client:
        tier = remote(server.unix_url)
        fill(tier)
        name = tier._names.of
        good = b"".join(build_scatter(specs(key_of(1), INLINE), [payload_of(key_of(1), INLINE)]))
        tall, wide = bytearray(good), bytearray(good)
        tall[12:16], wide[136:140] = b"\xc0\xff\xff\xff", b"\xff\xff\xff\xff"
        client.rpush(name(key_of(20)), "a")
        client.hset(name(key_of(21)), "a", "b")
        for number, value in enumerate([b"", b"\x80\x04}\x94.", good, bytes(tall), bytes(wide), good * 2, bytes(5000)]):
            client.set(name(key_of(30 + number)), value)
        client.setrange(name(key_of(40)), 200 * MIB, b"x")
        client.set(f"kv1:root:{'08' * 32}", b'{"a":' * 2000)
        client.set(f"kv1:root:{'09' * 32}", b'{"model": {"deep": [1]}, "x": "\xc3\xa9"}')
        client.rpush(f"kv1:root:{'0a' * 32}", "a")
        client.set("kv1:root:short", "x")
        client.set("kv1:" + 3 * MIB * "x", "x")  # a name that is longer than any reply of ours
        for _ in range(300):
            client.set(b"kv1:" + draw.randbytes(draw.randrange(60)), draw.randbytes(30))
        for n in range(3 * MOST_FAMILIES):
            client.set(name(key_of(1, root=n.to_bytes(32, "big"))), b"x")
        tier.close()


def test_hostile_namespaces_break_nothing(inspect: Callable[..., Any]) -> None:
    with Server() as server:
        hostile_server(server, random.Random(5))
        tracemalloc.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        inspector = NamespaceInspector(parse_redis_url(server.unix_url), secret=None)
        found = inspector.inspect(verify=True, selection=Selection(), delete="none", advance=lambda done, total: None)
        inspector.close()
        peak, grown = tracemalloc.get_traced_memory()[1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        tracemalloc.stop()
        assert found.problems == []
        assert found.copy_count == 12 + 2 + 7 + 1 + 3 * MOST_FAMILIES
        assert sum(found.corrupt.values()) == found.copy_count - 12
        assert found.corrupt["type"] == 2
        assert found.foreign_count >= 270
        assert len(found.families) <= MOST_FAMILIES + 1
        assert peak < 16 * MIB
        assert grown < 64 << 10, "KiB"
        json.dumps(found.to_json())
        code, found = inspect(server.unix_url, "--delete-corrupt", "--yes")
        assert code == 0
        code, found = inspect(server.unix_url)
        assert (code, found["copies"], found["foreign"] >= 270) == (0, 12, True)


def test_names_are_parsed_back() -> None:
    from kvstore.redis_tier.frames import KeyNames

    names = KeyNames("kv1")
    for key in (key_of(1), int4_key(2), key_of(3, codec="a/b: c%", heads=(7, 65535), group=65535)):
        found = parse_name(names.of(key)[4:])
        assert found is not None
        assert found[0].with_hash(key.hash) == CopyKey(*key[:7], b"")
        assert (found[1] == "0") is (not key.parameters)
    good = names.of(key_of(1))[4:]
    for bad in (good[:-1], good + b"0", good.replace(b"g0", b"g65536"), good.replace(b"h0-2", b"h2-0"), b"", b"\xff"):
        assert parse_name(bad) is None
