"""One server process from its socket to its orderly end."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from dspark.engine import Engine
from dspark.errors import DsparkError
from dspark.serve.app import create_app
from dspark.serve.settings import ServeConfig

KEEP_ALIVE_S = 75  # longer than clients and proxies keep a connection, so that it is never closed under a request
FLUSH_S = 5  # for the last bytes of answers to leave, after draining


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises DsparkError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DsparkError(f"Cannot listen on {host} port {port} ({reason}); choose another --host or --port.") from None
    return bound


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT: refuse new requests with 503, let running answers finish, then close."""

    def __init__(self, engine: Engine, config: ServeConfig, on_ready: Callable[[str], None] | None = None):
        app = create_app(engine, config)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=FLUSH_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
                ws="none",
            )
        )
        self.worker = app.state.server.worker
        self.url = ""
        self._drain_s, self._on_ready = config.drain_s, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            host, port = sockets[0].getsockname()[:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if self._on_ready:
                self._on_ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.worker.drain(self._drain_s))
        while not (draining.done() or self.force_exit):  # a second Ctrl-C does not wait
            await asyncio.wait((draining,), timeout=0.1)
        draining.cancel()
        await super().shutdown(sockets)


def run_server(
    engine: Engine, config: ServeConfig, bound: socket.socket, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, both of which end with status 0."""
    # uvicorn raises the signal once more when it has finished; a clean end is no error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    DrainingServer(engine, config, on_ready).run(sockets=[bound])
