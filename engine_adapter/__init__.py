"""Engines on top of the store: adapter interface, decode loop, model runner, latency."""
