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
from hslake.errors import InvalidInput, Missing, NoSpace
from hslake.ids import RequestId, new_attempt
from hslake.lake import Lake
from hslake.progress import Progress
from hslake.spec import FINAL, LakeSpec, check_fingerprint, model_fingerprint
from hslake.staging import StagingWriter, scan
from hslake.torch.collate import TORCH_DTYPES, bits
from hslake.torch_checksum import row_stats, rows_checksum

PART_BYTES = 256 << 20
_POLL_S = 0.2
_NORMS = ("norm", "final_layernorm", "ln_f")


@dataclass(frozen=True)
class CaptureReport:
    """What one capture run did. `bytes` are raw bytes of the captured states; `seconds` all in all."""

    planned: int
    committed: int
    staged: int
    captured: int
    tokens: int
    bytes: int
    seconds: float
    engine_version: str


@dataclass(frozen=True)
class _Todo:
    sample_id: str
    source: str
    input_ids: list[int]


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
) -> CaptureReport:
    """Capture every planned sample that is neither committed nor in `staging`; resumable.

    `where` selects among the plan's rows, `limit` bounds how many are captured. When staging is full
    it waits up to `wait_s` seconds for a `compact --watch` beside it. Raises Missing (no staging
    directory, no model), InvalidInput (another model than the lake's, samples that the model cannot
    take), NoSpace (staging stayed full; what was captured so far is kept).
    """
    start = time.monotonic()
    lake = hslake.open(str(lake_url))
    folder, root = Path(model_dir), Path(staging)
    if not root.is_dir():
        raise Missing(f"staging directory {root} does not exist: make it, on /dev/shm")
    if not (folder / "config.json").is_file():
        raise Missing(f"{folder} holds no config.json: give the folder of the model")
    fingerprint = model_fingerprint(folder)
    check_fingerprint(lake.spec.model.fingerprint, fingerprint, f"the model {folder}")
    planned, committed, missing = _missing(lake, where)
    in_staging = _staged(root, lake.spec)
    todo = [t for t in missing if t.sample_id not in in_staging]
    staged = len(missing) - len(todo)
    todo = todo[:limit] if limit is not None else todo
    version, captured, tokens = _transformers_version(), 0, 0
    if todo:
        model = _load(folder, lake.spec, device)
        _check_samples(todo, model.config)
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
                "chunk_size": str(max(len(t.input_ids) for t in todo)),
            },
        )
        try:
            with Progress(sum(len(t.input_ids) for t in todo), "capture") as bar:
                for item, streams in _states(model, lake.spec, todo, device):
                    _store(writer, lake.spec, item, streams, wait_s)
                    captured, tokens = captured + 1, tokens + len(item.input_ids)
                    bar.advance(len(item.input_ids))
        finally:
            writer.close()
    return CaptureReport(
        planned=planned,
        committed=committed,
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


def _missing(lake: Lake, where: str | None) -> tuple[int, int, list[_Todo]]:
    """(planned, committed, what lacks) among the plan's rows that `where` selects, longest first:
    a sample too long for the machine fails at once, and parts fill without large gaps."""
    chosen = f"(select * from plan where {where})" if where else "plan"
    rows = lake.sql(
        f"select p.sample_id, p.source, p.input_ids, s.sample_id is not null "
        f"from {chosen} p left join samples s on s.sample_id = p.sample_id "
        "order by p.length desc, p.sample_id"
    ).fetchall()
    todo = [_Todo(name, source, ids) for name, source, ids, done in rows if not done]
    return len(rows), len(rows) - len(todo), todo


def _staged(root: Path, spec: LakeSpec) -> set[str]:
    """Ids of complete samples that some writer of this lake has left in staging."""
    raise NotImplementedError


def _load(folder: Path, spec: LakeSpec, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=TORCH_DTYPES[spec.dtype], local_files_only=True
    )
    return model.to(device).eval()


def _check_samples(todo: list[_Todo], config: Any) -> None:
    """All samples that the model cannot take, in one message, before any work is done."""
    text = config.get_text_config()
    limit, vocab = getattr(text, "max_position_embeddings", None), text.vocab_size
    long = [t.sample_id for t in todo if limit is not None and len(t.input_ids) > limit]
    alien = [t.sample_id for t in todo if max(t.input_ids) >= vocab]
    for names, what in (
        (long, f"longer than the model's {limit} positions"),
        (alien, f"with token ids outside the model's vocabulary of {vocab}"),
    ):
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise InvalidInput(f"{len(names)} planned samples are {what}: {shown}")


def _part_size(
    root: Path, spec: LakeSpec, todo: list[_Todo], part_tokens: int | None, max_parts: int | None
) -> tuple[int, int]:
    """(tokens of a part, parts): what this run needs, in parts of at most 256 MiB and at least the
    longest sample, and at most half of what is free in staging (given values are taken as given)."""
    lengths = [len(t.input_ids) for t in todo]
    row = spec.bytes_per_token + 4
    tokens = part_tokens or max(max(lengths), min(sum(lengths), PART_BYTES // row))
    if tokens < max(lengths):
        raise InvalidInput(
            f"part_tokens is {tokens}, but the longest planned sample has {max(lengths)} tokens and "
            "a sample never straddles parts: raise part_tokens"
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
            f"{type(inner).__name__} has no .layers and .norm: capture-hf does not know this model; "
            "use a server"
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
    model: Any, spec: LakeSpec, todo: list[_Todo], device: str
) -> Iterator[tuple[_Todo, list[torch.Tensor]]]:
    """Run the samples one by one: (sample, one tensor [length, hidden] a stream, on the CPU)."""
    dtype = TORCH_DTYPES[spec.dtype]
    decoder = _decoder(model)[0]
    with torch.inference_mode(), _taps(model, spec) as take:
        for item in todo:
            decoder(input_ids=torch.tensor([item.input_ids], device=device), use_cache=False)
            streams = [t.to("cpu").contiguous() for t in take()]
            for name, tensor in zip(spec.streams, streams, strict=True):
                if tensor.dtype != dtype or tensor.shape != (len(item.input_ids), spec.hidden_size):
                    raise InvalidInput(
                        f"{item.sample_id}: stream {name} came as {tensor.dtype} "
                        f"{tuple(tensor.shape)}, the lake expects {dtype} "
                        f"({len(item.input_ids)}, {spec.hidden_size})"
                    )
            yield item, streams


# --- staging ----------------------------------------------------------------------------------


def _store(
    writer: StagingWriter, spec: LakeSpec, item: _Todo, streams: list[torch.Tensor], wait_s: float
) -> None:
    """Write one whole sample as one attempt."""
    length = len(item.input_ids)
    rid = RequestId(spec.lake8, new_attempt(), length, item.source, item.sample_id)
    place = _begin(writer, rid, wait_s)
    rows = place.rows(0, length)
    for view, tensor in zip(rows.hidden, streams, strict=True):
        view[...] = bits(tensor)
    rows.input_ids[...] = np.asarray(item.input_ids, dtype=np.int32)
    writer.wrote(
        place, 0, length, [rows_checksum(t, 0) for t in streams], [row_stats(t) for t in streams]
    )
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
