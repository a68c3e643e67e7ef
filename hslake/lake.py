"""A lake: make one, open one, query it, read samples from it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hslake import modelinfo
from hslake.checksum import sample_checksum
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing
from hslake.ids import token_hash
from hslake.runlog import open_runs
from hslake.segment.read import SegmentReader
from hslake.spec import (
    DTYPES,
    SPEC_FILE,
    Estimate,
    LakeSpec,
    ModelInfo,
    make_spec,
    read_spec,
)
from hslake.store import Store, open_store
from hslake.streams import parse_capture, parse_streams, stream_names
from hslake.tables import catalog

if TYPE_CHECKING:
    import duckdb

TABLES = ("manifest", "plan")
FINAL_NORM = "model/final_norm"
_LOCATIONS = "sample_locations"


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample lies: `length` tokens from `token_start` of a segment.

    `token_hash` and `checksum` (one a stream of the lake) are those of its capture.
    """

    sample_id: str
    source: str
    split: str
    segment_id: str
    token_start: int
    length: int
    segment_tokens: int
    token_hash: str
    checksum: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample, or some of its rows and streams.

    hidden_states: [stream, token, hidden], uint16 bit patterns when `dtype` is bfloat16, else
    float16 or float32; input_ids int32 [token]; loss_mask uint8 [token]. `length` is that of the
    whole sample.
    """

    sample_id: str
    source: str
    split: str
    length: int
    streams: tuple[str, ...]
    dtype: str
    hidden_states: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray


class Lake:
    """An open lake, pinned at one version of its manifest and one of its plan."""

    def __init__(
        self,
        store: Store,
        spec: LakeSpec,
        manifest: catalog.TableState,
        plan: catalog.TableState,
    ) -> None:
        self.store, self.spec = store, spec
        self._manifest, self._plan = manifest, plan
        self._reader = SegmentReader(store, spec)
        self._leave_parent()

    def __repr__(self) -> str:
        return f"<hslake.Lake {self.url} version {self.version}>"

    @property
    def url(self) -> str:
        """The lake's URL; an absolute path when it is local."""
        return self.store.url()

    @property
    def version(self) -> int:
        """Version of the manifest that this object sees."""
        return self._manifest.version

    @property
    def plan_version(self) -> int:
        """Version of the plan that this object sees."""
        return self._plan.version

    def manifest_table(self) -> catalog.TableState:
        """The manifest at `version`."""
        return self._manifest

    def plan_table(self) -> catalog.TableState:
        """The plan at `plan_version`."""
        return self._plan

    def runs_table(self) -> catalog.TableState | None:
        """The run log as it is now; None before the first run."""
        return open_runs(self.store)

    def refresh(self) -> Lake:
        """The same lake at its newest version."""
        return _open(self.store, self.spec, None)

    def _leave_parent(self) -> None:
        """Start without connections: at first, and after a fork, where the parent's would hang."""
        if getattr(self, "_pid", None) == os.getpid():
            return
        # Kept, as closing them here would hang too.
        self._of_parent = [self.__dict__.get(n) for n in ("_connection", "_lookups")]
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._lookups: duckdb.DuckDBPyConnection | None = None
        self._looks = 0  # samples that were looked up
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def connect(self) -> duckdb.DuckDBPyConnection:
        """This lake's DuckDB connection, made on first use (`hslake.query.connect`)."""
        from hslake import query

        self._leave_parent()
        with self._lock:
            if self._connection is None:
                self._connection = query.connect(self)
            return self._connection

    def sql(self, query: str, params: Mapping[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Relation of one SELECT over samples, segments, plan, coverage, versions and runs.

        `params` are the query's `$name`s. Raises InvalidInput with DuckDB's message for anything
        but one SELECT that it can plan. The relation is lazy: what goes wrong in its rows (a cast,
        memory, a file that is gone) is DuckDB's own error, when they are fetched.
        """
        from hslake.query import relation

        return relation(self.connect(), query, params)

    def location(self, sample_id: str) -> SampleLocation:
        """Where `sample_id` lies. Raises Missing."""
        from hslake import query

        if not isinstance(sample_id, str):
            raise InvalidInput(f"sample_id: found {sample_id!r}, expected a string")
        columns = f"select {', '.join(SampleLocation.__dataclass_fields__)} from"
        self._leave_parent()
        with self._lock:
            # Not the caller's connection: it may be in the middle of a result.
            if self._lookups is None:
                self._lookups = query.connect(self)
            # Each look in the manifest reads all of it: whoever comes twice gets a table.
            if self._looks == 1:
                query.keep(self._lookups, _LOCATIONS, f"{columns} samples")
            table = _LOCATIONS if self._looks else "samples"
            self._looks += 1
            text = f"{columns} {table} where sample_id = $id"
            rows = query.execute(self._lookups, text, {"id": sample_id}).to_pylist()
        if not rows:
            from hslake.absence import why_absent

            raise Missing(
                f"{self.url} has no sample {sample_id!r} at version {self.version}: "
                f"{why_absent(self, sample_id)}"
            )
        return SampleLocation(**rows[0])

    def read(
        self,
        sample_id: str,
        streams: Sequence[str | int] | None = None,
        rows: slice | None = None,
    ) -> Sample:
        """Read a sample: all of it, or some streams and a slice of its rows (only their chunks).

        Every chunk's own checksum is compared; of whole streams also the one taken at capture, of
        all rows the token hash. Raises Missing (also when a vacuum has removed its segment since
        this version), InvalidInput (unknown stream), Corrupt (naming the damaged chunk or stream).
        """
        at = self.location(sample_id)
        try:
            hidden, ids, mask = self._reader.sample(
                at.segment_id, at.token_start, at.length, streams, rows
            )
            names = self.spec.streams if streams is None else stream_names(streams)
            self._compare(at, names, hidden, ids)
        except Corrupt as error:
            from hslake.absence import why_gone

            gone = why_gone(self.store, self.version, at.segment_id)
            raise gone or error.of(sample_id) from error
        return Sample(
            at.sample_id, at.source, at.split, at.length, names, self.spec.dtype, hidden, ids, mask
        )

    def _compare(
        self, at: SampleLocation, names: Sequence[str], hidden: np.ndarray, ids: np.ndarray
    ) -> None:
        """Raise Corrupt unless whole streams are what was captured: chunks know nothing of the
        sample and the place that they belong to."""
        if len(ids) != at.length or at.checksum is None:
            return
        wrong = [
            name
            for name, rows in zip(names, hidden, strict=True)
            if sample_checksum(rows) != at.checksum[self.spec.streams.index(name)]
        ]
        what = [f"stream {', '.join(wrong)}"] if wrong else []
        if at.token_hash is not None and token_hash(ids) != at.token_hash:
            what.append("input_ids")
        if what:
            raise Corrupt(
                f"segment {at.segment_id}: {' and '.join(what)} differ from what was captured, "
                "though every chunk is sound: "
                "another's data is in this place, or the manifest was changed; `hslake verify` "
                "tells which, `hslake verify --quarantine` hides the sample"
            )


def _open(store: Store, spec: LakeSpec, version: int | None) -> Lake:
    manifest = catalog.open_table(store, "manifest", version)
    return Lake(store, spec, manifest, catalog.open_table(store, "plan"))


def open_lake(url: str | PathLike[str], version: int | str | None = None) -> Lake:
    """Open the lake at `url`, at a manifest version or the one that a pin of this name names
    (default: the newest). Raises Missing."""
    store = open_store(url)
    spec = read_spec(store.url())
    if isinstance(version, str):
        from hslake.pins import version_of

        version = int(version) if version.isdecimal() else version_of(store, version)
    return _open(store, spec, version)


def create(
    url: str | PathLike[str],
    *,
    capture: str | None = None,
    streams: Sequence[str | int] | None = None,
    model_config: str | PathLike[str] | None = None,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    dtype: str | None = None,
    codec: str = "standard",
    estimate_tokens: int | None = None,
    estimate_bytes: int | None = None,
    name: str | None = None,
) -> Lake:
    """Make a lake at `url` and open it.

    The model comes from `model_config` (a config.json or its folder; safetensors files beside it
    are fingerprinted and give the final norm), or from `hidden_size` and `num_layers`. What to
    capture: `capture` as on the command line ("eagle3", "2,15,27,final"), or `streams`. `dtype` is
    the server's residual dtype (default: the config's, else bfloat16). `estimate_tokens` and
    `estimate_bytes` are what the lake is expected to hold and take.

    Raises InvalidInput when there is a lake already or a setting does not fit, CheckFailed when the
    store has no conditional put. Interrupted, it leaves no lake, and may be run again
    with the same model.
    """
    store = open_store(url)
    if store.exists(SPEC_FILE):
        raise _taken(store)
    model, norm, dtype_found = _model(model_config, hidden_size, num_layers, name)
    if (capture is None) == (streams is None):
        raise InvalidInput("give either capture or streams, for example capture='eagle3'")
    if capture is not None:
        chosen = parse_capture(capture, model.num_layers)
    else:
        chosen = parse_streams(streams or (), model.num_layers, "streams")
    for what, value in (("estimate_tokens", estimate_tokens), ("estimate_bytes", estimate_bytes)):
        if value is not None and value < 1:
            raise InvalidInput(f"{what}: found {value}, expected at least 1")
    if dtype is None:
        dtype = dtype_found if dtype_found in DTYPES else "bfloat16"
    norm_objects = norm.objects(FINAL_NORM) if norm else {}
    digests = {
        path.removeprefix(f"{FINAL_NORM}/"): hashlib.sha256(data).hexdigest()
        for path, data in norm_objects.items()
    }
    spec = make_spec(
        dataclasses.replace(model, final_norm=digests or None),
        chosen,
        dtype=dtype,
        codec=codec,
        estimate=Estimate(estimate_tokens, estimate_bytes),
    )
    store.check_put_new()
    for table in TABLES:
        catalog.create_table(store, table)
    _put_norm(store, norm_objects)
    # Last: without this file there is no lake, so nothing that is half done is ever opened.
    try:
        store.put_new(SPEC_FILE, spec.to_json().encode())
    except Conflict:
        raise _taken(store) from None
    return _open(store, spec, None)


def _put_norm(store: Store, objects: Mapping[str, bytes]) -> None:
    """Write the final norm once. Of two that create a lake here at once, with other models, at most
    one gets past this: neither can leave its norm in the other's lake."""
    for path, data in objects.items():
        try:
            store.put_new(path, data)
        except Conflict:
            if store.read(path) != data:
                raise _leftover(store) from None
    if not objects and store.list(FINAL_NORM):
        raise _leftover(store)


def _leftover(store: Store) -> InvalidInput:
    return InvalidInput(
        f"{store.url(FINAL_NORM)} holds another model's norm: somebody else is making a lake here, "
        f"or was interrupted; if nobody is, remove {store.url()} and try again"
    )


def _taken(store: Store) -> InvalidInput:
    return InvalidInput(
        f"there is a lake at {store.url()} already; expected an empty place: open it, or choose "
        "another"
    )


def _model(
    model_config: str | PathLike[str] | None,
    hidden_size: int | None,
    num_layers: int | None,
    name: str | None,
) -> tuple[ModelInfo, modelinfo.FinalNorm | None, str | None]:
    if model_config is None:
        if hidden_size is None or num_layers is None:
            raise InvalidInput("give model_config, or both hidden_size and num_layers")
        unknown: dict[str, str | None] = {"config": None, "weights": None}
        return ModelInfo(name or "", "", num_layers, hidden_size, None, unknown), None, None
    path = modelinfo.config_path(Path(model_config))
    model, dtype = modelinfo.read_model(path, name)
    for what, given, found in (
        ("hidden_size", hidden_size, model.hidden_size),
        ("num_layers", num_layers, model.num_layers),
    ):
        if given is not None and given != found:
            raise InvalidInput(f"{what}: {given} was given, {path} says {found}: leave it out")
    norm = modelinfo.final_norm(path)
    if norm is not None and not norm.matches(model.hidden_size):
        raise InvalidInput(
            f"{path.parent}: the tensor {norm.tensor} does not have hidden_size "
            f"{model.hidden_size} values: config and weights are of different models"
        )
    return model, norm, dtype


open = open_lake
