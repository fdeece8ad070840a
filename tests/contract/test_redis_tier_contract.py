"""The tier contract on real servers: every way to reach one, with and without a cap, a secret, and our own wire."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest

from kvstore.executor import Executor
from kvstore.redis_tier.links import LinkOptions
from kvstore.redis_tier.tier import RedisOptions, RedisTier
from kvstore.testing import TierContract
from kvstore.testing.transfer_contract import OK, key_of
from tests import servers

NUMBERS = itertools.count()


class RedisContract(TierContract):
    """Every tier gets a namespace of its own, so it is empty."""

    overhead_bytes = 512  # header, the key's name and what we count for it
    options: ClassVar[RedisOptions] = RedisOptions()
    secret: ClassVar[bytes | None] = None
    fault_rounds = 1  # seven ways to a server: the first one takes the usual three

    def url(self) -> str:
        raise NotImplementedError

    def make_tier(self, capacity_bytes: int, executor: Executor) -> RedisTier:
        url = self.url()
        url += f"{'&' if '?' in url else '?'}namespace=contract{next(NUMBERS)}"
        return RedisTier(
            url, executor, capacity_bytes=capacity_bytes, ttl_seconds=600, secret=self.secret, options=self.options
        )


class TestUnixSocket(RedisContract):
    fault_rounds = 3

    def url(self) -> str:
        return servers.shared_server().unix_url


class TestTcpSigned(RedisContract):
    secret = b"sixteen bytes or more"

    def url(self) -> str:
        return servers.shared_server().url


class TestPlainCalls(RedisContract):
    """What runs outside the tested range of redis-py."""

    options = RedisOptions(links=LinkOptions(plain=True))

    def url(self) -> str:
        return servers.shared_server().unix_url


class TestCluster(RedisContract):
    def url(self) -> str:
        return servers.shared_cluster().url


class TestClusterPlainCalls(RedisContract):
    options = RedisOptions(links=LinkOptions(plain=True))

    def url(self) -> str:
        return servers.shared_cluster().url


class TestSentinel(RedisContract):
    def url(self) -> str:
        return servers.shared_sentinel().url


class TestTls(RedisContract):
    payload_bytes = 40_000  # several TLS records

    def url(self) -> str:
        server, certificate = servers.shared_tls()
        return f"{server.url}?tls_ca={certificate}"


@pytest.mark.parametrize("size", [1, 1 << 20, (9 << 20) + 3], ids=["1B", "1MiB", "9MiB"])
@pytest.mark.parametrize(
    "contract", [TestUnixSocket, TestTcpSigned, TestPlainCalls, TestTls], ids=lambda one: one.__name__
)
def test_sizes_from_one_byte_to_more_than_a_window(contract: type[RedisContract], size: int) -> None:
    class Sized(contract):  # type: ignore[misc,valid-type]
        payload_bytes = size
        capacity_payloads = 4

    sized = Sized()
    with sized.tier() as tier:
        keys = [key_of(number) for number in range(3)]
        assert sized.put(tier, keys) == [OK] * 3
        assert sized.get(tier, keys) == [OK] * 3
