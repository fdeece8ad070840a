"""Tensors to bytes and back: the KV block codecs."""
