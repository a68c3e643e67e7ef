"""Wires the capture into a worker process of SGLang: the functions its hooks call. None raises."""

import logging
import multiprocessing.util
import os
from pathlib import Path
from typing import Any

import torch

from hslake.errors import InvalidInput
from hslake.fingerprint import check_model
from hslake.spec import LakeSpec, model_fingerprint
from hslake.staging import StagingWriter
from hslake_sglang import flags, hub, memory, ranks, report, served, settings, versions
from hslake_sglang.capture import Capture
from hslake_sglang.copies import CudaSide, page_lock, warm_up
from hslake_sglang.taps import DTYPES, Taps, find_logits_processors, logits_inputs

log = logging.getLogger("hslake")

_ATTRIBUTE = "_hslake_capture"
_LOOKS = ("snapshot", "compare", "checksum")  # of check_weights: the others may overwrite them


def after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ModelRunner.load_model: arm the capture on this worker."""
    if getattr(runner, "is_draft_worker", False):
        return
    try:
        arm(runner)
    except Exception as error:
        log.exception("hslake: NOT ARMED")
        attached = getattr(runner, _ATTRIBUTE, None)
        if attached is not None:  # nobody would learn of what it captured
            attached.disarm(str(error))
        run = os.environ.get(settings.RUN, "")
        staging = Path(os.environ[settings.STAGING])
        report.tell_error(staging, run, f"{type(error).__name__}: {error}")


def before_forward(runner: Any, forward_batch: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ModelRunner.forward: keep the live batch, the only one that has the request ids."""
    capture = getattr(runner, _ATTRIBUTE, None)
    if capture is not None:
        batch = forward_batch if forward_batch is not None else kwargs.get("forward_batch")
        capture.before_forward(batch)


def before_weight_change(method: str, owner: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `method` of a ModelRunner or its WeightUpdater, which loads other weights: from here
    on the states are not the lake's model's, so nothing more is captured. Never raises."""
    action = kwargs.get("action", args[0] if args else None)
    if method == "check_weights" and action in _LOOKS:
        return
    try:
        runner = owner.get_model_runner() if hasattr(owner, "get_model_runner") else owner
        capture = getattr(runner, _ATTRIBUTE, None)
        if capture is not None:
            capture.disarm(
                f"the server was given other weights ({method}): its states are no longer those of "
                "the lake's model; restart it with hslake serve"
            )
    except Exception:
        log.exception("hslake: after %s the capture could not be disarmed", method)


def arm(runner: Any) -> Capture:
    """Set the capture on `runner`'s model and, on the writing rank, open its StagingWriter.

    Raises HslakeError when the server, the model or staging does not fit the lake.
    """
    rank = ranks.of(runner)
    found = settings.load(writers=rank.dp_size)
    spec, path = found.spec, model_folder(runner.server_args)
    known = served.facts(spec, path)
    wrong = flags.check_running(runner.server_args, versions.installed(), known)
    if wrong:
        raise InvalidInput("this server's settings break capture: " + "; ".join(wrong))
    processors = find_logits_processors(runner.model)
    if not processors:
        raise InvalidInput(f"{type(runner.model).__name__} has no logits processor to capture from")
    device = _device(runner)
    writer = None
    if rank.writes:
        fingerprint = model_fingerprint(path)
        check_model(spec.model.fingerprint, fingerprint, f"the served model {path}")
        writer = _open_writer(found, fingerprint, rank, runner, device)
        warm_up(device, DTYPES[spec.dtype], spec.hidden_size)
    # On every rank: capturing may itself start a collective operation.
    taps = Taps(runner.model, spec)
    on_gpu = device.type == "cuda"
    need = _gpu_bytes(runner, spec) if on_gpu else 0
    side = CudaSide(device) if on_gpu and rank.writes else None
    capture = Capture(spec, taps, writer, side=side, gpu_bytes=need)
    for processor in processors:
        processor.register_forward_pre_hook(
            lambda module, args, kwargs: capture.before_logits(*logits_inputs(args, kwargs)),
            with_kwargs=True,
        )
    if need:
        _hold_back(taps, need)
    setattr(runner, _ATTRIBUTE, capture)
    close_at_exit(capture)
    if writer is not None:
        writer.set_health(True, None)
        report.tell_writer(found.staging, found.run, writer.writer_id)
        log.info("hslake: armed, streams %s into %s", ",".join(spec.streams), found.staging)
    return capture


def close_at_exit(capture: Capture) -> None:
    """Seal staging when this process ends in order, whether it is the main process, spawned or
    forked.

    SGLang 0.5.23 asks its workers to return on SIGTERM; versions that kill them leave a dead
    writer, of which the compactor takes every complete sample just the same.
    """
    multiprocessing.util.Finalize(None, capture.close, exitpriority=10)


def model_folder(server_args: Any) -> Path:
    """Where the model's files are that SGLang has loaded, also for a model named by its hub id.
    Raises InvalidInput or Missing."""
    model = str(flags.effective(server_args, "model_path"))
    problem = hub.problem(model, flags.effective(server_args, "download_dir"), os.environ)
    if problem:
        raise InvalidInput(problem)
    return hub.folder(model, flags.effective(server_args, "revision"))


def _open_writer(
    found: settings.Settings,
    fingerprint: dict[str, Any],
    rank: ranks.Rank,
    runner: Any,
    device: torch.device,
) -> StagingWriter:
    engine = {
        "engine": "sglang",
        "engine_version": versions.installed(),
        "hook_version": versions.hook(),
        "tp": str(rank.tp_size),
        "dp_rank": str(rank.dp),
        "chunk_size": str(_chunk(runner)),
        "run": found.run,
    }
    return StagingWriter(
        found.staging,
        found.spec,
        part_tokens=found.part_tokens,
        max_parts=found.max_parts,
        fingerprint=fingerprint,
        engine=engine,
        page_lock=page_lock(device),
        ahead=True,
        buffered=True,
    )


def _device(runner: Any) -> torch.device:
    """Where this worker computes."""
    if getattr(runner, "device", "cpu") != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_bytes(runner: Any, spec: LakeSpec) -> int:
    return memory.capture_bytes(spec, _chunk(runner) or flags.DEFAULT_CHUNK)


def _chunk(runner: Any) -> int:
    """Most prompt tokens of a forward on this rank; 0 when it has no limit."""
    return max(0, int(flags.effective(runner.server_args, "chunked_prefill_size") or 0))


def _hold_back(taps: Taps, need: int) -> None:
    """Keep the capture's GPU memory away from the KV cache, which SGLang sizes next from what is
    free; given to PyTorch's pool again at the first forward. Nothing to do where `hslake serve`
    took it off --mem-fraction-static."""
    log.info("hslake: the capture takes up to %.2f GiB of GPU memory", need / 2**30)
    if not os.environ.get(settings.GPU_MEMORY_TAKEN):
        taps.held = torch.empty(need, dtype=torch.uint8, device="cuda")
