"""GET /hslake/status on SGLang's own HTTP server, answered from the files in staging."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput
from hslake.staging import StatusReader
from hslake_sglang import report, settings

log = logging.getLogger("hslake")

PATH = "/hslake/status"


def before_http(*args: Any, **kwargs: Any) -> None:
    """BEFORE SGLang's _setup_and_run_http_server: add the route to its app. Never raises."""
    try:
        from sglang.srt.entrypoints.http_server import app

        mount(app, Path(os.environ[settings.STAGING]), os.environ.get(settings.RUN, ""))
    except Exception:
        log.exception("hslake: %s could not be mounted", PATH)


def mount(app: Any, staging: Path, run: str) -> None:
    """Add GET /hslake/status to a FastAPI `app`; it shows the writers of server run `run` only."""
    from fastapi.responses import JSONResponse

    reader = StatusReader(staging)

    def status(since: str | None = None) -> JSONResponse:
        try:
            return JSONResponse(answer(reader, run, since))
        except InvalidInput as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    app.add_api_route(PATH, status, methods=["GET"])


def answer(reader: StatusReader, run: str, since: str | None) -> dict[str, Any]:
    """The status document of server run `run` (hslake.staging.status).

    Other servers may share the staging folder, and dead writers may lie in it: only the writers
    that this run enrolled are shown. `since` is `<writer>:<cursor>,…`; raises InvalidInput when it
    is not.
    """
    document = reader.read(parse_since(since))
    told = report.told(reader.root, run)
    writers = [w for w in document["writers"] if w["writer"] in told.writers]
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
    return {**document, "armed": armed, "error": error, "writers": writers}


def parse_since(text: str | None) -> dict[str, int]:
    """`a:5,b:7` -> {"a": 5, "b": 7}. Raises InvalidInput."""
    cursors: dict[str, int] = {}
    for item in filter(None, (text or "").split(",")):
        writer, _, cursor = item.rpartition(":")
        if not writer or not re.fullmatch(r"[0-9]{1,18}", cursor):
            raise InvalidInput(f"since={text!r}: expected <writer>:<cursor>,<writer>:<cursor>")
        cursors[writer] = int(cursor)
    return cursors
