"""What of the prepared samples is new against one version of the plan: in SQL, over hashes.

Nothing here holds tokens, and what does not fit into DuckDB's memory spills to disk.

A planned id that comes again with the same tokens, mask, source and split is unchanged. The same
text that another tokenizer or template made into other tokens begins a new generation: the planned
row ends and the new one is added in one commit. Everything else under an old id is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hslake import query, schemas
from hslake.errors import CheckFailed, InvalidInput
from hslake.plan import decisions
from hslake.plan.spill import FILE_ROWS, FILE_TOKENS, Spill, mask_hash, prompt_hash, read_tokens
from hslake.spec import LakeSpec
from hslake.store import Store
from hslake.tables import catalog

_OLDER_ROWS = 512  # whose masks are read at once
_SHOWN = 3
_MEMORY = 1 << 29  # of DuckDB, in bytes: enough for a million samples, and it spills beyond
Where = Callable[[int, int], str]  # (file, row) -> for messages


@dataclass(frozen=True)
class Rules:
    """`again`: plan also what was deleted; `dedup`: leave out rows with tokens that are there under
    another id; `check_splits`: a prompt in two splits is an error."""

    again: bool = False
    dedup: bool = False
    check_splits: bool = False


class Decision(AbstractContextManager["Decision"]):
    """The samples of `spill` against the plan at `state`. Raises InvalidInput when a planned sample
    would change, CheckFailed as `rules` say; holds a DuckDB connection until it is closed."""

    def __init__(
        self,
        store: Store,
        spec: LakeSpec,
        state: catalog.TableState,
        spill: Spill,
        rules: Rules,
        where: Where,
    ) -> None:
        manifest = catalog.open_table(store, "manifest")
        tables = {"manifest": manifest, "plan": state}
        self._spill, self._rules, self._where = spill, rules, where
        self._con = query.connect_files(
            {name: table.row_files() for name, table in tables.items()},
            spec,
            query.filesystem(store),
            {name: table.change_files() for name, table in tables.items()},
            _MEMORY,
        )
        try:
            self._decide()
        except BaseException:
            self._con.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._con.close()

    # -- asking -----------------------------------------------------------------------------

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        """Rows of one SELECT over the tables of `decisions` and the lake's views."""
        found: list[dict[str, Any]] = query.execute(self._con, sql, params).to_pylist()
        return found

    def one(self, sql: str, **params: Any) -> Any:
        """The one value that a SELECT gives."""
        return next(iter(self.rows(sql, **params)[0].values()))

    def at(self, row: dict[str, Any]) -> str:
        """Where a head comes from."""
        return self._where(row["file"], row["row"])

    @property
    def empty(self) -> bool:
        """Whether nothing is to be committed."""
        return not self.one("select count(*) from chosen") and not self.one(
            "select count(*) from ended"
        )

    # -- deciding ---------------------------------------------------------------------------

    def _decide(self) -> None:
        self._keep("older", self._older())
        self._keep("heads", self._spill.heads())
        make = self._make
        make("planned", decisions.PLANNED)
        make("heads", decisions.NAMED)
        self._refuse_twice()
        make("kept", decisions.KEPT)
        make("gone", decisions.GONE)
        make("compared", decisions.COMPARED.format(again=self._rules.again))
        self._refuse_changed()
        make("siblings", decisions.SIBLINGS)
        self._refuse_siblings()
        make("decided", decisions.DECIDED if self._rules.dedup else decisions.UNDEDUPED)
        make("prompts", decisions.PROMPTS)
        make("chosen", decisions.CHOSEN)
        make("ended", decisions.ENDED)
        self._refuse_unknown_masks()
        make("straddling", decisions.STRADDLING)
        if self._rules.check_splits:
            self._refuse_straddling()

    def _make(self, name: str, sql: str) -> None:
        query.keep(self._con, name, sql)

    def _keep(self, name: str, data: Any) -> None:
        self._con.register("incoming", data)
        query.keep(self._con, name, "select * from incoming")
        self._con.unregister("incoming")

    def _older(self) -> pa.Table:
        """Hashes of planned rows that were written before they were recorded: a few masks at a
        time, whatever the plan's size."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("sample_id", "commit_version", "mask_hash", "prompt_hash")
        }
        text = (
            "select sample_id, commit_version, input_ids, loss_mask from plan "
            "where mask_hash is null and input_ids is not null and loss_mask is not null"
        )
        for batch in query.relation(self._con, text).to_arrow_reader(_OLDER_ROWS):
            columns["sample_id"] += batch.column(0).to_pylist()
            columns["commit_version"] += batch.column(1).to_pylist()
            for ids, mask in zip(batch.column(2), batch.column(3), strict=True):
                tokens = ids.values.to_numpy(zero_copy_only=False)
                flags = mask.values.to_numpy(zero_copy_only=False).astype(np.uint8)
                columns["mask_hash"].append(mask_hash(flags))
                columns["prompt_hash"].append(prompt_hash(tokens, flags))
        kinds = [pa.string(), pa.int64(), pa.string(), pa.string()]
        return pa.table(
            {n: pa.array(v, k) for (n, v), k in zip(columns.items(), kinds, strict=True)}
        )

    def _refuse_twice(self) -> None:
        for row in self.rows(decisions.TWICE):
            first = self._where(row["first_file"], row["first_row"])
            raise InvalidInput(
                f"{self.at(row)}: sample_id: {row['sample_id']!r} is a duplicate of {first}; "
                "expected every id once: rename or remove one"
            )

    def _refuse_changed(self) -> None:
        found = self.rows(decisions.CHANGED, shown=_SHOWN)
        if not found:
            return
        count = found[0]["count"]
        told = "; ".join(f"{self.at(row)}: {_difference(row)}" for row in found)
        more = f" (and {count - len(found)} more)" if count > len(found) else ""
        raise InvalidInput(
            f"{count} samples are already planned with other content: {told}{more}. A planned "
            "sample never changes, but for a new tokenizer or template over the same text: give "
            "the new content a new sample_id"
        )

    def _refuse_siblings(self) -> None:
        found = self.rows(decisions.OTHER_PIECES, shown=_SHOWN)
        if found:
            told = "; ".join(
                f"{self.at(row)}: {row['sample_id']!r}, planned as {row['planned']!r}"
                for row in found
            )
            raise InvalidInput(
                f"{found[0]['count']} samples are planned already, whole or in other pieces: "
                f"{told}. Plan with the same --max-length and --over-long, or `hslake delete` "
                "those first: the same tokens would be trained on twice"
            )

    def _refuse_unknown_masks(self) -> None:
        count = self.one(decisions.UNKNOWN_MASKS)
        if count:
            raise InvalidInput(
                f"{count} samples get another loss mask for the same tokens, and were captured by "
                "an older hslake, which did not record what their mask was: `hslake delete` them "
                "first, or give the new ones ids of their own"
            )

    def _refuse_straddling(self) -> None:
        count = self.one("select count(*) from straddling")
        if count:
            told = "; ".join(straddling_examples(self, _SHOWN))
            raise CheckFailed(
                f"{count} prompts are in more than one split: {told}; nothing was planned. Give "
                "all samples of a prompt one split, or leave `split` out and use "
                "--split-validation"
            )

    # -- what is to be committed --------------------------------------------------------------

    def tables(self) -> Iterator[pa.Table]:
        """Rows for the plan, without commit_version: what ends, then what is added, in tables of
        bounded size."""
        now = datetime.now(UTC)
        yield from self._ended(now)
        parts: list[pa.Table] = []
        tokens = 0
        for first, last, path in self._spill.tokens():
            found = query.execute(self._con, decisions.ADDED, {"first": first, "last": last})
            if not found.num_rows:
                continue
            table = _added(found, read_tokens(path), now)
            parts.append(table)
            tokens += pc.sum(table["length"]).as_py()
            if tokens >= FILE_TOKENS // 2 or sum(p.num_rows for p in parts) >= FILE_ROWS:
                yield pa.concat_tables(parts)
                parts, tokens = [], 0
        if parts:
            yield pa.concat_tables(parts)

    def _ended(self, now: datetime) -> Iterator[pa.Table]:
        # Read as a whole: nothing else may be asked of the connection while a result is open.
        found = query.execute(
            self._con, "select sample_id, generation from ended order by sample_id"
        )
        for at in range(0, found.num_rows, FILE_ROWS * 4):
            some = found.slice(at, FILE_ROWS * 4)
            count = some.num_rows
            yield pa.table(
                {
                    "op": pa.array(["tombstone"] * count, pa.string()),
                    "sample_id": some["sample_id"],
                    "generation": some["generation"].cast(pa.int32()),
                    "planned_at": pa.array([now] * count, pa.timestamp("us", tz="UTC")),
                }
            )


def straddling_examples(decision: Decision, count: int) -> Sequence[str]:
    """Some prompts that are in several splits, in words."""
    found = decision.rows("select * from straddling order by prompt_hash limit $count", count=count)
    return [
        f"{row['first_id']!r} ({row['first_split']}) and {row['last_id']!r} ({row['last_split']})"
        for row in found
    ]


def _added(heads: pa.Table, tokens: pa.Table, now: datetime) -> pa.Table:
    """Plan rows of `heads`, ordered by n, with their tokens."""
    wanted = heads["n"].to_numpy()
    if len(wanted) < tokens.num_rows:
        at = np.searchsorted(tokens["n"].to_numpy(), wanted)
        tokens = tokens.take(pa.array(at))
    schema, count = schemas.arrow_schema("plan"), heads.num_rows
    columns: dict[str, Any] = {
        name: heads[name] for name in heads.column_names if name in schema.names
    }
    columns["op"] = pa.array(["add"] * count, pa.string())
    columns["planned_at"] = pa.array([now] * count, pa.timestamp("us", tz="UTC"))
    columns["input_ids"], columns["loss_mask"] = tokens["input_ids"], tokens["loss_mask"]
    fields = [f for f in schema if f.name in columns]
    return pa.table([columns[f.name].cast(f.type) for f in fields], schema=pa.schema(fields))


def _difference(row: dict[str, Any]) -> str:
    """The first field in which a row is not what is planned."""
    name = repr(row["sample_id"])
    anew = row["same_text"] and not row["same_template"]  # other tokens are no error then
    if row["token_hash"] != row["planned_hash"] and not anew:
        again = (
            ": the same text, by the same template, which is not deterministic (does it print the "
            "date?)"
            if row["same_text"]
            else ""
        )
        return (
            f"input_ids: {name} has other tokens ({row['length']}, planned "
            f"{row['planned_length']}){again}"
        )
    for column in ("source", "split"):
        if row[column] is not None and row[column] != row[f"planned_{column}"]:
            return f"{column}: {name} has {row[column]!r}, planned {row[f'planned_{column}']!r}"
    return f"loss_mask: {name} has another mask"
