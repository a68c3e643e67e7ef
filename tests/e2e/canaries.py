"""Another lake of the same model, with a real one's canaries and states, some of them changed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hslake
from hslake import checksum
from hslake.compact import compact
from hslake.ids import RequestId
from hslake.lake import Lake
from hslake.plan import plan_files
from hslake.runlog import RunLog
from hslake.staging import StagingWriter

Change = Callable[[str, np.ndarray], np.ndarray]
"""(sample id, bit patterns [stream, token, hidden]) -> what is stored instead."""


def stored_as(folder: Path, lake: Lake, model: Path, change: Change) -> str:
    """URL of a lake with the samples of `lake`, captured under the same attempts, through the real
    staging and compactor: whole and sound, whatever `change` made of them."""
    spec = lake.spec
    made = hslake.create(
        folder, model_config=model / "config.json", streams=spec.streams, dtype=spec.dtype
    )
    samples = lake.sql("select sample_id, source, attempt, length from samples").fetchall()
    rows = [
        {"sample_id": n, "source": s, "input_ids": lake.read(n, streams=[]).input_ids.tolist()}
        for n, s, *_ in samples
    ]
    plan = folder.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), plan)
    plan_files(made.url, [plan])
    staging = folder.with_suffix(".staging")
    staging.mkdir()
    writer = StagingWriter(
        staging,
        made.spec,
        part_tokens=sum(row[3] for row in samples),
        max_parts=1,
        fingerprint=made.spec.model.fingerprint,
        engine={"engine": "copy", "engine_version": "0", "hook_version": hslake.__version__}
        | {"tp": "1", "dp_rank": "0", "chunk_size": "0"},
    )
    for name, source, attempt, length in samples:
        sample = lake.read(name)
        place = writer.begin(RequestId(made.spec.lake8, attempt, length, source, name))
        out = place.rows(0, length)
        states = change(name, sample.hidden_states)
        for target, values in zip(out.hidden, states, strict=True):
            target[...] = values
        out.input_ids[...] = sample.input_ids
        sums = [checksum.rows_checksum(np.ascontiguousarray(s), 0) for s in states]
        stats = [checksum.row_stats(checksum.to_float32(s, spec.dtype)) for s in states]
        writer.wrote(place, 0, length, sums, stats)
    writer.close()
    assert compact(made.url, [staging]).samples == len(samples)
    log = RunLog(made.store)
    told = lake.sql(
        "select sample_id, token_hash, attempt, server, first_position, log_probs from canaries"
    )
    for row in told.fetchall():
        log.canary(*row)
    log.flush()
    return made.url
