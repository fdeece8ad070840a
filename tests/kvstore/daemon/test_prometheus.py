"""The examples under the real programs, where Debian's are installed: promtool, a Prometheus that scrapes a daemon,
systemd-analyze."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.transfer_contract import key_of
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import get, look_up, put, tier_at, until
from tests.kvstore.daemon.test_http_alerts import EXAMPLES, expressions

CASES = Path(__file__).parent / "alert_cases.yml"
RULES = EXAMPLES / "prometheus-rules.yml"
needs_prometheus = pytest.mark.skipif(
    not shutil.which("promtool") or not shutil.which("prometheus"), reason="needs Debian's prometheus"
)


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )


def on_rules(directory: Path, rules: str) -> subprocess.CompletedProcess[str]:
    """The cases, on these rules."""
    (directory / "rules.yml").write_text(rules)
    cases = directory / "cases.yml"
    cases.write_text(CASES.read_text().replace("RULES", str(directory / "rules.yml")))
    return promtool("test", "rules", str(cases))


@needs_prometheus
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    rules = RULES.read_text(encoding="utf-8")
    done = on_rules(tmp_path, rules)
    assert done.returncode == 0, done.stdout + done.stderr
    named = set(re.findall(r"alert: (\w+)", rules))
    assert {name for name in named if f"alertname: {name}\n" in CASES.read_text()} == named
    for right, wrong in (("> 0.2 *", "> 0.9 *"), ("< 0.5 *", "< 0.1 *"), ("kvstore_ready == 0", "kvstore_ready == 2")):
        assert on_rules(tmp_path, rules.replace(right, wrong)).returncode != 0, wrong


def asked(url: str, query: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        said = error.read()
        return dict(json.loads(said)) if said.startswith(b"{") else {"status": "not ready"}
    except OSError:
        return {"status": "no answer"}


def number(answer: dict[str, Any]) -> float:
    """Of the one series found; 0 without one."""
    rows = answer.get("data", {}).get("result", [])
    return float(rows[0]["value"][1]) if rows else 0.0


@needs_prometheus
def test_a_prometheus_scrapes_a_daemon_and_answers_every_query_of_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(tmp_path, disk_path=str(tmp_path / "disk"), disk_bytes=16 << 20) as (daemon, web):
        tier = tier_at(daemon.settings.socket_path)
        keys = [key_of(n) for n in range(8)]
        put(tier, keys)
        look_up(tier, keys)
        get(tier, keys)
        done = promtool("check", "metrics", given=web.ask("GET", "/metrics")[2].decode())
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        target = urllib.parse.urlsplit(web.url).netloc
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: { scrape_interval: 250ms, scrape_timeout: 200ms, evaluation_interval: 1s }\n"
            f"rule_files: [{RULES}]\n"
            f'scrape_configs:\n  - job_name: kvstore\n    static_configs: [{{ targets: ["{target}"] }}]\n'
        )
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            scrapes = "count_over_time(kvstore_ready[1m])"
            until(lambda: number(asked(url, scrapes)) >= 4, 60, "four scrapes")
            for where, expression in expressions().items():
                query = (
                    expression.replace("$__rate_interval", "1m").replace("$__range", "1h").replace("$instance", ".*")
                )
                query = query.strip().removeprefix("expr:").strip().removeprefix("|")
                query = re.sub(r"^(for|labels|annotations):.*$", "", query, flags=re.MULTILINE)
                assert asked(url, query)["status"] == "success", (where, query, asked(url, query))
            assert asked(url, "rate(kvstore_ready[")["status"] == "error", "a query that does not parse is found"
            hit = asked(url, "sum(kvstore_lookup_hit_blocks_total) / sum(kvstore_lookup_blocks_total)")
            assert number(hit) == 1.0
            assert not asked(url, 'ALERTS{alertstate="firing"}')["data"]["result"]
        finally:
            server.terminate()
            server.wait(30)
        tier.close()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "kvstore.service").read_text()
    for name, unit, is_good in (
        ("kvstore.service", text, True),
        ("wrong.service", text.replace("FileDescriptorStoreMax=", "FileDescriptorStoreMost="), False),
    ):
        (tmp_path / name).write_text(unit)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if name in line]
        assert (done.returncode == 0 and not said) is is_good, done.stderr
