"""Copies in this process's own memory: `HostTier`, its arena, extents and index."""
