"""What SGLang calls in each of its processes (entry point). Inert unless HSLAKE_STAGING is set."""

import importlib.util
import logging
import os
import uuid
from functools import partial
from pathlib import Path

from hslake_sglang import settings

log = logging.getLogger("hslake")

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_HTTP = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"


def register() -> None:
    """Register the hooks with SGLang. Does nothing at all without HSLAKE_STAGING."""
    if not settings.wanted():
        return
    staging, first = Path(os.environ[settings.STAGING]), settings.RUN not in os.environ
    # The launcher's id travels to the worker processes, so its endpoint knows their writers.
    run = os.environ.setdefault(settings.RUN, uuid.uuid4().hex)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hslake_sglang import endpoint, report, source, versions

    if first:
        report.begin(staging, run)
    HookRegistry.register(_HTTP, endpoint.before_http, HookType.BEFORE)
    problem = versions.problem(versions.installed())
    changes = source.weight_changes(_sglang())
    if not problem and not changes:
        problem = (
            f"SGLang {versions.installed()} has no update_weights_from_… where the hook looks for "
            "it: other weights would go unnoticed; use another version"
        )
    if problem:
        log.error("hslake: NOT ARMED: %s", problem)
        report.tell_error(staging, run, problem)
        return
    from hslake_sglang import attach

    HookRegistry.register(f"{_RUNNER}.load_model", attach.after_load_model, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", attach.before_forward, HookType.BEFORE)
    for name in changes:
        # Before: an update that fails half way leaves other weights too.
        hook = partial(attach.before_weight_change, name.rpartition(".")[2])
        HookRegistry.register(name, hook, HookType.BEFORE)


def _sglang() -> Path:
    """The package folder of the SGLang that called."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else Path()
