"""Token ids of the samples that a run asks for, in a file without a name beside the process.

The plan's files are in the order of planning and an extraction's order is another: to look each
block of it up in the plan would read all of the plan for every block. So the plan is read once, and
what is asked for is kept where any sample of it is one small read away. The file has no name: it is
gone with the process, however that ends. It takes four bytes a token of $TMPDIR.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from hslake import query
from hslake.errors import HslakeError, Missing, NoSpace
from hslake.extract.items import Item, Items
from hslake.lake import Lake
from hslake.store import refusal

_ROWS = 2048  # of the plan, at once in memory


class TokenFile:
    """Tokens of `items`, read from `lake` now. Closed at the end of a `with`.

    Raises Missing when the plan lacks one of them, NoSpace when $TMPDIR is full.
    """

    def __init__(self, lake: Lake, items: Items) -> None:
        places = items.places.to_numpy()
        self._at = np.full(int(places.max(initial=-1)) + 1, -1, np.int64)  # byte by place
        self._file = tempfile.TemporaryFile(prefix="hslake-tokens-", buffering=1 << 20)  # noqa: SIM115
        try:
            self._fill(lake, items)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise self._no_room(error) from error
            raise
        lacking = int((self._at[places] < 0).sum())
        if lacking:
            self._file.close()
            raise Missing(f"{lake.url}: the plan lacks {lacking:,} samples it had a moment ago")

    def _fill(self, lake: Lake, items: Items) -> None:
        wanted = pa.table({"name": items.names, "place": items.places})
        end = 0
        with query.connect(lake) as con:
            for batch in query.stream(con, _SQL, {"_wanted": wanted}, _ROWS):
                ids = batch.column("input_ids")
                starts = ids.offsets.to_numpy().astype(np.int64)
                values = ids.values.to_numpy(zero_copy_only=False)[starts[0] : starts[-1]]
                self._at[batch.column("place").to_numpy()] = end + 4 * (starts[:-1] - starts[0])
                self._file.write(np.ascontiguousarray(values, np.int32).data)
                end += values.nbytes
        self._file.flush()

    def read(self, items: Sequence[Item]) -> Mapping[str, Any]:
        """Token ids (int32 arrays) of `items` by sample id; in any thread."""
        fd = self._file.fileno()
        return {
            item.sample_id: np.frombuffer(
                os.pread(fd, 4 * item.length, int(self._at[item.place])), np.int32
            )
            for item in items
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _no_room(self, error: OSError) -> HslakeError:
        where = f"{tempfile.gettempdir()} (TMPDIR), for the token ids of this run"
        return refusal(where, error) or NoSpace(f"{where}: {error}")


_SQL = """
    select w.place, p.input_ids from _wanted w join plan p on p.sample_id = w.name
"""
