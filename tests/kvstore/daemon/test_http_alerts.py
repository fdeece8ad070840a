"""The dashboard, the alert rules and the handbook name only metrics that a daemon under load really publishes, with the
labels that it gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.daemon.http_metrics import SERIES
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import ROOT, get, put, tier_at

EXAMPLES = ROOT / "examples/daemon"
HANDBOOK = ROOT / "docs/how-to/daemon.md"
NAMED = re.compile(r"\bkvstore_[a-z_]+\b(?:\{([^{}]*)\})?")
OWN_LABELS = {"job", "instance"}  # Prometheus adds these


def expressions() -> dict[str, str]:
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8"))
    found = {
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    alert = ""
    for line in (EXAMPLES / "prometheus-rules.yml").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("- alert:"):
            alert = line.partition(":")[2].strip()
        elif alert and not line.strip().startswith(("summary", "description", "#")):
            found[f"alert {alert}"] = found.get(f"alert {alert}", "") + line.strip() + "\n"
    return found


def published(text: str) -> dict[str, set[str]]:
    """Names in a scrape, each with its labels; those without a value yet by their TYPE line."""
    found = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert (kind == "counter") == name.endswith("_total"), name
        own = SERIES[name.removeprefix("kvstore_").removesuffix("_total")]
        found[name] = set(own.labels)
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    directory = tmp_path_factory.mktemp("alerts")
    with served(directory, disk_path=str(directory / "disk"), disk_bytes=16 << 20) as (daemon, client):
        tier = tier_at(daemon.settings.socket_path)
        keys = [key_of(n) for n in range(8)]
        put(tier, keys)
        tier.leading_run(keys[0], [key.hash for key in keys])
        get(tier, keys)
        tier.close()
        text = client.ask("GET", "/metrics")[2].decode()
    assert "kvstore_lookup_hit_blocks_total{" in text
    return published(text)


def test_every_metric_of_dashboard_and_alerts_exists(names: dict[str, set[str]]) -> None:
    found = expressions()
    assert len(found) > 20
    for where, expression in found.items():
        matches = list(NAMED.finditer(expression))
        assert matches, where
        for match in matches:
            name = match[0].partition("{")[0]
            assert name in names, f"{where}: {name}"
            selected = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[1] or ""))
            assert selected <= names[name] | OWN_LABELS, f"{where}: {match[0]}"


def test_every_counter_is_read_as_a_rate(names: dict[str, set[str]]) -> None:
    for where, expression in expressions().items():
        for match in re.finditer(r"(\w+\()?(kvstore_[a-z_]+)", expression):
            if match[2].endswith("_total"):
                assert match[1] in ("rate(", "increase("), f"{where}: {match[2]}"


def test_the_handbook_tells_what_every_metric_means(names: dict[str, set[str]]) -> None:
    told = {f"kvstore_{name}" for name in re.findall(r"`kvstore_([a-z_]+)", HANDBOOK.read_text(encoding="utf-8"))}
    assert names.keys() - told == set()
    assert told - names.keys() == set()


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "prometheus-rules.yml"])
def test_a_wrong_name_would_be_found(file: str, names: dict[str, set[str]]) -> None:
    text = (EXAMPLES / file).read_text(encoding="utf-8").replace("kvstore_tier_up", "kvstore_tier_upp")
    assert [match[0] for match in NAMED.finditer(text) if match[0].partition("{")[0] not in names]


def test_the_pictures_are_small() -> None:
    pictures = sorted(Path(ROOT / "docs/images").glob("*.png"))
    assert len(pictures) == 2
    for picture in pictures:
        assert picture.stat().st_size < 200_000
        assert picture.name in HANDBOOK.read_text(encoding="utf-8")
