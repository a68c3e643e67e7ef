"""Register samples in a lake's plan: all of one call in one commit, or none.

Planning the same files again adds nothing; a planned id that comes with other content is an error,
but for the same text through another tokenizer or template, which begins a new generation. Two
calls at once are safe: what is new is decided inside the catalog's compare-and-swap. Memory does
not grow with the plan: rows wait on disk, and the decision sees only their hashes.
"""

import tempfile
import uuid
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

from hslake.errors import InvalidInput, NoSpace
from hslake.ids import check_source
from hslake.plan.decide import Decision, Rules
from hslake.plan.files import unused_columns
from hslake.plan.folders import PlanFile, plan_files_in
from hslake.plan.pieces import Limits, OverLong
from hslake.plan.prepare import BadRows, Prepared, Settings, prepare
from hslake.plan.report import PlanReport, figures, notes, ratio
from hslake.plan.spill import Spill
from hslake.plan.tokens import TextOptions, Tokenizer
from hslake.progress import ProgressMaker, Silent
from hslake.spec import read_spec
from hslake.store import Store, open_store, refusal
from hslake.tables import catalog

_Choice = TypeVar("_Choice", OverLong, BadRows)


def plan_files(
    lake_url: str,
    files: Sequence[str | PathLike[str]],
    source: str | None = None,
    *,
    split_validation: float | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    last_turn_only: bool = False,
    trust_remote_code: bool = False,
    columns: Mapping[str, str] | None = None,
    max_length: int | None = None,
    over_long: str = OverLong.REJECT,
    min_supervised: int | None = None,
    dedup_tokens: bool = False,
    bad_rows: str = BadRows.FAIL,
    check_splits: bool = False,
    again: bool = False,
    dry_run: bool = False,
    report_file: str | PathLike[str] | None = None,
    progress: ProgressMaker = Silent,
) -> PlanReport:
    """Add the rows of `files` (or of folders) to the plan of the lake at `lake_url`.

    `source`: for rows that name none; `split_validation`: share (0 to 1) of the prompts that go to
    "validation", of rows without a split, chosen by the prompt's hash; `columns`: our column -> the
    files' name of it. Of text: `tokenizer`, the model's folder, `chat_template`, a file instead of
    its own, `template_args` for it, `last_turn_only`, `trust_remote_code` (of the folder).

    `max_length` in tokens, and `over_long`: "reject", "truncate" or "split"; `min_supervised`
    tokens (default: one of a piece, any of a whole sample); `dedup_tokens`: leave out what has the
    tokens of another sample; `bad_rows`: "fail" or "reject"; `check_splits`: a prompt in two splits
    is an error. `again`: plan also what was deleted from the lake (`hslake delete`), which is left
    out otherwise; `dry_run`: check and count, write nothing; `report_file`: gets a JSON line for
    every row that was rejected, replaced, or does not survive tokenisation.

    Rows without a sample_id get `<source>-<20 hex digits>` from their text, or tokens and mask, so
    the same row has the same id in any file. Raises InvalidInput naming file, row and field,
    Missing, CheckFailed, or NoSpace (of $TMPDIR, where rows wait: 5 bytes a token).
    """
    if not files:
        raise InvalidInput(
            "no files to plan: name at least one Parquet, Arrow or JSONL file, or a folder"
        )
    if split_validation is not None and not 0 <= split_validation <= 1:
        raise InvalidInput(f"split-validation: found {split_validation}, expected 0 to 1")
    if source is not None:
        check_source(source, "--source")
    spec = read_spec(lake_url)
    if not tokenizer and (chat_template or template_args or last_turn_only):
        raise InvalidInput(
            "--chat-template, --template-arg and --last-turn-only need --tokenizer DIR"
        )
    text = None
    if tokenizer:
        args = dict(template_args or {})
        text = Tokenizer(
            TextOptions(tokenizer, chat_template, args, last_turn_only, trust_remote_code)
        )
    settings = Settings(
        source,
        split_validation,
        Limits(max_length, _choice(OverLong, over_long, "--over-long"), min_supervised),
        _choice(BadRows, bad_rows, "--bad-rows"),
        dict(columns or {}),
        spec.model.vocab_size,
        text,
    )
    if report_file is not None and not Path(report_file).absolute().parent.is_dir():
        raise InvalidInput(f"--report {report_file}: its directory does not exist")
    named = [f for given in files for f in plan_files_in(fspath(given))]
    store = open_store(lake_url)
    rules = Rules(again, dedup_tokens, check_splits)
    with tempfile.TemporaryDirectory(prefix="hslake-plan-") as folder:
        spill = Spill(Path(folder))
        try:
            prepared = prepare(named, settings, spill, progress)
        except OSError as error:  # none of the files': those are InvalidInput
            where = f"{tempfile.gettempdir()} (TMPDIR), for the rows of these files"
            raise refusal(where, error) or NoSpace(f"{where}: {error}") from error
        with _Commit(store, spec, spill, rules, named, prepared, dry_run) as commit:
            # The id is of this call: content decides what is new, the id only finds a lost answer.
            catalog.commit(store, "plan", commit.build, f"plan-{uuid.uuid4().hex}")
            if report_file is not None:
                spill.write_notes(Path(report_file), commit.notes)
            found = commit.figures
    unused = dict.fromkeys(c for f in named for c in unused_columns(f, settings.names))
    rate, basis = ratio(store, spec)
    per_token = spec.bytes_per_token
    return PlanReport(
        lake=store.root,
        dry_run=dry_run,
        files=len(named),
        raw_bytes=found["tokens"] * per_token,
        forecast_stored_bytes=round(found["tokens"] * per_token * rate),
        plan_raw_bytes=found["plan_tokens"] * per_token,
        plan_forecast_stored_bytes=round(found["plan_tokens"] * per_token * rate),
        ratio=rate,
        ratio_basis=basis,
        unused_columns=list(unused),
        tokenizer_hash=text.tokenizer_hash if text else None,
        template_hash=text.template_hash if text else None,
        **found,
    )


def _choice(kind: type[_Choice], value: str, option: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{option}: found {value!r}, expected {', '.join(kind)}") from None


class _Commit:
    """Decides anew whenever another writer was faster. `figures` and `notes`: of the last time."""

    def __init__(
        self,
        store: Store,
        spec: Any,
        spill: Spill,
        rules: Rules,
        files: Sequence[PlanFile],
        prepared: Prepared,
        dry_run: bool,
    ) -> None:
        self._store, self._spec, self._spill, self._rules = store, spec, spill, rules
        self._files, self._prepared, self._dry_run = files, prepared, dry_run
        self._sound: set[str] = set()  # files of the plan that were checked
        self._decision: Decision | None = None
        self.figures: dict[str, Any] = {}
        self.notes: list[dict[str, Any]] = []

    def __enter__(self) -> "_Commit":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._decision is not None:
            self._decision.close()
        self._decision = None

    def build(self, state: catalog.TableState) -> catalog.Rows:
        """For `catalog.commit`."""
        self._close()
        state.check(self._sound)  # DuckDB would take a damaged id for a new one
        self._decision = Decision(
            self._store, self._spec, state, self._spill, self._rules, self._where
        )
        self.figures = figures(self._decision, self._prepared)
        self.notes = notes(self._decision)
        if self._dry_run or self._decision.empty:
            return None
        return self._decision.tables()

    def _where(self, file: int, row: int) -> str:
        return f"{self._files[file].url}: row {row}"
