"""The demo: a real model serves many requests out of too little memory, and says how well that went.

Run with `python -m engine_adapter.demo` (see `--help`). Nothing here is used by another package.
"""
