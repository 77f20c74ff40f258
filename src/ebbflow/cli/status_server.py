"""The page of `ebbflow status --serve`: read-only, two addresses, one reader of the records."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ebbflow.core.extras import require
from ebbflow.errors import ConfigError, EbbflowError

__all__ = ["serve_page"]


def serve_page(
    page: str, view: Callable[[], dict[str, Any]], *, bind: str, port: int, on_start: Callable[[str], None]
) -> None:
    """Serve the page and, as status.json, what `view` gives, until the process is interrupted.

    `view` is called by one thread at a time. An error that it raises is shown on the page, and the next request tries
    again. `on_start` gets the address of the page. Only GET and HEAD are answered, and nobody is authenticated: whoever
    reaches the address can read the status of the job.
    """
    require("tornado", extra="live", needed_for="ebbflow status --serve")
    from tornado.httpserver import HTTPServer
    from tornado.netutil import bind_sockets
    from tornado.web import Application, RequestHandler

    one_reader = threading.Lock()

    def ask() -> tuple[int, dict[str, Any]]:
        with one_reader:
            try:
                return 200, view()
            except EbbflowError as problem:
                return 503, {"error": str(problem)}

    class Page(RequestHandler):
        def get(self) -> None:
            self.finish(page)

        head = get

    class Status(RequestHandler):
        async def get(self) -> None:
            code, answer = await asyncio.get_running_loop().run_in_executor(None, ask)
            self.set_status(code)
            self.set_header("Cache-Control", "no-store")
            self.finish(answer)

    async def run() -> None:
        try:
            sockets = bind_sockets(port, bind)
        except OSError as problem:
            raise ConfigError(
                f"the page cannot be served on {bind} port {port}: {problem.strerror or problem}; choose another "
                f"--port or --bind"
            ) from None
        server = HTTPServer(Application([("/", Page), ("/status.json", Status)]))
        server.add_sockets(sockets)
        host = f"[{bind}]" if ":" in bind else bind
        on_start(f"http://{host}:{sockets[0].getsockname()[1]}/")
        try:
            await asyncio.Event().wait()
        finally:
            server.stop()

    asyncio.run(run())
