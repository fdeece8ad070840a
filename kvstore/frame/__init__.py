"""The stored form of a copy, byte by byte in docs/formats/frame.md: built (build, heads), read (parsing), looked at."""
