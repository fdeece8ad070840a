"""Copies in Redis or Valkey, alone, under Sentinel or as a Cluster: `RedisTier`. Keys in docs/formats/redis-keys.md."""
