"""Checks of a plan file's token ids and masks: InvalidInput names the item."""

from typing import Any

import numpy as np

from hslake.errors import InvalidInput

_INT32_MAX = 2**31 - 1


def check_tokens(ids: Any, vocab_size: int | None, where: str) -> np.ndarray:
    """`ids` as int32 [length]. Raises InvalidInput naming the first token that is none."""
    array = _integers(ids, where, "token ids")
    if not len(array):
        raise InvalidInput(f"{where}: is empty, expected at least one token")
    limit = _INT32_MAX if vocab_size is None else vocab_size - 1
    if array.min() < 0 or array.max() > limit:
        at = int(np.flatnonzero((array < 0) | (array > limit))[0])
        of = f"the model's vocabulary has {vocab_size} entries" if vocab_size else "ids are int32"
        raise InvalidInput(f"{where}: token {at} is {array[at]}, expected 0 to {limit}: {of}")
    return array.astype(np.int32)


def check_mask(mask: Any, length: int, where: str) -> np.ndarray:
    """`mask` as uint8 [length] (all ones when None). Raises InvalidInput."""
    if mask is None:
        return np.ones(length, np.uint8)
    if isinstance(mask, list) and all(type(v) is bool for v in mask):
        mask = [int(v) for v in mask]  # a column of type list<bool> says the same
    array = _integers(mask, where, "values of 0 and 1")
    if len(array) != length:
        raise InvalidInput(
            f"{where}: has {len(array)} values for {length} tokens, expected one for each"
        )
    bad = np.flatnonzero((array != 0) & (array != 1))
    if len(bad):
        raise InvalidInput(f"{where}: value {bad[0]} is {array[bad[0]]}, expected 0 or 1")
    return array.astype(np.uint8)


def _integers(values: Any, where: str, what: str) -> np.ndarray:
    """`values` as an integer array; bools, floats, text and nulls are not integers."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"{where}: found {short(values)}, expected a list of {what}")
    for at, value in enumerate(values):
        if type(value) is not int:
            raise InvalidInput(
                f"{where}: item {at} is {short(value)} ({type(value).__name__}), expected a "
                f"list of whole numbers: {what}"
            )
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        at = next(i for i, v in enumerate(values) if not -(2**63) <= v < 2**63)
        raise InvalidInput(
            f"{where}: item {at} is {short(values[at])}, which does not fit in int32: {what}"
        ) from None


def short(value: Any) -> str:
    """`value` for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
