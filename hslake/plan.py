"""Register samples in a lake's plan: all of one call in one commit, or none.

Planning the same files again adds nothing; a planned id that comes with other content is an error.
Two calls at once are safe: what is new is decided inside the catalog's compare-and-swap.
"""

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike, fspath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hslake import query, schemas
from hslake.errors import InvalidInput
from hslake.ids import PROBE_PREFIX, check_sample_id, check_source, token_hash
from hslake.planfile import PlanRow, Tokenize, int_lists, read_rows, unused_columns
from hslake.plantext import tokenizer as load_tokenizer
from hslake.progress import ProgressMaker, Silent
from hslake.spec import LakeSpec, read_spec
from hslake.store import Store, open_store
from hslake.tables import catalog

TRAIN, VALIDATION = "train", "validation"
_ID_HEX = 20  # 80 bits: no two of ten million samples share a default id by chance


@dataclass(frozen=True)
class PlanReport:
    """What a call to plan_files added or, with `dry_run`, would add. Bytes are those of states.

    `unchanged` were planned before, `deleted` were deleted from the lake and are left out,
    `repeated` are rows without an id that repeat another row
    exactly; `unsupervised` new samples have no token to train on. `ratio` (stored / raw) is
    `ratio_basis`: "measured" in this lake or "typical" of its codec and dtype. `plan_*` describe
    the whole plan with the new samples. `groups`: new samples by source and split.
    """

    lake: str
    dry_run: bool
    files: int
    rows: int
    added: int
    unchanged: int
    repeated: int
    deleted: int
    unsupervised: int
    tokens: int
    supervised_tokens: int
    longest: int
    raw_bytes: int
    forecast_stored_bytes: int
    plan_samples: int
    plan_tokens: int
    plan_raw_bytes: int
    plan_forecast_stored_bytes: int
    ratio: float
    ratio_basis: str
    groups: list[dict[str, int | str]]
    unused_columns: list[str]


@dataclass(frozen=True)
class _Sample:
    """One sample to plan. `split` None: the row says nothing, so what is planned stands."""

    where: str
    source: str
    split: str | None
    input_ids: np.ndarray
    loss_mask: np.ndarray
    token_hash: str


@dataclass
class _Outcome:
    """What the last round of the compare-and-swap found."""

    new: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    unchanged: int = 0
    live_samples: int = 0
    live_tokens: int = 0


def plan_files(
    lake_url: str,
    files: Sequence[str | PathLike[str]],
    source: str | None = None,
    *,
    split_validation: float | None = None,
    tokenizer: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    progress: ProgressMaker = Silent,
) -> PlanReport:
    """Add the rows of `files` to the plan of the lake at `lake_url`.

    `source`: for rows that name none; `split_validation`: share (0 to 1) of the rows without a
    split that go to "validation", chosen by the hash of their tokens; `tokenizer`: the model's
    folder, for `text` and `messages`; `again`: plan also what was deleted from the lake
    (`hslake delete`), which is left out otherwise; `dry_run`: check and count, write nothing.

    Rows without a sample_id get `<source>-<20 hex digits>` from tokens and mask, so the same row
    has the same id in any file. Raises InvalidInput naming file, row and field, or Missing.
    """
    if not files:
        raise InvalidInput("no files to plan: name at least one Parquet, Arrow or JSONL file")
    if split_validation is not None and not 0 <= split_validation <= 1:
        raise InvalidInput(f"split-validation: found {split_validation}, expected 0 to 1")
    if source is not None:
        check_source(source, "--source")
    spec = read_spec(lake_url)
    urls = [fspath(f) for f in files]
    tokenize = load_tokenizer(tokenizer) if tokenizer else None
    samples, rows, repeated = _collect(urls, spec, source, split_validation, tokenize, progress)
    outcome = _Outcome()

    def build(state: catalog.TableState) -> pa.Table | None:
        _decide(state, samples, outcome, again)
        if not outcome.new or dry_run:
            return None
        return _table(samples, outcome.new)

    # The id is of this call: content decides what is new, the id only finds a lost answer.
    store = open_store(lake_url)
    catalog.commit(store, "plan", build, f"plan-{uuid.uuid4().hex}")
    unused = dict.fromkeys(c for url in urls for c in unused_columns(url))
    return _report(store, spec, samples, outcome, dry_run, len(urls), rows, repeated, list(unused))


# -- incoming rows ------------------------------------------------------------------------------


def _collect(
    urls: Iterable[str],
    spec: LakeSpec,
    source: str | None,
    fraction: float | None,
    tokenize: Tokenize | None,
    progress: ProgressMaker,
) -> tuple[dict[str, _Sample], int, int]:
    """(samples by id, rows read, rows that repeat another without an id of its own)."""
    samples: dict[str, _Sample] = {}
    rows = repeated = 0
    with progress(None, "plan") as bar:
        for url in urls:
            for row in read_rows(url, spec.model.vocab_size, tokenize):
                rows += 1
                bar.advance(1)
                sample = _sample(row, source, fraction)
                sample_id = _sample_id(row, sample)
                first = samples.get(sample_id)
                if first is None:
                    samples[sample_id] = sample
                elif row.sample_id is None and _same(first, sample):
                    repeated += 1
                else:
                    raise InvalidInput(
                        f"{row.where}: sample_id: {sample_id!r} is a duplicate of {first.where}; "
                        "expected every id once: rename or remove one"
                    )
    return samples, rows, repeated


def _sample(row: PlanRow, source: str | None, fraction: float | None) -> _Sample:
    found = row.source if row.source is not None else source
    if found is None:
        raise InvalidInput(
            f"{row.where}: source: missing; give --source NAME (for example A1) or a column source"
        )
    name = check_source(found, f"{row.where}: source")
    tokens = token_hash(row.input_ids)
    split = row.split if row.split is None else check_source(row.split, f"{row.where}: split")
    if split is None and fraction is not None:
        split = VALIDATION if int(tokens[:12], 16) < fraction * 2**48 else TRAIN
    return _Sample(row.where, name, split, row.input_ids, row.loss_mask, tokens)


def _sample_id(row: PlanRow, sample: _Sample) -> str:
    if row.sample_id is None:
        content = sample.input_ids.astype("<i4").tobytes() + sample.loss_mask.tobytes()
        return f"{sample.source}-{hashlib.sha256(content).hexdigest()[:_ID_HEX]}"
    sample_id = check_sample_id(row.sample_id, f"{row.where}: sample_id")
    if sample_id.startswith(PROBE_PREFIX):
        raise InvalidInput(
            f"{row.where}: sample_id: {sample_id!r} starts with {PROBE_PREFIX!r}, which is "
            "reserved for preflight's probes: rename the sample"
        )
    return sample_id


def _same(a: _Sample, b: _Sample) -> bool:
    return (a.token_hash, a.source, a.split) == (b.token_hash, b.source, b.split)


# -- against the plan ---------------------------------------------------------------------------


def _decide(
    state: catalog.TableState, samples: dict[str, _Sample], outcome: _Outcome, again: bool
) -> None:
    """Fill `outcome`. Raises InvalidInput when a planned sample would change."""
    columns = ["op", "sample_id", "length", "commit_version"]
    names = state.arrow(columns=columns)
    live = _live(names)
    outcome.live_samples = live.num_rows
    outcome.live_tokens = pc.sum(live["length"]).as_py() or 0
    planned = set(live["sample_id"].to_pylist()) & samples.keys()
    changed: list[str] = []
    if planned:
        columns += ["source", "split", "token_hash", "loss_mask"]
        known = state.arrow(columns=columns)
        known = known.filter(pc.is_in(known["sample_id"], pa.array(planned, pa.string())))
        known = _live(known)
        masks = [mask for chunk in known["loss_mask"].chunks for mask in int_lists(chunk)]
        rows = known.drop_columns(["loss_mask"]).to_pylist()
        for row, mask in zip(rows, masks, strict=True):
            what = _difference(row, mask, samples[row["sample_id"]])
            if what:
                changed.append(f"{samples[row['sample_id']].where}: {what}")
    if changed:
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise InvalidInput(
            f"{len(changed)} samples are already planned with other content: "
            + "; ".join(changed[:3])
            + f"{more}. A planned sample never changes: give the new content a new sample_id"
        )
    ended = names.filter(pc.equal(names["op"], "tombstone"))["sample_id"]
    deleted = set(() if again else ended.to_pylist()) - planned
    outcome.deleted = [i for i in samples if i in deleted]
    outcome.new = [i for i in samples if i not in planned and i not in deleted]
    outcome.unchanged = len(planned)


def _live(table: pa.Table) -> pa.Table:
    """The adds that no later tombstone ends."""
    adds = table.filter(pc.equal(table["op"], "add"))
    gone = table.filter(pc.equal(table["op"], "tombstone"))
    if not gone.num_rows:
        return adds
    ends: dict[str, int] = {}
    for row in gone.select(["sample_id", "commit_version"]).to_pylist():
        ends[row["sample_id"]] = max(ends.get(row["sample_id"], -1), row["commit_version"])
    pairs = zip(adds["sample_id"].to_pylist(), adds["commit_version"].to_pylist(), strict=True)
    return adds.filter(pa.array([version > ends.get(i, -1) for i, version in pairs]))


def _difference(planned: dict[str, object], mask: np.ndarray, sample: _Sample) -> str | None:
    """The first field in which `sample` is not what is planned, for a message."""
    name = repr(planned["sample_id"])
    for column, found in (
        ("input_ids", sample.token_hash),
        ("source", sample.source),
        ("split", sample.split or planned["split"]),
    ):
        have = planned["token_hash" if column == "input_ids" else column]
        if have != found:
            if column == "input_ids":
                length = len(sample.input_ids)
                return f"input_ids: {name} has other tokens ({length}, planned {planned['length']})"
            return f"{column}: {name} has {found!r}, planned {have!r}"
    if not np.array_equal(mask, sample.loss_mask):
        return f"loss_mask: {name} has another mask"
    return None


def _table(samples: dict[str, _Sample], ids: list[str]) -> pa.Table:
    """Rows of the plan table for these samples, without commit_version."""
    new = [samples[i] for i in ids]
    lengths = [len(s.input_ids) for s in new]
    if sum(lengths) >= 2**31:
        raise InvalidInput(
            f"{len(new)} new samples have {sum(lengths)} tokens, one call plans at most 2**31: "
            "plan the files one by one"
        )
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    now = datetime.now(UTC)
    schema = schemas.arrow_schema("plan")
    columns: dict[str, object] = {
        "op": ["add"] * len(new),
        "sample_id": ids,
        "source": [s.source for s in new],
        "split": [s.split or TRAIN for s in new],
        "length": lengths,
        "supervised_tokens": [int(s.loss_mask.sum()) for s in new],
        "token_hash": [s.token_hash for s in new],
        "input_ids": _lists([s.input_ids for s in new], offsets),
        "loss_mask": _lists([s.loss_mask for s in new], offsets),
        "planned_at": [now] * len(new),
    }
    fields = [f for f in schema if f.name != "commit_version"]
    arrays = []
    for f in fields:
        value = columns[f.name]
        arrays.append(
            value.cast(f.type) if isinstance(value, pa.Array) else pa.array(value, f.type)
        )
    return pa.table(arrays, schema=pa.schema(fields))


def _lists(rows: list[np.ndarray], offsets: np.ndarray) -> pa.Array:
    values = np.concatenate(rows).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


# -- report -------------------------------------------------------------------------------------


def _report(
    store: Store,
    spec: LakeSpec,
    samples: dict[str, _Sample],
    outcome: _Outcome,
    dry_run: bool,
    files: int,
    rows: int,
    repeated: int,
    unused: list[str],
) -> PlanReport:
    new = [samples[i] for i in outcome.new]
    groups: dict[tuple[str, str], list[int]] = {}
    for s in new:
        counts = groups.setdefault((s.source, s.split or TRAIN), [0, 0, 0])
        for at, n in enumerate((1, len(s.input_ids), int(s.loss_mask.sum()))):
            counts[at] += n
    names = ("samples", "tokens", "supervised_tokens")
    tokens = sum(g[1] for g in groups.values())
    plan_tokens = outcome.live_tokens + tokens
    ratio, basis = _ratio(store, spec)
    return PlanReport(
        lake=store.root,
        dry_run=dry_run,
        files=files,
        rows=rows,
        added=len(new),
        unchanged=outcome.unchanged,
        repeated=repeated,
        deleted=len(outcome.deleted),
        unsupervised=sum(not s.loss_mask.any() for s in new),
        tokens=tokens,
        supervised_tokens=sum(g[2] for g in groups.values()),
        longest=max((len(s.input_ids) for s in new), default=0),
        raw_bytes=tokens * spec.bytes_per_token,
        forecast_stored_bytes=round(tokens * spec.bytes_per_token * ratio),
        plan_samples=outcome.live_samples + len(new),
        plan_tokens=plan_tokens,
        plan_raw_bytes=plan_tokens * spec.bytes_per_token,
        plan_forecast_stored_bytes=round(plan_tokens * spec.bytes_per_token * ratio),
        ratio=ratio,
        ratio_basis=basis,
        groups=[
            {"source": k[0], "split": k[1], **dict(zip(names, g, strict=True))}
            for k, g in sorted(groups.items())
        ],
        unused_columns=unused,
    )


def _ratio(store: Store, spec: LakeSpec) -> tuple[float, str]:
    """(stored / raw, where it comes from), as the named query `forecast` says."""
    files = {"manifest": catalog.open_table(store, "manifest").row_files(), "plan": []}
    sql, params = query.resolve("forecast", None)
    with query.connect_files(files, spec, query.filesystem(store)) as con:
        found = query.execute(con, sql, params).to_pylist()[0]
    return float(found["ratio"]), str(found["basis"])
