"""The HTTP server as a worker of the process: uvicorn in a thread, stopped with the process."""

from __future__ import annotations

import gc
import threading

import uvicorn

from services.orchestrator.container import AppContext
from services.orchestrator.http.app import create_app
from services.orchestrator.http.connections import limited_connections
from spo.errors import Unreachable
from spo.observability.logs import get_logger

log = get_logger("http")

STOP_SECONDS = 5
# By then everything that the orchestrator imports and builds once is there.
SETTLED_SECONDS = 5.0


class HttpServer:
    """Serves the REST API and the pages on the HTTP port."""

    def __init__(self, context: AppContext) -> None:
        self.host = context.settings.host
        config = uvicorn.Config(
            create_app(context),
            host=self.host,
            port=context.settings.http_port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
            http=limited_connections(context.settings.max_connections),
            ws="none",
        )
        self.server = uvicorn.Server(config)

    @property
    def port(self) -> int:
        """The port in use; 0 until the server listens."""
        servers = getattr(self.server, "servers", [])
        return int(servers[0].sockets[0].getsockname()[1]) if servers and servers[0].sockets else 0

    def run(self, stop: threading.Event) -> None:
        """Serve until stop. Raises Unreachable when the server ends early, as when its port is taken."""
        thread = threading.Thread(target=self._serve, name="http", daemon=True)
        thread.start()
        while not stop.wait(0.5):
            if not thread.is_alive():
                raise Unreachable(f"the HTTP server on {self.host}:{self.server.config.port} ended", code="http_ended")
        self.server.should_exit = True
        thread.join(STOP_SECONDS + 1)

    def _serve(self) -> None:
        try:
            self.server.run()
        except SystemExit:
            # uvicorn exits when it cannot bind; the thread's end tells `run`.
            log.error("could not listen", host=self.host, port=self.server.config.port)


def freeze_gc(stop: threading.Event) -> None:
    """Exempt from garbage collection, once, what lives as long as the process: walking it stops requests for 0.1 s.

    Not for processes that hold models: a model may be built by then, and could never be freed.
    """
    if not stop.wait(SETTLED_SECONDS):
        gc.collect()
        gc.freeze()
