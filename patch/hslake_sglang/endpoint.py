"""GET /hslake/status and /hslake/metrics on SGLang's own HTTP server, answered from the files in
staging, and from memory when somebody has deleted these. They are protected like SGLang's own
routes: with --api-key, only with the key."""

import logging
import os
from pathlib import Path
from typing import Any

from hslake.errors import HslakeError, InvalidInput
from hslake.staging import StatusReader
from hslake.staging.metrics import CONTENT_TYPE
from hslake.staging.status import document, parse_since
from hslake_sglang import metrics, report, settings, versions
from hslake_sglang.report import Told

log = logging.getLogger("hslake")

PATH = "/hslake/status"
METRICS_PATH = "/hslake/metrics"
_OTHERS_EVENTS = 5000


def before_http(*args: Any, **kwargs: Any) -> None:
    """BEFORE SGLang's _setup_and_run_http_server: add the routes to its app. Never raises."""
    try:
        from sglang.srt.entrypoints.http_server import app

        mount(app, Path(os.environ[settings.STAGING]), os.environ.get(settings.RUN, ""))
    except Exception:
        log.exception("hslake: %s and %s could not be mounted", PATH, METRICS_PATH)


class Memory:
    """What the workers of this server have told so far, and the last trouble that was logged."""

    def __init__(self) -> None:
        self.told = Told(frozenset(), ())
        self.others: dict[str, StatusReader] = {}  # by writer that is not this run's
        self._logged: str | None = None

    def log_once(self, trouble: str | None) -> None:
        """One line for a trouble that every poll meets again."""
        if trouble and trouble != self._logged:
            log.error("hslake: %s", trouble)
        self._logged = trouble


def mount(app: Any, staging: Path, run: str) -> None:
    """Add the two routes to a FastAPI `app`; they show the writers of server run `run` only."""
    from fastapi.responses import JSONResponse, Response

    reader, memory = StatusReader(staging), Memory()
    answer(reader, run, None, memory, limit=0)  # the workers are up: this may be the last chance

    about = {"hook_version": versions.hook(), "sglang_version": versions.installed()}

    def status(since: str | None = None, others: bool = False) -> Response:
        try:
            return JSONResponse(answer(reader, run, since, memory, others=others))
        except InvalidInput as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except Exception as error:
            log.exception("hslake: %s could not be answered", PATH)
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)

    def prometheus() -> Response:
        try:
            page = metrics.text(answer(reader, run, None, memory, limit=0), about)
            return Response(page, media_type=CONTENT_TYPE)
        except ImportError as error:
            what, code = f"{error}: install prometheus_client beside SGLang", 501
        except Exception as error:
            log.exception("hslake: %s could not be answered", METRICS_PATH)
            what, code = f"{type(error).__name__}: {error}", 500
        return Response(f"# {what}\n", status_code=code, media_type="text/plain")

    app.add_api_route(PATH, status, methods=["GET"], response_model=None)
    app.add_api_route(METRICS_PATH, prometheus, methods=["GET"], response_model=None)


def answer(
    reader: StatusReader,
    run: str,
    since: str | None,
    memory: Memory | None = None,
    *,
    others: bool = False,
    **options: int,
) -> dict[str, Any]:
    """The status document of server run `run` (hslake.staging.status).

    Other servers may share the staging folder, and dead writers may lie in it: only the writers
    that this run enrolled are shown as its own, the rest apart and with `others` only: a driver
    asks once a pass. Staging that cannot be read is an answer: not armed, and why.
    `since` is `<writer>:<cursor>,…`; raises InvalidInput when it is not. `memory`: of the earlier
    answers. `options`: those of StatusReader.read.
    """
    cursors, memory = parse_since(since), memory or Memory()
    found: list[dict[str, Any]] = []
    trouble = None
    try:
        memory.told |= report.told(reader.root, run)
    except (OSError, HslakeError) as error:
        trouble = f"staging {reader.root} cannot be read now: {error}"
    try:
        # Of those only: others may have written a million events, and this is SGLang's process.
        found = reader.read(cursors, only=memory.told.writers, **options)["writers"]
    except (OSError, HslakeError) as error:
        trouble = f"staging {reader.root} cannot be read now: {error}"
    told = memory.told
    writers = [w for w in found if w["writer"] in told.writers]
    missing = sorted(told.writers - {w["writer"] for w in writers})
    gone = None
    if not reader.root.is_dir():
        gone = f"staging {reader.root} is gone: it was deleted while this server ran"
    elif missing and trouble is None:
        gone = (
            f"writer {', '.join(missing)} of this server is missing from staging {reader.root}: it "
            "was deleted while this server ran, or its process died and a compactor has emptied it"
        )
    if gone:
        trouble = f"{gone}; nothing more is captured: restart the server with hslake serve"
    memory.log_once(trouble)
    errors = [*([trouble] if trouble else []), *told.errors]
    errors += [str(w["error"]) for w in writers if w.get("error")]
    errors += [
        f"writer {w['writer']} is dead: see the server's log" for w in writers if not w["alive"]
    ]
    if not writers and not errors:
        errors.append("no hook has armed in this server; see its log")
    armed = not errors and all(w["armed"] for w in writers)
    told_too = _others(reader.root, cursors, memory) if others else {}
    return {**document(writers), **told_too, "armed": armed, "error": "; ".join(errors) or None}


def _others(root: Path, cursors: dict[str, int], memory: Memory) -> dict[str, Any]:
    """The writers in `root` that are not this run's; nothing when they cannot be read now.

    At most `_OTHERS_EVENTS` events of them all: this is SGLang's process.
    """
    found: list[dict[str, Any]] = []
    left = _OTHERS_EVENTS
    try:
        names = {p.name for p in root.iterdir()} - memory.told.writers
        memory.others = {n: memory.others.get(n) or StatusReader(root) for n in sorted(names)}
        for name, reader in memory.others.items():
            shown = reader.read(cursors, limit=left, only={name})["writers"]
            left -= sum(len(w["events"]) for w in shown)
            found += shown
    except (OSError, HslakeError) as error:
        log.warning("hslake: other writers in %s cannot be read now: %s", root, error)
        return {}
    return {"others": found, "others_more": left <= 0, "roots": [StatusReader(root).root_id]}
