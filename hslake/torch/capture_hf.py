"""The same hidden states through Hugging Face transformers, for machines without a server.

One forward a sample, no padding, no cache: slow and simple, and the reference that the server's
capture is compared with. Rows go through the same StagingWriter with the same checksums.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hslake
from hslake.errors import Corrupt, InvalidInput, Missing, NoSpace
from hslake.extract.worklist import Item, read_ids, waiting_samples, worklist
from hslake.fingerprint import check_model, model_fingerprint
from hslake.ids import RequestId, new_attempt
from hslake.lake import Lake
from hslake.progress import ProgressMaker, Silent
from hslake.spec import LakeSpec
from hslake.staging import StagingWriter, read_part, scan
from hslake.staging.check import check_apart, check_roots
from hslake.streams import FINAL
from hslake.torch.collate import TORCH_DTYPES, bits
from hslake.torch_checksum import digest

PART_BYTES = 256 << 20
BLOCK = 256  # samples whose token ids are read at once
_POLL_S = 0.2
_NORMS = ("norm", "final_layernorm", "ln_f")


@dataclass(frozen=True)
class CaptureReport:
    """What one capture run did.

    `planned` samples of the plan were selected, of these `committed` were in the lake and `staged`
    in staging already, `captured` are new. `bytes` are raw bytes of the captured states.
    """

    planned: int
    committed: int
    staged: int
    captured: int
    tokens: int
    bytes: int
    seconds: float
    engine_version: str


def capture_hf(
    lake_url: str,
    model_dir: str | Path,
    staging: str | Path,
    *,
    where: str | None = None,
    limit: int | None = None,
    device: str = "cpu",
    part_tokens: int | None = None,
    max_parts: int | None = None,
    wait_s: float = 60.0,
    progress: ProgressMaker = Silent,
) -> CaptureReport:
    """Capture every planned sample that is neither committed nor in `staging`; resumable.

    `where` selects among the plan's rows, `limit` bounds how many are captured. When staging is
    full it waits up to `wait_s` seconds for a `compact --watch` beside it. Raises Missing (no
    staging directory, no model), InvalidInput (another model than the lake's, staging of another
    lake, samples that the model cannot take), NoSpace (staging stayed full; what was captured so
    far is kept).
    """
    start = time.monotonic()
    lake = hslake.open(str(lake_url))
    folder, root = Path(model_dir), Path(staging)
    check_apart(str(lake_url), root)
    check_roots([root], lake.spec)
    if not (folder / "config.json").is_file():
        raise Missing(f"{folder} holds no config.json: give the folder of the model")
    fingerprint = model_fingerprint(folder)
    check_model(lake.spec.model.fingerprint, fingerprint, f"the model {folder}")
    # Longest first: what does not fit fails at once, and parts fill without large gaps.
    work = worklist(lake, where, "length desc")
    waiting = _staged(lake, root)
    todo = [item for item in work.missing if item.sample_id not in waiting]
    staged = len(work.missing) - len(todo)
    todo = todo[:limit] if limit is not None else todo
    version, captured, tokens = _transformers_version(), 0, 0
    if todo:
        model = _load(folder, lake.spec, device)
        _check_lengths(todo, model.config)
        sizes = _part_size(root, lake.spec, todo, part_tokens, max_parts)
        writer = StagingWriter(
            root,
            lake.spec,
            part_tokens=sizes[0],
            max_parts=sizes[1],
            fingerprint=fingerprint,
            engine={
                "engine": "transformers",
                "engine_version": version,
                "hook_version": hslake.__version__,
                "tp": "1",
                "dp_rank": "0",
                "chunk_size": str(todo[0].length),
            },
        )
        try:
            with progress(sum(item.length for item in todo), "capture (tokens)") as bar:
                for item, ids, streams in _states(model, lake, todo, device):
                    _store(writer, item, ids, streams, wait_s)
                    captured, tokens = captured + 1, tokens + item.length
                    bar.advance(item.length)
        finally:
            writer.close()
    return CaptureReport(
        planned=work.planned,
        committed=work.committed,
        staged=staged,
        captured=captured,
        tokens=tokens,
        bytes=tokens * lake.spec.bytes_per_token,
        seconds=time.monotonic() - start,
        engine_version=version,
    )


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError as error:
        raise Missing(
            f"transformers cannot be imported ({error}): pip install 'hslake[hf]'"
        ) from error
    return str(transformers.__version__)


def _staged(lake: Lake, root: Path) -> set[str]:
    """Ids of complete samples that writers of this lake left in staging, not yet committed."""
    attempts = {}
    for writer in scan(root):
        for path in writer.parts:
            try:
                part = read_part(path)
            except (Corrupt, OSError):
                continue  # recycled meanwhile or damaged: the compactor's business, captured again
            if part.done:
                continue
            attempts.update(
                {r.attempt: r.sample_id for r in part.reserved if r.state == "complete"}
            )
    return waiting_samples(lake, attempts)


def _load(folder: Path, spec: LakeSpec, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of the weights: ours is the one to watch
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=TORCH_DTYPES[spec.dtype], local_files_only=True
    )
    return model.to(device).eval()  # type: ignore[arg-type]


def _check_lengths(todo: list[Item], config: Any) -> None:
    """Refuse samples longer than the model's positions, all in one message, before any work."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    long = [item.sample_id for item in todo if limit is not None and item.length > limit]
    if long:
        shown = ", ".join(long[:5]) + (" …" if len(long) > 5 else "")
        raise InvalidInput(
            f"{len(long)} planned samples are longer than the model's {limit} positions: {shown}; "
            "plan shorter ones, or leave them out with --where"
        )


def _part_size(
    root: Path, spec: LakeSpec, todo: list[Item], part_tokens: int | None, max_parts: int | None
) -> tuple[int, int]:
    """(tokens of a part, parts): what this run needs, in parts of about 256 MiB that hold at least
    the longest sample, in at most half of what is free in staging. Given values stand."""
    lengths = [item.length for item in todo]
    row = spec.bytes_per_token + 4
    tokens = part_tokens or max(max(lengths), min(sum(lengths), PART_BYTES // row))
    if tokens < max(lengths):
        raise InvalidInput(
            f"part_tokens is {tokens}, but the longest planned sample has {max(lengths)} tokens, "
            "and a sample never straddles parts: raise part_tokens"
        )
    needed = 1 + -(-2 * sum(lengths) // tokens)  # every sample may leave a gap at a part's end
    fit = shutil.disk_usage(root).free // 2 // (tokens * row)
    return tokens, max_parts or max(1, min(needed, fit))


# --- the model --------------------------------------------------------------------------------


def _decoder(model: Any) -> tuple[torch.nn.Module, Any, torch.nn.Module]:
    """(module that runs the layers, its layers, its final norm)."""
    inner = model.get_decoder()
    inner = getattr(inner, "language_model", inner)
    norm = next((getattr(inner, n) for n in _NORMS if hasattr(inner, n)), None)
    layers = getattr(inner, "layers", getattr(inner, "h", None))
    if norm is None or layers is None:
        raise InvalidInput(
            f"{type(inner).__name__} has no .layers and .norm: capture-hf does not know this "
            "model, use a server"
        )
    return inner, layers, norm


@contextmanager
def _taps(model: Any, spec: LakeSpec) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Hooks on every stream's place. The yielded function gives the last forward's states
    [length, hidden], in the spec's order, and forgets them."""
    _, layers, norm = _decoder(model)
    if len(layers) != spec.num_layers:
        raise InvalidInput(f"the model has {len(layers)} layers, the lake's has {spec.num_layers}")
    seen: dict[str, torch.Tensor] = {}

    def before(stream: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            seen[stream] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def after(module: Any, args: Any, output: torch.Tensor) -> None:
        seen[FINAL] = output.detach()

    handles = []
    for stream in spec.streams:
        if stream == FINAL:
            handles.append(norm.register_forward_hook(after))
        else:
            place = norm if int(stream) == spec.num_layers else layers[int(stream)]
            handles.append(place.register_forward_pre_hook(before(stream), with_kwargs=True))

    def take() -> list[torch.Tensor]:
        found = [seen[stream][0] for stream in spec.streams]
        seen.clear()
        return found

    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


def _states(
    model: Any, lake: Lake, todo: list[Item], device: str
) -> Iterator[tuple[Item, np.ndarray, list[torch.Tensor]]]:
    """Run the samples one by one: (sample, ids int32, one CPU tensor [length, hidden] a stream)."""
    spec = lake.spec
    dtype, decoder = TORCH_DTYPES[spec.dtype], _decoder(model)[0]
    vocab = model.config.get_text_config().vocab_size
    with torch.inference_mode(), _taps(model, spec) as take:
        for start in range(0, len(todo), BLOCK):
            block = todo[start : start + BLOCK]
            all_ids = read_ids(lake, block)
            for item in block:
                ids = all_ids[item.sample_id].to_numpy(zero_copy_only=False).astype(np.int32)
                if ids.max() >= vocab:
                    raise InvalidInput(
                        f"{item.sample_id}: token id {ids.max()}, but the model's vocabulary has "
                        f"{vocab} tokens"
                    )
                decoder(input_ids=torch.from_numpy(ids)[None].long().to(device), use_cache=False)
                streams = [t.to("cpu").contiguous() for t in take()]
                for name, tensor in zip(spec.streams, streams, strict=True):
                    if tensor.dtype != dtype or tensor.shape != (item.length, spec.hidden_size):
                        raise InvalidInput(
                            f"{item.sample_id}: stream {name} came as {tensor.dtype} "
                            f"{list(tensor.shape)}, the lake expects {dtype} "
                            f"{[item.length, spec.hidden_size]}"
                        )
                yield item, ids, streams


# --- staging ----------------------------------------------------------------------------------


def _store(
    writer: StagingWriter, item: Item, ids: np.ndarray, streams: list[torch.Tensor], wait_s: float
) -> None:
    """Write one whole sample as one attempt."""
    lake8 = writer.spec.lake8
    rid = RequestId(lake8, new_attempt(), item.length, item.source, item.sample_id)
    place = _begin(writer, rid, wait_s)
    rows = place.rows(0, item.length)
    for view, tensor in zip(rows.hidden, streams, strict=True):
        view[...] = bits(tensor)
    rows.input_ids[...] = ids
    sums, stats = zip(*(digest(t) for t in streams), strict=True)
    writer.wrote(place, 0, item.length, sums, stats)
    writer.tick()


def _begin(writer: StagingWriter, rid: RequestId, wait_s: float) -> Any:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return writer.begin(rid)
        except NoSpace as error:
            if time.monotonic() >= deadline:
                raise NoSpace(
                    f"{error} Staging stayed full for {wait_s:.0f} s: run `hslake compact LAKE "
                    "--staging DIR` and start this again, or run `compact --watch` beside it"
                ) from error
        time.sleep(_POLL_S)
        writer.tick()
