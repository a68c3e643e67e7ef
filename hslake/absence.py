"""Why a sample cannot be read: deleted, hidden, not captured yet, never planned, or its segment
removed since the version that was opened."""

from hslake import manifest
from hslake.errors import Missing
from hslake.lake import Lake
from hslake.store import Store
from hslake.tables import catalog


def why_absent(lake: Lake, sample_id: str) -> str:
    """Why `sample_id` is no live sample of `lake`, in a few words for a message."""
    from hslake import query

    params = {"id": sample_id}
    text = """
        select op, reason, committed_at, commit_version from manifest
        where sample_id = $id and op in ('delete', 'hide')
        order by commit_version desc, op limit 1"""
    found = query.run(lake, text, params).to_pylist()
    planned = query.run(lake, "select 1 from plan where sample_id = $id", params).num_rows > 0
    newest = catalog.open_table(lake.store, "manifest").version
    more = "extract captures it again" if planned else "it is not planned any more"
    if found:
        row = found[0]
        at = f"{row['committed_at']:%Y-%m-%d}, version {row['commit_version']}"
        why = f": {row['reason']}" if row["reason"] else ""
        if row["op"] == "delete":
            return f"it was deleted ({at}{why})" + ("; it was planned again" if planned else "")
        return f"it is hidden ({at}{why}); {more}"
    what = "it is planned and not captured yet" if planned else "it is not in the plan either"
    return what if newest == lake.version else f"{what}; refresh, the lake is at version {newest}"


def why_gone(store: Store, version: int, segment_id: str) -> Missing | None:
    """What to tell of a segment that does not read, if a vacuum or delete has removed it since
    `version` of the manifest was made."""
    row = manifest.condemned(catalog.open_table(store, "manifest"), segment_id)
    if row is None:
        return None
    return Missing(
        f"version {version} of {store.url()} is not whole any more: its segment {segment_id} was "
        f"removed ({row['reason']}; version {row['commit_version']}, "
        f"{row['committed_at']:%Y-%m-%d}). Only pinned versions and those that were replaced less "
        "than vacuum's --retain ago are kept whole: open a newer one"
    )
