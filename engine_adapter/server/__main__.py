"""Command line of the server. Exit code 0 after a signal, 1 when it could not start, 2 for bad usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from allocator.errors import KVError
from kvstore.http_access import is_loopback, token_of, why_no_token

_MOST = {"max_batch": 1 << 16, "step_tokens": 1 << 20, "open_requests": 1 << 20, "threads": 1024}
_LONGEST_SECONDS = 7 * 86_400


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked; exits with 2 and says why when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.server",
        description="Serve a Hugging Face model over the OpenAI interface, its KV in this store.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of a causal model; SmolLM2-135M without it")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings of the store; KVSTORE_* go over them")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1; anything else needs --token-file")
    parser.add_argument("--port", type=int, default=8000, help="8000; 0 takes a free one and says which")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="what clients must send as bearer token")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="requests computed together (8)")
    parser.add_argument("--step-tokens", type=int, default=256, metavar="N", help="tokens of a step (256)")
    parser.add_argument("--open-requests", type=int, default=256, metavar="N", help="more are refused with 429 (256)")
    parser.add_argument("--request-seconds", type=float, default=600.0, metavar="S", help="a longer one ends (600)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (2)")
    given = parser.parse_args(arguments)
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: no model in {given.model}; expected a folder with a config.json")
    if not 0 <= given.port < 1 << 16:
        parser.error(f"--port: got {given.port}, expected 0..65535")
    for name, most in _MOST.items():
        if not 1 <= getattr(given, name) <= most:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}, expected 1..{most}")
    if given.max_batch > given.step_tokens:
        parser.error(f"--max-batch: got {given.max_batch}, expected at most --step-tokens, {given.step_tokens}")
    if not 0 < given.request_seconds <= _LONGEST_SECONDS:
        parser.error(f"--request-seconds: got {given.request_seconds}, expected a number in (0, {_LONGEST_SECONDS}]")
    given.token = _token(parser, given.token_file)
    if given.token is None and not is_loopback(given.host):
        parser.error(f"--host: {given.host} is not this machine alone; give --token-file with it")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal."""
    given = parse(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: its threads sleep while they wait
    try:
        from kvstore.http_listen import serve
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        print("the server needs starlette and uvicorn: pip install -e '.[daemon]' in a checkout", file=sys.stderr)
        return 1
    from engine_adapter.server.build import build

    try:
        with build(given) as app:
            serve(app, given.host, given.port)
    except (KVError, FileNotFoundError) as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 1
    return 0


def _token(parser: argparse.ArgumentParser, path: Path | None) -> str | None:
    if path is None:
        return None
    if (token := token_of(path)) is not None:
        return token
    parser.error(f"--token-file: {why_no_token(path)}")


if __name__ == "__main__":
    sys.exit(main())
