"""What `kvstore serve` may be told, and what it says of the rest."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import ConfigError, TierError
from kvstore.cli import main
from kvstore.config import KVStoreConfig
from kvstore.daemon import DaemonSettings, protocol
from kvstore.daemon.settings import MOST_SEGMENTS
from kvstore.daemon.socket_lock import locked_directory
from kvstore.disk_tier.tier import DiskTier
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import ROOT
from tests.kvstore.disk_kit import put as put_on_disk
from tests.kvstore.disk_kit import stored as stored_on_disk


def test_serve_checks_its_settings_and_never_imports_torch(tmp_path: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text(
        f'[kvstore]\nhost_bytes = "64 MiB"\n[daemon]\nsocket_path = "{tmp_path}/run/s"\nallowed_uids = [1000]\n'
        '[daemon.quotas]\nalice = "1 MiB"\n[daemon.domains]\nteam = [1001, 1002]\n'
    )
    program = (
        "import sys; from kvstore.cli import main; import kvstore.daemon.server, kvstore.daemon.client\n"
        "code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    command = [sys.executable, "-c", program, "serve", "--check", "--config", str(good)]
    done = subprocess.run([*command, "--json", "-"], cwd=ROOT, capture_output=True, text=True, check=True)
    report, _, last = done.stdout.rpartition("}\n")
    assert last.strip() == "False 0"
    found = json.loads(report + "}")
    assert found["quotas"] == [["alice", 1 << 20]]
    assert found["host_bytes"] == 64 << 20
    assert not done.stderr
    bad = tmp_path / "bad.toml"
    bad.write_text('[kvstore]\nhost_bytes = "64 MiB"\n[daemon]\nsegment_bytes = 5000\n')
    done = subprocess.run([*command[:-1], str(bad)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "False 2" in done.stdout
    assert "segment_bytes: got 5000; expected a multiple of" in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lease_seconds": 0}, "lease_seconds: got 0"),
        ({"allowed_uids": "root"}, "allowed_uids: got 'root'"),
        ({"domains": {"a": [1], "b": [1]}}, "domains: got"),
        ({"domains": [1]}, "domains: got [1] (list)"),
        ({"domains": [["a"]]}, "domains: got [['a']] (list)"),
        ({"quotas": {"a": "many"}}, "quotas: got"),
        ({"quotas": [["a", 1, 2]]}, "quotas: got [['a', 1, 2]] (list)"),
        ({"disk_path": "/x", "disk_bytes": 5}, "disk_bytes: got 5; expected at least 1048576"),
        ({"quotas": {"good": "1 GiB", "bad": "4 Gx"}}, "quotas: got bad = '4 Gx'; expected names of tenants"),
        ({"quotas": {"\n": 1}}, "quotas: got the name '\\n', which is not up to 64 printable"),
        ({"domains": {"a": [1, 2], "b": [2]}}, "domains: got user id 2 in 'a' and in 'b'; expected"),
        ({"domains": {"a": [1], "b": ["x"]}}, "domains: got b = ['x']; expected"),
        ({"domains": {"a b": [1]}}, "domains: got the name 'a b', which is not 1 to 64"),
        ({"http_token": "file:/none/token"}, "http_token: got a file that cannot be read (No such file"),
        ({"http_token": "short"}, "http_token: got 5 bytes; expected 16 to 64 bytes"),
        ({"redis_url": "foo://x"}, "redis_url: got 'foo://x'"),
        ({"socket_path": "/" + "x" * 120}, "socket_path: got 121 characters"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], said: str) -> None:
    """Found by starting it: what only the start refused, or not even that, `--check` had called good."""
    store = {name: changes.pop(name) for name in list(changes) if name in KVStoreConfig.__dataclass_fields__}
    with pytest.raises(ConfigError) as caught:
        DaemonSettings(store=KVStoreConfig(host_bytes=1 << 20, **store), **changes)
    assert said in str(caught.value)


def test_all_segments_fit_the_answer_that_names_them() -> None:
    """Found here: of more than 19,000 a client could not read the answer to its ping and was cut off ten times a
    second."""
    pages = KVStoreConfig(host_bytes=mmap.PAGESIZE * MOST_SEGMENTS)
    assert DaemonSettings(store=pages, segment_bytes=mmap.PAGESIZE).segment_bytes == mmap.PAGESIZE
    largest = protocol.Pong(1 << 62, 1 << 47, 1 << 47, [1 << 31] * 2, [1 << 31] * MOST_SEGMENTS)
    assert len(protocol.encode(largest)) <= protocol.LONGEST_BYTES
    more = KVStoreConfig(host_bytes=mmap.PAGESIZE * (MOST_SEGMENTS + 1))
    with pytest.raises(ConfigError, match="expected at most 16384"):
        DaemonSettings(store=more, segment_bytes=mmap.PAGESIZE)


def test_environment_and_flags_go_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[kvstore]\nhost_bytes = "8 MiB"\n[daemon]\nclients_limit = 5\ndrain_seconds = 1\n')
    environ = {"KVSTORE_DAEMON_CLIENTS_LIMIT": "7", "KVSTORE_HOST_BYTES": "16 MiB"}
    found = DaemonSettings.load(file, environ, {"host_bytes": "32 MiB", "drain_seconds": None})
    assert (found.store.host_bytes, found.clients_limit, found.drain_seconds) == (32 << 20, 7, 1.0)
    with pytest.raises(ConfigError, match="unknown key 'clients'"):
        DaemonSettings.load(file, {"KVSTORE_DAEMON_CLIENTS": "7"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_usual_place_below_tmp_is_nobody_elses() -> None:
    """Found here: who made it first was taken for the daemon, was given every copy and could give any back."""
    script = (
        "import os, sys; from kvstore.daemon.client import DaemonTier\n"
        "os.setuid(int(sys.argv[1]))\n"
        "try: tier = DaemonTier()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "else: print(tier.link.path); tier.close()"
    )
    uid = 100_000 + os.getpid() % 2**22
    usual = Path(f"/tmp/kvstore-{uid}")
    environ = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}

    def said() -> str:
        command = [sys.executable, "-c", script, str(uid)]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        assert said() == f"{usual}/kvstore/daemon.sock"
        assert (usual.stat().st_uid, usual.stat().st_mode & 0o777) == (uid, 0o711)
        refused = f"ConfigError socket_path: {usual} is not this user's alone; expected a path that is"
        usual.chmod(0o777)
        assert said() == refused
        usual.rmdir()
        usual.mkdir(0o755)  # another user's
        assert said() == refused
    finally:
        usual.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_users_of_the_list_connect_in_a_volume_that_is_roots() -> None:
    """Found by trying the container's settings on a volume whose owner is root: its mode could not be changed, and the
    daemon did not start. One that everybody may write to is refused: whoever is first there is taken for the daemon."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from kvstore.daemon.settings import DaemonSettings; from kvstore.daemon.socket_lock import locked_directory\n"
        "from kvstore.config import KVStoreConfig\n"
        "store, path = KVStoreConfig(host_bytes=1 << 20), sys.argv[1] + '/d.sock'\n"
        "os.setuid(100000)\n"
        "locked_directory(Path(path), DaemonSettings(store=store, socket_path=path, allowed_uids=(1000,)))"
    )
    with tempfile.TemporaryDirectory() as base:
        volume = Path(base) / "kvstore"
        volume.mkdir()
        os.chmod(base, 0o711)
        volume.chmod(0o775)
        command = [sys.executable, "-c", script, str(volume)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr, volume.stat().st_mode & 0o777) == (0, "", 0o775)
        volume.chmod(0o777)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "which everybody may write to (mode 777)" in done.stderr
        assert volume.stat().st_mode & 0o777 == 0o777


def test_the_mode_of_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    """Found by an operator: `--socket` as root closed a directory of theirs, silently, to everybody else."""
    store, path = KVStoreConfig(host_bytes=1 << 20), tmp_path / "kvstore" / "d.sock"
    path.parent.mkdir()
    path.parent.chmod(0o755)
    private = DaemonSettings(store=store, socket_path=str(path))
    os.close(locked_directory(path, private))
    assert path.parent.stat().st_mode & 0o777 == 0o755
    path.parent.chmod(0o1777)
    with pytest.raises(TierError, match=r"everybody may write to \(mode 1777\)"):
        locked_directory(path, private)
    if os.geteuid() == 0:
        path.parent.chmod(0o755)
        os.chown(path.parent, 12345, 0)
        with pytest.raises(TierError, match="of user 12345, who could take the daemon's place"):
            locked_directory(path, private)
    made = tmp_path / "made" / "d.sock"
    os.close(locked_directory(made, DaemonSettings(store=store, socket_path=str(made), allowed_uids=(1000,))))
    assert made.parent.stat().st_mode & 0o777 == 0o711


def test_check_tries_what_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by an operator: a file in the disk's place, a folder that cannot be made and more memory than there is were
    called good, and then nothing started. `--check` leaves nothing behind."""

    def checked(*arguments: str) -> tuple[int, str]:
        return main(["serve", "--check", *arguments]), capsys.readouterr().err

    file = tmp_path / "file"
    file.touch()
    usual = ["--socket", str(tmp_path / "run" / "s"), "--host-bytes", "1 MiB"]
    no_directory = f"{file} is no directory"
    for path, said in ((file, no_directory), (file / "x", no_directory), ("/proc/x", "/proc: ")):
        code, errors = checked(*usual, "--disk-path", str(path))
        assert code == 2
        assert f"disk_path: got '{path}'; expected a directory that can be written to ({said}" in errors
    assert checked(*usual, "--disk-path", str(tmp_path / "not" / "yet")) == (0, "")
    code, errors = checked(*usual[:2], "--host-bytes", "900 TiB")
    assert (code, errors.count("host_bytes: got")) == (2, 1)
    assert "which is what this process may have" in errors
    code, errors = checked("--socket", str(file / "s"), "--host-bytes", "1 MiB")
    assert code == 2
    assert f"got the directory {file}, which is none" in errors
    monkeypatch.setenv("KVSTORE_DAEMON_SOCKET", "/run/other.sock")
    code, errors = checked(*usual)
    assert code == 0
    assert "KVSTORE_DAEMON_SOCKET=/run/other.sock is where clients connect; this daemon listens on" in errors
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]
    monkeypatch.delenv("KVSTORE_DAEMON_SOCKET")
    code, errors = checked("--socket", str(tmp_path / "s"), "--host-bytes", "1 MiB", "--allowed-uids", "1000")
    assert (code, f"do not get through {tmp_path} (mode 700); expected more: chmod 711" in errors) == (0, True)


def test_a_disk_budget_that_no_index_can_be_mapped_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by a newcomer: `--check` called it good, and the start said "Cannot allocate memory" of the index. What is
    in the directory stays as it is."""
    disk = tmp_path / "disk"
    usual = ["--socket", str(tmp_path / "s"), "--host-bytes", "1 MiB", "--disk-path", str(disk)]
    tier = DiskTier(disk, 4 << 20)
    assert put_on_disk(tier, range(4), 4096) == [ResultCode.OK] * 4
    tier.close()
    for given, number in (("99999TB", 99999 * 10**12), ("9000000TB", 9 * 10**18)):
        wanted = [*usual, "--disk-bytes", given]
        assert main(["serve", "--check", *wanted]) == 2
        said = capsys.readouterr().err
        command = [sys.executable, "-m", "kvstore.cli", "serve", *wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        for one in (said, done.stderr):
            assert f"disk_bytes: got {number}; expected at most" in one
        most = int(said.partition("at most ")[2].partition(":")[0])
        assert 1 << 30 < most < number
    tier = DiskTier(disk, 4 << 20)
    assert stored_on_disk(tier, range(4)) == [0, 1, 2, 3]
    tier.close()
    assert main(["serve", "--check", *usual, "--disk-bytes", str(most // 2)]) == 0


def test_an_unknown_key_of_a_file_is_found_in_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[kvstore]\nhost_bytes = "8 MiB"\n\n[daemon]\nhttp = 0\nclients_limt = 5\n')
    with pytest.raises(ConfigError) as caught:
        DaemonSettings.load(file, {})
    said = f"{file}:6, [daemon]: unknown key 'clients_limt'; did you mean 'clients_limit'? Expected"
    assert said in str(caught.value)
    file.write_text('[kvstore]\nhost_bytes = "8 MiB"\n[daemon]\n[daemon.quota]\nalice = 1\n')
    with pytest.raises(ConfigError, match=r"c.toml:4, \[daemon\]: unknown key 'quota'; did you mean 'quotas'"):
        DaemonSettings.load(file, {})
    with pytest.raises(ConfigError, match=r"KVSTORE_DAEMON_SOKET_PATH: .*did you mean KVSTORE_DAEMON_SOCKET_PATH"):
        DaemonSettings.load(None, {"KVSTORE_DAEMON_SOKET_PATH": "/x"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[kvstore]\n[daemom]\nhttp = 1\n",
            r"unknown table \[daemom\]; did you mean \[daemon\]\? Expected \[kvstore\] and",
        ),
        ("[kvstor]\nhost_bytes = 1\n", r"unknown table \[kvstor\]; did you mean \[kvstore\]\? Expected"),
        ("[kvstore]\n[metrics]\nport = 1\n", r"unknown table \[metrics\]; expected \[kvstore\] and \[daemon\]"),
        ("[kvstore]\n[[daemons]]\nhttp = 1\n", r"key 'daemons' stands in no table; expected it in \[kvstore\] or"),
        (
            "host_bytes = 1\n[kvstore]\n",
            r"key 'host_bytes' stands in no table; expected it in \[kvstore\] or \[daemon\]",
        ),
    ],
)
def test_what_no_table_of_a_file_is_read_for_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by a newcomer: all that [daemom] said was left out, with a warning of --check alone."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"c.toml: {said}"):
        DaemonSettings.load(file, {})
    assert main(["serve", "--check", "--host-bytes", "1 MiB", "--config", str(file)]) == 2
    assert "kvstore serve: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KVSTORE_DAEMON_LEASE_SECONDS": "nan"}, "KVSTORE_DAEMON_LEASE_SECONDS: got 'nan'"),
        ({"KVSTORE_DAEMON_HTTP_TOKEN": "short-secret"}, "KVSTORE_DAEMON_HTTP_TOKEN: got 12 bytes"),
        ({"KVSTORE_DAEMON_SEGMENT_BYTES": "5000"}, "KVSTORE_DAEMON_SEGMENT_BYTES: got 5000; expected a multiple"),
        ({"KVSTORE_DAEMON_HTTP": "0.0.0.0:1"}, "KVSTORE_DAEMON_HTTP: got '0.0.0.0:1', which is not this machine alone"),
        ({"KVSTORE_DAEMON_QUOTAS": "a = -1"}, "KVSTORE_DAEMON_QUOTAS: got a = -1"),
        ({"KVSTORE_DAEMON_SOCKET_PATH": "/" + "x" * 200}, "KVSTORE_DAEMON_SOCKET_PATH: got 201 characters"),
        ({"KVSTORE_HOST_BYTES": "1"}, "KVSTORE_HOST_BYTES: got 1; expected at least"),
        ({"KVSTORE_LEASE_SECONDS": "nan"}, "KVSTORE_LEASE_SECONDS: got 'nan'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_variable_is_called_by_its_name(environ: dict[str, str], said: str, tmp_path: Path) -> None:
    usual = {"KVSTORE_HOST_BYTES": "16 MiB", "KVSTORE_DAEMON_SOCKET_PATH": str(tmp_path / "s")}
    with pytest.raises(ConfigError) as caught:
        DaemonSettings.load(None, usual | environ)
    assert str(caught.value).startswith(said)
    assert "short-secret" not in str(caught.value)


def test_a_bad_flag_is_not_blamed_on_a_variable_below_it(tmp_path: Path) -> None:
    environ = {
        "KVSTORE_HOST_BYTES": "16 MiB",
        "KVSTORE_DAEMON_SOCKET_PATH": str(tmp_path / "s"),
        "KVSTORE_DAEMON_HTTP": "1",
    }
    with pytest.raises(ConfigError, match=r"^http: got 'x'"):
        DaemonSettings.load(None, environ, {"http": "x"})


def test_tables_can_be_said_in_the_environment(tmp_path: Path) -> None:
    environ = {
        "KVSTORE_HOST_BYTES": "8 MiB",
        "KVSTORE_DAEMON_SOCKET_PATH": str(tmp_path / "s"),
        "KVSTORE_DAEMON_QUOTAS": 'alice = "4 GiB", bob = 100',
        "KVSTORE_DAEMON_DOMAINS": "team = [1001, 1002]",
    }
    found = DaemonSettings.load(None, environ)
    assert found.tenant_quotas == {"alice": 4 << 30, "bob": 100}
    assert found.domains == (("team", (1001, 1002)),)
    assert DaemonSettings.load(None, environ | {"KVSTORE_DAEMON_QUOTAS": ""}).tenant_quotas == {}
    with pytest.raises(ConfigError, match=r"^KVSTORE_DAEMON_QUOTAS: got 'alice=4 GiB', which is no TOML"):
        DaemonSettings.load(None, environ | {"KVSTORE_DAEMON_QUOTAS": "alice=4 GiB"})


def test_no_domain_is_called_as_the_own_one() -> None:
    """Figures call that "own": another of the name would have hidden it."""
    with pytest.raises(ConfigError, match="'own', which is what the daemon's own user's is called"):
        DaemonSettings(domains={"own": (1001,)})  # type: ignore[arg-type]
