"""Copies in a directory: `DiskTier` over an LMDB index and a slot file. Bytes in docs/formats/disk.md."""
