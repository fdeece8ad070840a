"""The one URL setting of the remote tier: every form, and every refusal names what was given without credentials."""

from __future__ import annotations

import pytest

from allocator.errors import ConfigError
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.redis_tier.links import is_tested
from kvstore.redis_tier.url import RedisAddress, Topology, parse_redis_url, redacted


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", RedisAddress(Topology.SINGLE, (("host", 6379),))),
        (
            "redis://u:p%40ss@host:1/3",
            RedisAddress(Topology.SINGLE, (("host", 1),), username="u", password="p@ss", database=3),
        ),
        ("redis://:p@host?db=2", RedisAddress(Topology.SINGLE, (("host", 6379),), password="p", database=2)),
        ("rediss://[::1]:7", RedisAddress(Topology.SINGLE, (("::1", 7),), tls=True)),
        ("unix:///run/r.sock?db=1", RedisAddress(Topology.SINGLE, path="/run/r.sock", database=1)),
        ("unix://u:p@/run/r.sock", RedisAddress(Topology.SINGLE, path="/run/r.sock", username="u", password="p")),
        (
            "redis+sentinel://a:1,b/svc?namespace=x",
            RedisAddress(Topology.SENTINEL, (("a", 1), ("b", 26379)), service="svc", namespace="x"),
        ),
        ("rediss+cluster://a,b:2", RedisAddress(Topology.CLUSTER, (("a", 6379), ("b", 2)), tls=True)),
    ],
)
def test_every_form(url: str, expected: RedisAddress) -> None:
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://h",
        "unix+cluster:///p",
        "redis://",
        "redis://h:0",
        "redis://h:70000",
        "redis://h/x",
        "redis+sentinel://h",
        "redis+cluster://h/1",
        "unix://host/p",
        "unix://",
        "redis://h?ttl=3",
        "redis://h?namespace=a:b",
        "redis://h?namespace=*",
        "redis://[::1",
        "rediss://h?tls_verify=maybe",
    ],
)
def test_refusals_say_why(url: str) -> None:
    secret = url.replace("://", "://user:hunter2@", 1)
    for one in (url, secret):
        with pytest.raises(ConfigError, match="redis_url") as error:
            parse_redis_url(one)
        assert "hunter2" not in str(error.value)
        assert "expected" in str(error.value)


def test_a_redacted_url_has_neither_credentials_nor_options() -> None:
    assert redacted("redis://u:p@h:1/2?sentinel_password=x") == "redis://h:1/2"
    assert redacted("just text") == "(no URL)"


def test_the_breaker_opens_probes_and_closes() -> None:
    now = [0.0]
    breaker = CircuitBreaker(first_pause_seconds=1, longest_pause_seconds=3, clock=lambda: now[0])
    assert breaker.allow()
    breaker.failed()
    assert not breaker.allow()
    now[0] = 1.0
    assert breaker.allow()
    assert not breaker.allow(), "one probe at a time"
    breaker.failed()
    now[0] = 2.9
    assert not breaker.allow()
    now[0] = 3.0
    assert breaker.allow()
    breaker.left()
    assert breaker.allow()
    breaker.failed()
    now[0] = 5.9  # the longest pause is 3
    assert not breaker.allow()
    now[0] = 6.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.allow()
    assert not breaker.is_open


@pytest.mark.parametrize(("version", "known"), [("6.4.0", True), ("8.1.0", True), ("5.0.8", False), ("9.0.0", False)])
def test_the_tested_range(version: str, known: bool) -> None:
    assert is_tested(version) is known
