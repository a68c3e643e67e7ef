"""From rows to prepared samples: source, split, id, pieces, hashes; what is rejected, and why."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from hslake.errors import InvalidInput
from hslake.ids import PROBE_PREFIX, check_sample_id, check_source, token_hash
from hslake.plan.folders import PlanFile
from hslake.plan.pieces import Limits, piece_id
from hslake.plan.rows import BadRow, PlanRow, read_rows
from hslake.plan.spill import Head, Spill, mask_hash, prompt_hash
from hslake.plan.tokens import Tokenizer
from hslake.progress import ProgressMaker

TRAIN, VALIDATION = "train", "validation"
TOO_LONG = "too long"
POOR = "too few supervised tokens"
BAD_ROW = "bad row"
DUPLICATE = "duplicate tokens"
LOST = "text does not survive tokenisation"
_ID_HEX = 20  # 80 bits: no two of ten million samples share a default id by chance
_EXAMPLES = 3  # of each reason, in the report


class BadRows(StrEnum):
    """What a row of which no sample can be made does: ends the call, or is rejected and counted."""

    FAIL = "fail"
    REJECT = "reject"


@dataclass(frozen=True)
class Settings:
    """What becomes of rows. `source`: of rows that name none; `fraction`: share of prompts that go
    to "validation" (None: none); `names`: our column -> the files'."""

    source: str | None
    fraction: float | None
    limits: Limits
    bad_rows: BadRows
    names: Mapping[str, str]
    vocab_size: int | None
    tokenizer: Tokenizer | None


@dataclass
class Prepared:
    """What was found in the rows. `checked`: rows whose text was compared with its tokens;
    `examples`: some of each reason; `cut`: samples that were truncated or split, into `pieces`."""

    rows: int = 0
    checked: int = 0
    lost: int = 0
    cut: int = 0
    pieces: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    _shown: Counter[str] = field(default_factory=Counter)

    def example(self, reason: str, row: str, **more: Any) -> None:
        """Keep the first few of each reason."""
        self._shown[reason] += 1
        if self._shown[reason] <= _EXAMPLES:
            self.examples.append({"reason": reason, "row": row, **more})


def prepare(
    files: Sequence[PlanFile], settings: Settings, spill: Spill, progress: ProgressMaker
) -> Prepared:
    """Put the samples of all files into `spill`. Raises InvalidInput, Missing."""
    found = Prepared()
    with progress(None, "plan (rows)") as bar:
        for number, file in enumerate(files):
            rows = read_rows(file, settings.vocab_size, settings.tokenizer, settings.names)
            for row in rows:
                found.rows += 1
                bar.advance(1)
                try:
                    if isinstance(row, BadRow):
                        raise row.error
                    _take(row, number, settings, spill, found)
                except InvalidInput as error:
                    if settings.bad_rows is BadRows.FAIL:
                        raise
                    found.rejected[BAD_ROW] += 1
                    # The error names the row, as `where` of the example and the note does.
                    why = str(error).removeprefix(f"{row.where}: ")
                    found.example(BAD_ROW, row.where, detail=why)
                    spill.note(kind=BAD_ROW, row=row.where, detail=why)
        spill.flush()
    return found


def _take(row: PlanRow, file: int, settings: Settings, spill: Spill, found: Prepared) -> None:
    """Prepare one row. Raises InvalidInput before anything of it is kept."""
    name = row.source if row.source is not None else settings.source
    if name is None:
        raise InvalidInput(
            f"{row.where}: source: missing; give --source NAME (for example A1) or a column source"
        )
    source = check_source(name, f"{row.where}: source")
    split = row.split if row.split is None else check_source(row.split, f"{row.where}: split")
    ids, mask = row.input_ids, row.loss_mask
    given = row.sample_id is not None
    base, legacy = _sample_id(row, source)
    prompt = prompt_hash(ids, mask)
    limits = settings.limits
    long = limits.is_long(len(ids))
    pieces = list(limits.pieces(len(ids))) if long else [(0, len(ids))]
    tokenizer = settings.tokenizer if row.content_hash is not None else None

    def head(sample_id: str, first: int, past: int, reason: str | None = None) -> Head:
        some, flags = ids[first:past], mask[first:past]
        hashed = reason is None
        return Head(
            file=file,
            row=row.number,
            given=given,
            sample_id=sample_id,
            legacy_id=None if long else legacy,
            origin=base if long and pieces else None,
            first=first,
            past=past,
            source=source,
            split=split,
            by_hash=_split(prompt, settings.fraction),
            length=len(some),
            supervised=int(np.count_nonzero(flags)),
            token_hash=token_hash(some) if hashed else None,
            mask_hash=mask_hash(flags) if hashed else None,
            prompt_hash=prompt if hashed else None,
            content_hash=row.content_hash,
            tokenizer_hash=tokenizer.tokenizer_hash if tokenizer else None,
            template_hash=tokenizer.template_hash if tokenizer and row.chat else None,
            reason=reason,
        )

    def reject(reason: str, one: Head, detail: str) -> None:
        found.rejected[reason] += 1
        found.example(reason, row.where, sample_id=one.sample_id, detail=detail)
        spill.note(kind=reason, row=row.where, sample_id=one.sample_id, detail=detail)
        spill.reject(one)

    if row.checked:
        found.checked += 1
    if row.lost:
        found.lost += 1
        found.example(LOST, row.where, sample_id=base, detail=row.lost)
        spill.note(kind=LOST, row=row.where, sample_id=base, detail=row.lost)
    if not pieces:
        detail = f"{len(ids)} tokens, at most {limits.max_length}"
        reject(TOO_LONG, head(base, 0, len(ids), TOO_LONG), detail)
        return
    found.cut += long
    for first, past in pieces:
        name = piece_id(base, first, past) if long else base
        supervised = int(np.count_nonzero(mask[first:past]))
        if limits.is_poor(supervised, piece=long):
            reject(POOR, head(name, first, past, POOR), f"{supervised} supervised tokens")
            continue
        found.pieces += long
        spill.add(head(name, first, past), ids[first:past], mask[first:past])


def _sample_id(row: PlanRow, source: str) -> tuple[str, str | None]:
    """(id, id that an older hslake gave to the row). Without one of its own, of the text, or of
    tokens and mask where these were given: the same row has the same id in any file."""
    if row.sample_id is None:
        content = row.input_ids.astype("<i4").tobytes() + row.loss_mask.tobytes()
        digest = hashlib.sha256(content).hexdigest()[:_ID_HEX]
        if row.content_hash is None:
            return f"{source}-{digest}", None
        return f"{source}-{row.content_hash[:_ID_HEX]}", f"{source}-{digest}"
    sample_id = check_sample_id(row.sample_id, f"{row.where}: sample_id")
    if sample_id.startswith(PROBE_PREFIX):
        raise InvalidInput(
            f"{row.where}: sample_id: {sample_id!r} starts with {PROBE_PREFIX!r}, which is "
            "reserved for preflight's probes: rename the sample"
        )
    return sample_id, None


def _split(prompt: str, fraction: float | None) -> str:
    """The split that the hash of a prompt says."""
    if fraction is None:
        return TRAIN
    return VALIDATION if int(prompt[:12], 16) < fraction * 2**48 else TRAIN
