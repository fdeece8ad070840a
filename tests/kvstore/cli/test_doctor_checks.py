"""`kvstore doctor --tiers`, `--install` and the usage of `--url`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import HostTier
from kvstore.cli import doctor_install, doctor_tiers, main
from kvstore.executor import InlineExecutor
from kvstore.tier import GetItem
from tests.kvstore.diagnosis.planted_endpoint import Plant, planted
from tests.servers import shared_server


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST_BYTES", "DISK_PATH", "REDIS_URL"):
        monkeypatch.delenv(f"KVSTORE_{name}", raising=False)


def settings(folder: Path, text: str) -> str:
    (folder / "store.toml").write_text(text)
    return str(folder / "store.toml")


def test_host_and_disk_work_and_are_left_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    config = settings(tmp_path, f'host_bytes = "64 MiB"\ndisk_path = "{disk}"\ndisk_bytes = "128 MiB"\n')
    for _ in range(2):
        assert main(("doctor", "--tiers", "--config", config, "--json", "-")) == 0
        tiers = json.loads(capsys.readouterr().out)["tiers"]["tiers"]
        assert [(one["name"], one["healthy"], one["used_bytes"]) for one in tiers] == [
            ("host", True, 0),
            ("disk", True, tiers[1]["used_bytes"]),
        ]
        assert all(one["put_bytes_per_second"] > 0 and one["get_bytes_per_second"] > 0 for one in tiers)
        assert tiers[1]["used_bytes"] < 2 << 20, "the probes are gone again"


def test_a_tier_that_is_not_well_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, 'redis_url = "redis://127.0.0.1:1/0"\n')
    assert main(("doctor", "--tiers", "--config", config)) == 1
    assert "tier remote   not well" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    config = settings(tmp_path, f'disk_path = "{tmp_path / "file"}"\n')
    assert main(("doctor", "--tiers", "--config", config)) == 1
    assert "cannot be opened" in capsys.readouterr().out


def test_a_tier_that_gives_wrong_bytes_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(HostTier):
        def submit_get(self, items: list[tuple[object, ...]]) -> object:  # type: ignore[override]
            found = super().submit_get([GetItem(*item) for item in items])  # type: ignore[arg-type]
            items[0][1][0] ^= 1  # type: ignore[index]
            return found

    monkeypatch.setattr(
        "kvstore.cli.doctor_tiers._open", lambda _name, config: Wrong(config.host_bytes, InlineExecutor())
    )
    assert main(("doctor", "--tiers", "--config", settings(tmp_path, 'host_bytes = "64 MiB"\n'))) == 1
    assert "2 blocks came back wrong" in capsys.readouterr().out


@pytest.mark.parametrize(("setting", "advised"), [("212992\n", True), ("4194304\n", False), (None, False)])
def test_a_small_send_buffer_of_a_server_on_a_unix_socket_is_said(
    setting: str | None,
    advised: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = tmp_path / "wmem_default"
    if setting is not None:
        given.write_text(setting)
    monkeypatch.setattr(doctor_tiers, "_SEND_BUFFER", given)
    server = shared_server()
    for url, expected in ((server.unix_url, advised), (server.url, False)):
        assert main(("doctor", "--tiers", "--config", settings(tmp_path, f'redis_url = "{url}"\n'))) == 0
        told = capsys.readouterr().out
        assert ("wmem_default" in told) is expected
        assert ("=4194304 (now 212992)" in told) is expected


def test_no_tier_is_said_and_bad_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("doctor", "--tiers")) == 1, "nothing was looked at"
    assert "no tier below the device is configured" in capsys.readouterr().out
    assert main(("doctor", "--tiers", "--config", settings(tmp_path, "host_byte = 3\n"))) == 2
    assert "did you mean 'host_bytes'" in " ".join(capsys.readouterr().err.split())


def test_install_lists_every_part_with_its_purpose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(("doctor", "--install", "--json", "-"))
    parts = {one["name"]: one for one in json.loads(capsys.readouterr().out)["install"]["parts"]}
    assert parts["torch"]["present"]
    assert all(one["purpose"] for one in parts.values())
    monkeypatch.setattr(doctor_install, "find_spec", lambda _module: None)
    assert main(("doctor", "--install")) == 1
    assert "problem   torch is required and not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "nowhere"), "url: got 'nowhere'; expected http://"),
        (("--url", "http://127.0.0.1:1"), "does not answer"),
        (("--url", "http://a", "--loop"), "expected one of them"),
        (("--url", "http://a", "--prompt-tokens", "1,x"), "got '1,x'; expected numbers"),
        (("--url", "http://a", "--prompt-tokens", "0,5"), "expected counts above 0"),
        (("--url", "http://a", "--answer-tokens", "1"), "answers of 2 tokens or more"),
        (("--url", "http://a", "--token-file", "/nonexistent"), "cannot be read"),
    ],
)
def test_bad_usage_is_told(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("doctor", *words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_is_shown_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with planted(Plant(prefill_token=1e-3)) as url:
        words = ("--prompt-tokens", "20,60,200", "--answer-tokens", "8", "--concurrency", "2", "--rounds", "2")
        for _ in range(4):  # a disturbed machine: no verdict, and less to show
            if main(("doctor", "--url", url, *words)) == 0:
                break
            capsys.readouterr()
    said = capsys.readouterr().out
    for text in ("TTFT ", "ITL ", "cache ", "1 at once", "2 at once", "verdict ", "us a token"):
        assert text in said
