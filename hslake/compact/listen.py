"""`compact --listen`: the writers on this machine and the compactor itself, over HTTP.

GET /hslake/status answers what a server's own one does, for this lake's writers in these staging
folders, so that a driver elsewhere sees writers that its server does not show; `compactor` stands
beside them. GET /hslake/metrics is for Prometheus, GET /health says that somebody is there.
Where HSLAKE_API_KEY is set it is asked for, as from servers with --api-key.
"""

import asyncio
import hmac
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from hslake.compact.figures import figures, prometheus
from hslake.compactreport import CompactReport
from hslake.errors import HslakeError, InvalidInput, without_secrets
from hslake.server import API_KEY, STATUS_PATH
from hslake.staging.metrics import CONTENT_TYPE
from hslake.staging.status import StatusReader, document, parse_since

log = logging.getLogger("hslake.compact")

METRICS_PATH = "/hslake/metrics"
HEALTH_PATH = "/health"
_START_S = 30.0


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPv6]:PORT`. Raises InvalidInput."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(
            f"--listen: found {text!r}, expected HOST:PORT, for example 0.0.0.0:9650 (0.0.0.0 for "
            "all of this machine's addresses, port 0 for any that is free)"
        )
    return host, int(port)


class Listener:
    """Answers from a thread of its own while it is entered. `address`: where it does.

    Raises InvalidInput when the address cannot be had.
    """

    def __init__(
        self, address: str, roots: list[Path], report: CompactReport, lake_id: str
    ) -> None:
        self._host, self._port = parse_address(address)
        self._readers = [StatusReader(root) for root in roots]
        self._report, self._lake_id = report, lake_id
        self._started_at = time.time()
        self._key = os.environ.get(API_KEY)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="listen", daemon=True)
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(_START_S)
        if self._error is not None or not self.address:
            raise InvalidInput(
                f"--listen {self._host}:{self._port} cannot be had: {self._error}; choose another "
                "port, or an address of this machine"
            ) from self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_START_S)

    # -- its thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.get(STATUS_PATH, self._status),
                web.get(METRICS_PATH, self._metrics),
                web.get(HEALTH_PATH, self._health),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
            host, port = runner.addresses[0][:2]
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._ready.set()
            await self._over.wait()
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _status(self, request: web.Request) -> web.Response:
        self._check_key(request)
        try:
            since = parse_since(request.query.get("since"))
        except InvalidInput as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response(await asyncio.to_thread(self.document, since))

    async def _metrics(self, request: web.Request) -> web.Response:
        self._check_key(request)
        found = await asyncio.to_thread(self.document, {}, 0)
        return web.Response(text=prometheus(found), headers={"content-type": CONTENT_TYPE})

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("authorization", "")
        if self._key and not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized(text=f"a key is wanted: set {API_KEY}")

    def document(self, since: dict[str, int], limit: int | None = None) -> dict[str, Any]:
        """The status document. `limit`: events a writer, at most. Staging that cannot be read is an
        answer: not armed, and why."""
        writers: list[dict[str, Any]] = []
        errors: list[str] = []
        roots: list[str] = []
        for reader in self._readers:
            try:
                found = reader.read(since, limit=limit)["writers"]
                roots.append(reader.root_id)
                writers += [w for w in found if w["lake_id"] in (None, self._lake_id)]
            except (OSError, HslakeError) as error:
                errors.append(f"staging {reader.root} cannot be read now: {error}")
        told = document(writers)
        if told["error"]:
            errors.append(told["error"])
        report = figures(self._report, self._lake_id, self._started_at)
        for name in ("troubles", "damage", "refused"):
            report[name] = [without_secrets(text) for text in report[name]]
        return {
            **told,
            "lake_id": self._lake_id,
            "armed": told["armed"] and not errors,
            "error": "; ".join(errors) or None,
            "roots": roots,
            "compactor": report,
        }
