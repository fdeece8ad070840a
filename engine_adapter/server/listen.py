"""Runs an application with uvicorn. The one file that imports it."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette


class _Announcing(uvicorn.Server):
    """Says where it listens as soon as it does, on one line that a script can wait for."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def serve(app: Starlette, host: str, port: int) -> None:
    """Until a signal. Open answers get a few seconds to end."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off"
    )
    _Announcing(config).run()
