"""`kvscope serve`: the daemon and its HTTP API, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn

from kvscope import query
from kvscope import settings as settings_module
from kvscope.collectors.api import allowed_hosts, create_app
from kvscope.collectors.daemon import Daemon
from kvscope.errors import KvscopeError
from kvscope.settings import Settings

GRACE_S = 2
"""What open HTTP answers get after a signal."""
DEADLINE_S = 10.0
"""What the store gets after that."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first: here, not in the signal handler, which must take no lock."""
        self._end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `main`: uvicorn would end the process by the signal, not with exit code 0."""
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; returns the exit code: 0 after a clean stop."""
    parser = argparse.ArgumentParser(
        prog="kvscope serve", description="Collect the rings of this host, store, and answer over HTTP."
    )
    settings_module.add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return _run(settings_module.load(arguments))
    except KvscopeError as error:
        print(f"kvscope serve: {error}", file=sys.stderr)
        return error.exit_code


def _run(settings: Settings) -> int:
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    daemon = Daemon(settings)
    try:
        listening = _listen(settings.host, settings.port)
    except KvscopeError:
        daemon.stop()
        raise
    limits = query.Limits(settings.sql_rows, settings.sql_bytes, settings.sql_seconds)
    app = create_app(daemon, limits, allowed_hosts(settings.host), settings.sql_memory_mb)
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S),
        app.state.end,
    )

    def stop(signum: int, frame: FrameType | None) -> None:
        if server.should_exit:
            os._exit(128 + signum)
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    daemon.start()
    host, port = listening.getsockname()[:2]
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"kvscope serve: http://{at}, rings in {settings.dir}, store {settings.store}", flush=True)
    try:
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        app.state.end()
        written = daemon.stop(DEADLINE_S)
    if not written:
        raise KvscopeError(
            f"{settings.store}: not all was written in {DEADLINE_S:.0f} s; the rest is still in the rings"
        )
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KvscopeError(
            f"can't listen on {host}:{port}: {reason}; choose another with --host and --port"
        ) from None
