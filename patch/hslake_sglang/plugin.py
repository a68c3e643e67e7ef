"""What SGLang calls in each of its processes (entry point). Inert unless HSLAKE_STAGING is set."""

import logging
import os
import uuid
from pathlib import Path

from hslake_sglang import settings

log = logging.getLogger("hslake")

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_HTTP = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"


def register() -> None:
    """Register the hooks with SGLang. Does nothing at all without HSLAKE_STAGING."""
    if not settings.wanted():
        return
    # The launcher's id travels to the worker processes, so its endpoint knows their writers.
    os.environ.setdefault(settings.RUN, uuid.uuid4().hex)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hslake_sglang import endpoint, report, versions

    HookRegistry.register(_HTTP, endpoint.before_http, HookType.BEFORE)
    problem = versions.problem(versions.installed())
    if problem:
        log.error("hslake: NOT ARMED: %s", problem)
        report.tell_error(Path(os.environ[settings.STAGING]), os.environ[settings.RUN], problem)
        return
    from hslake_sglang import attach

    HookRegistry.register(f"{_RUNNER}.load_model", attach.after_load_model, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", attach.before_forward, HookType.BEFORE)
