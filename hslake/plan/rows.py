"""Rows of plan files as tokens: checked one by one, tokenised many at once, in order.

A batch of rows is tokenised in a thread while the next is read and the last is written down: fast
tokenizers let go of Python's lock.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from hslake.errors import InvalidInput
from hslake.plan.checks import check_mask, check_tokens
from hslake.plan.files import CONTENT, raw_rows
from hslake.plan.folders import PlanFile
from hslake.plan.tokens import Text, Tokenizer, Tokens, content_hash

_BATCH = 256
_AHEAD = 3  # batches under way: what bounds the memory


@dataclass(frozen=True)
class PlanRow:
    """One checked row. `input_ids` int32 [length], `loss_mask` uint8 [length] of 0 and 1;
    `sample_id`, `source` and `split` are as found, None when absent. `where` is for messages.

    `content_hash`: of the text or conversation that the tokens were made from, and `chat` whether
    by the template; None when they were given. `checked`: text and tokens were compared, and `lost`
    says in words where they differ.
    """

    where: str
    number: int
    sample_id: object
    source: object
    split: object
    input_ids: np.ndarray
    loss_mask: np.ndarray
    content_hash: str | None = None
    chat: bool = False
    checked: bool = False
    lost: str | None = None


@dataclass(frozen=True)
class BadRow:
    """A row of which no sample can be made, and why."""

    where: str
    number: int
    error: InvalidInput


def read_rows(
    file: PlanFile | str,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    names: Mapping[str, str] | None = None,
) -> Iterator[PlanRow | BadRow]:
    """The rows of one file, in order. `names`: our column -> the file's. Raises what `raw_rows`
    does for a file that does not read."""
    file = PlanFile(file) if isinstance(file, str) else file
    rows = raw_rows(file, names)
    if tokenizer is None:
        while some := list(islice(rows, _BATCH)):
            yield from _rows(some, file, vocab_size, None)
        return
    with ThreadPoolExecutor(2, "tokenise") as pool:
        waiting: deque[Future[list[PlanRow | BadRow]]] = deque()
        try:
            more = True
            while more or waiting:
                while more and len(waiting) < _AHEAD:
                    some = list(islice(rows, _BATCH))
                    more = bool(some)
                    if some:
                        waiting.append(pool.submit(_rows, some, file, vocab_size, tokenizer))
                if waiting:
                    yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@dataclass(frozen=True)
class _Parsed:
    """A row before its text is tokens. `text`: to be tokenised, or compared with `ids`."""

    where: str
    number: int
    values: Mapping[str, Any]
    ids: np.ndarray | None
    mask: np.ndarray | None
    text: Text | None


def _rows(
    batch: Sequence[tuple[int, Mapping[str, Any]]],
    file: PlanFile,
    vocab_size: int | None,
    tokenizer: Tokenizer | None,
) -> list[PlanRow | BadRow]:
    found: list[PlanRow | BadRow] = []
    parsed: list[_Parsed | BadRow] = []
    for number, values in batch:
        where = f"{file.url}: row {number}"
        try:
            parsed.append(_parse(where, number, values, vocab_size, tokenizer is not None))
        except InvalidInput as error:
            parsed.append(BadRow(where, number, error))
    texts = [p.text for p in parsed if isinstance(p, _Parsed) and p.text is not None]
    tokens = iter(tokenizer(texts) if tokenizer is not None and texts else ())
    for row in parsed:
        if isinstance(row, BadRow):
            found.append(row)
            continue
        made = next(tokens) if row.text is not None else None
        try:
            found.append(_finish(row, made, file, vocab_size, tokenizer))
        except InvalidInput as error:
            found.append(BadRow(row.where, row.number, error))
    return found


def _parse(
    where: str, number: int, values: Mapping[str, Any], vocab_size: int | None, can_tokenise: bool
) -> _Parsed:
    found = [name for name in CONTENT if values.get(name) is not None]
    if not found:
        raise InvalidInput(
            f"{where}: input_ids: missing; expected a list of token ids (or, with --tokenizer, "
            "`text`, `messages` or `conversations`)"
        )
    column, mask = found[0], values.get("loss_mask")
    if column == "input_ids":
        ids = check_tokens(values["input_ids"], vocab_size, f"{where}: input_ids")
        flags = check_mask(mask, len(ids), f"{where}: loss_mask")
        text = None
        if len(found) > 1 and can_tokenise:
            text = Text(found[1], values[found[1]], values.get("tools"), f"{where}: {found[1]}")
        return _Parsed(where, number, values, ids, flags, text)
    if len(found) > 1:
        raise InvalidInput(f"{where}: {found[1]}: there is `{column}` too, expected only one")
    if not can_tokenise:
        raise InvalidInput(
            f"{where}: {column}: text needs a tokenizer: give --tokenizer DIR, the model's "
            "own, or a column input_ids"
        )
    if mask is not None:
        raise InvalidInput(
            f"{where}: loss_mask: does not go with `{column}`, whose tokens are not known "
            "yet; give input_ids, or leave the mask out"
        )
    text = Text(column, values[column], values.get("tools"), f"{where}: {column}")
    return _Parsed(where, number, values, None, None, text)


def _finish(
    row: _Parsed,
    made: Tokens | InvalidInput | None,
    file: PlanFile,
    vocab_size: int | None,
    tokenizer: Tokenizer | None,
) -> PlanRow:
    split = row.values.get("split")
    named = (
        row.values.get("sample_id"),
        row.values.get("source"),
        split if split is not None else file.split,
    )
    if row.ids is not None and row.mask is not None:
        lost = None
        if row.text is not None and tokenizer is not None and made is not None:
            lost = _compare(row.ids, row.text, made, tokenizer)
        checked = row.text is not None
        return PlanRow(row.where, row.number, *named, row.ids, row.mask, checked=checked, lost=lost)
    if isinstance(made, InvalidInput):
        raise made
    assert made is not None and row.text is not None
    ids = check_tokens(made.input_ids, vocab_size, f"{row.where}: input_ids")
    return PlanRow(
        row.where,
        row.number,
        *named,
        ids,
        made.loss_mask,
        content_hash(row.text),
        row.text.column != "text",
        True,
        made.lost,
    )


def _compare(
    ids: np.ndarray, text: Text, made: Tokens | InvalidInput, tokenizer: Tokenizer
) -> str | None:
    """Where the ids that a row brings are not those of the text that it brings, in words."""
    if isinstance(made, InvalidInput):
        return f"its {text.column} cannot be tokenised: {made}"
    choices = [made.input_ids]
    if text.column == "text":
        choices.append(tokenizer.bare(text.value))
    if any(np.array_equal(ids, c) for c in choices):
        return None
    other = max(choices, key=lambda c: _common(ids, c))
    at = _common(ids, other)
    return (
        f"token {at} of {len(ids)}: input_ids has {ids[at : at + 4].tolist()}, its {text.column} "
        f"tokenises as {other[at : at + 4].tolist()} (of {len(other)})"
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
