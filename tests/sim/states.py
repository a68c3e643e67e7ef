"""What the simulated model computes: a function of token, position, stream and channel, so that any
mix-up of samples, rows, streams or channels shows."""

from functools import lru_cache

import numpy as np

from hslake.spec import LakeSpec

_PERIOD = 997


@lru_cache(maxsize=8)
def _table(streams: int, hidden: int) -> np.ndarray:
    """bfloat16 bits [stream, _PERIOD, hidden] of every row there is."""
    stream = np.arange(streams)[:, None, None]
    row = np.arange(_PERIOD)[None, :, None]
    channel = np.arange(hidden)[None, None, :]
    mixed = row + stream * 1009 + channel * 7
    values = ((mixed % _PERIOD) - 498).astype(np.float32) / 100
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def rows_of(spec: LakeSpec, ids: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    """States of rows with token `ids` at `positions` of their samples: uint16 bits [row, hidden],
    one array a stream."""
    row = (np.asarray(ids, np.int64) * 31 + np.asarray(positions, np.int64) * 3) % _PERIOD
    return [table[row] for table in _table(len(spec.streams), spec.hidden_size)]


def states_of(spec: LakeSpec, input_ids: list[int] | np.ndarray) -> np.ndarray:
    """States of a whole sample: uint16 bits [stream, token, hidden]."""
    return np.stack(rows_of(spec, np.asarray(input_ids), np.arange(len(input_ids))))
