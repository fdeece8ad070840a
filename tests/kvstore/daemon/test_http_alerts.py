"""The dashboard, the alert rules and the handbook name only metrics that a daemon under load really publishes, with the
labels that it gives them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.http_metrics import SERIES
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import ROOT, get, look_up, put, tier_at

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
        look_up(tier, keys)
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


def faults(dashboard: dict[str, Any]) -> list[str]:
    """What Grafana would refuse, or show otherwise than it was meant."""
    found, ids, cells = [], Counter[int](), Counter[tuple[int, int]]()
    variables = {one["name"] for one in dashboard["templating"]["list"]} | {"__all", "__range", "__rate_interval"}
    if not 0 < len(dashboard["uid"]) <= 40 or not isinstance(dashboard["schemaVersion"], int):
        found.append("uid, schemaVersion")
    named = {name.strip("${}") for name in re.findall(r"\$\w+|\$\{\w+\}", json.dumps(dashboard))}
    found += [f"no variable {name}" for name in sorted(named - variables)]
    for panel in dashboard["panels"]:
        at, where = panel["gridPos"], panel["title"]
        ids[panel["id"]] += 1
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
        if at["x"] < 0 or at["y"] < 0 or at["w"] < 1 or at["h"] < 1 or at["x"] + at["w"] > 24:
            found.append(f"{where}: gridPos")
        if panel["type"] not in ("stat", "timeseries", "table", "gauge", "bargauge"):
            found.append(f"{where}: type")
        if panel["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            found.append(f"{where}: datasource")
        letters = [target["refId"] for target in panel["targets"]]
        if len(set(letters)) < len(letters) or not letters or not all(one["expr"] for one in panel["targets"]):
            found.append(f"{where}: targets")
    found += [f"id {number} twice" for number, times in ids.items() if times > 1]
    return found + [f"two panels at {cell}" for cell, times in cells.items() if times > 1]


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    text = (EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8")
    assert faults(json.loads(text)) == []
    for old, new in (('"id": 2', '"id": 1'), ("${datasource}", "${source}"), ('"w": 5', '"w": 25'), ('"B"', '"A"')):
        assert faults(json.loads(text.replace(old, new))), (old, new)


def test_grafanas_own_types_hold_all_of_the_dashboard() -> None:
    """Where its SDK is installed (pip install grafana-foundation-sdk): what that does not know it loses."""
    plugins, encoder, models = (
        pytest.importorskip(f"grafana_foundation_sdk.{name}")
        for name in ("cog.plugins", "cog.encoder", "models.dashboard")
    )
    plugins.register_default_plugins()
    ours = json.loads((EXAMPLES / "grafana-dashboard.json").read_text(encoding="utf-8"))
    theirs = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(ours)))
    assert missing(ours, theirs) == []
    ours["panels"][0]["gridPoss"] = {}
    assert missing(ours, theirs) == ["panels.0.gridPoss"]


def missing(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Paths of `ours` that are not so in `theirs`."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return [] if ours == theirs else [where]
    paths = ((key, f"{where}.{key}".strip(".")) for key in ours)
    return [one for key, path in paths for one in (missing(ours[key], theirs[key], path) if key in theirs else [path])]


def test_the_pictures_are_small() -> None:
    pictures = sorted(Path(ROOT / "docs/images").glob("*.png"))
    assert len(pictures) == 2
    for picture in pictures:
        assert picture.stat().st_size < 200_000
        assert picture.name in HANDBOOK.read_text(encoding="utf-8")
