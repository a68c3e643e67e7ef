"""GET /hslake/status and /hslake/metrics on SGLang's own HTTP server, answered from the files in
staging. They are protected like SGLang's own routes: with --api-key, only with the key."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput
from hslake.staging import StatusReader
from hslake.staging.status import document
from hslake_sglang import metrics, report, settings

log = logging.getLogger("hslake")

PATH = "/hslake/status"
METRICS_PATH = "/hslake/metrics"


def before_http(*args: Any, **kwargs: Any) -> None:
    """BEFORE SGLang's _setup_and_run_http_server: add the routes to its app. Never raises."""
    try:
        from sglang.srt.entrypoints.http_server import app

        mount(app, Path(os.environ[settings.STAGING]), os.environ.get(settings.RUN, ""))
    except Exception:
        log.exception("hslake: %s and %s could not be mounted", PATH, METRICS_PATH)


def mount(app: Any, staging: Path, run: str) -> None:
    """Add the two routes to a FastAPI `app`; they show the writers of server run `run` only."""
    from fastapi.responses import JSONResponse, Response

    reader = StatusReader(staging)

    def status(since: str | None = None) -> Response:
        try:
            return JSONResponse(answer(reader, run, since))
        except InvalidInput as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except Exception as error:
            log.exception("hslake: %s could not be answered", PATH)
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)

    def prometheus() -> Response:
        try:
            page = metrics.text(answer(reader, run, None, limit=0))
            return Response(page, media_type=metrics.CONTENT_TYPE)
        except ImportError as error:
            what, code = f"{error}: install prometheus_client beside SGLang", 501
        except Exception as error:
            log.exception("hslake: %s could not be answered", METRICS_PATH)
            what, code = f"{type(error).__name__}: {error}", 500
        return Response(f"# {what}\n", status_code=code, media_type="text/plain")

    app.add_api_route(PATH, status, methods=["GET"], response_model=None)
    app.add_api_route(METRICS_PATH, prometheus, methods=["GET"], response_model=None)


def answer(reader: StatusReader, run: str, since: str | None, **options: int) -> dict[str, Any]:
    """The status document of server run `run` (hslake.staging.status).

    Other servers may share the staging folder, and dead writers may lie in it: only the writers
    that this run enrolled are shown. `since` is `<writer>:<cursor>,…`; raises InvalidInput when it
    is not. `options`: those of StatusReader.read.
    """
    found = reader.read(parse_since(since), **options)["writers"]
    told = report.told(reader.root, run)
    writers = [w for w in found if w["writer"] in told.writers]
    errors = [*told.errors, *(str(w["error"]) for w in writers if w.get("error"))]
    errors += [
        f"writer {w['writer']} is dead: see the server's log" for w in writers if not w["alive"]
    ]
    if len(writers) < len(told.writers):
        errors.append("a writer of this server is missing from staging: was it deleted?")
    if not writers and not errors:
        errors.append("no hook has armed in this server; see its log")
    armed = not errors and all(w["armed"] for w in writers)
    error = "; ".join(errors) or None
    return {**document(writers), "armed": armed, "error": error}


def parse_since(text: str | None) -> dict[str, int]:
    """`a:5,b:7` -> {"a": 5, "b": 7}. Raises InvalidInput."""
    cursors: dict[str, int] = {}
    for item in filter(None, (text or "").split(",")):
        writer, _, cursor = item.rpartition(":")
        if not writer or not re.fullmatch(r"[0-9]{1,18}", cursor):
            raise InvalidInput(f"since={text!r}: expected <writer>:<cursor>,<writer>:<cursor>")
        cursors[writer] = int(cursor)
    return cursors
