"""Identity, residency, tiers, movement and policy of KV blocks."""
