"""Level `full`: a sample decoded, and all that its row says of it computed again.

Checksum, non-finite count and absolute maximum must be equal. The rms may differ in its last bits:
capture sums squares in float64 in whatever order its device likes. Squares of bfloat16, float16 and
float32 are exact in float64, so n of them sum up to within n * 2**-53 of the true sum, relatively,
in any order: at most 2**-23 for the 2**30 values of the longest samples, half of that for the root.
Each side is then rounded to float32, by 2**-24. So up to 2**-22 is no difference.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hslake.checksum import RowStats, bits_stats, rows_checksum, to_int64
from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.ids import token_hash
from hslake.lake import Lake
from hslake.picks import mask_fits
from hslake.segment.read import SegmentReader
from hslake.verify.media import broken
from hslake.verify.report import Damage
from hslake.verify.rows import packed

_RMS_TOLERANCE = 2.0**-22
_TINY = 2.0**-126  # below it a device may take values for zero
_RUN_BYTES = 16 << 20  # held encoded by each thread


@dataclass(frozen=True)
class Looked:
    """What came of looking at one sample."""

    row: dict[str, Any]
    damage: tuple[Damage, ...]
    warning: str | None = None


def look(lake: Lake, reader: SegmentReader, row: dict[str, Any], mask: bytes | None) -> Looked:
    """Decode a sample and compare. `mask`: its loss mask in the plan (`rows.plan_masks`), if it is
    planned. What is wrong is looked at twice before it counts. Raises Unavailable."""
    found = _look(lake, reader, row, mask)
    if not found.damage:
        return found
    again = _look(lake, reader, row, mask)
    if again.damage:
        return again
    return Looked(
        row,
        (),
        f"segment {row['segment_id']}, sample {row['sample_id']}: {found.damage[0].what}; looked "
        "at again, it is as it should be: this machine's memory or the way to the store errs",
    )


def _look(lake: Lake, reader: SegmentReader, row: dict[str, Any], mask: bytes | None) -> Looked:
    segment, name = row["segment_id"], (row["sample_id"],)
    place = (segment, row["token_start"], row["length"])
    streams = lake.spec.streams
    sums, stats = [0] * len(streams), [RowStats()] * len(streams)
    padded = True
    try:
        for number, at, bits, padding in reader.chunks(*place, _RUN_BYTES):
            sums[number] += rows_checksum(bits, at)
            stats[number] = stats[number].merge(bits_stats(bits, lake.spec.dtype))
            padded = padded and not padding.any()
        ids, stored = reader.tokens(*place)
    except (Corrupt, Missing, InvalidInput) as e:  # the last: a row that leads nowhere
        return Looked(row, (Damage(segment, str(e), name, getattr(e, "object", "")),))
    except Exception as error:
        fails = broken(error)
        if fails is None:
            raise
        return Looked(row, (Damage(segment, fails, name, sure=False),))
    wrong: list[Damage] = []
    for stream, total, want in zip(streams, sums, row["checksum"], strict=True):
        if to_int64(total) != want:
            what = f"stream {stream} differs from the checksum taken at capture"
            wrong.append(Damage(segment, what, name))
    if not wrong:  # of intact states: then the row is what was changed, and hiding it helps nobody
        wrong += [
            Damage(segment, f"{what}: its states are intact, its row is not", name, sure=False)
            for what in _statistics(streams, stats, row)
        ]
    if token_hash(ids) != row["token_hash"]:
        what = "stored input_ids differ from the manifest's token hash"
        wrong.append(Damage(segment, what, name))
    if not mask_fits(stored, row["length"], row["supervised_tokens"]):
        what = f"stored loss_mask differs: {row['supervised_tokens']} ones expected"
        wrong.append(Damage(segment, what, name))
    elif mask is not None and packed(stored) != mask:
        wrong.append(Damage(segment, "stored loss_mask differs from the plan's", name))
    warning = None if padded else f"segment {segment}: padding behind {name[0]} is not zero"
    return Looked(row, tuple(wrong), warning)


def _statistics(streams: tuple[str, ...], stats: list[RowStats], row: dict[str, Any]) -> list[str]:
    """Where the row's statistics are not those of the states."""
    found = []
    for i, (stream, have) in enumerate(zip(streams, stats, strict=True)):
        of: tuple[tuple[str, float, float], ...] = (
            ("nonfinite", have.nonfinite, 0.0),
            ("absmax", float(np.float32(have.absmax)), _TINY),
            ("rms", have.rms(), _TINY + _RMS_TOLERANCE * have.rms()),
        )
        for what, value, slack in of:
            told = row[what][i]
            if not abs(told - value) <= slack:  # also for a NaN in the row
                found.append(f"stream {stream}: {what} is {value:.9g}, its row says {told:.9g}")
    return found
