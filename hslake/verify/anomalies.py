"""What is odd about intact samples: counts of the named queries that look for it."""

import duckdb

from hslake import query

# Queries whose rows are anomalies; each stands in queries/ under its name.
ANOMALIES = ("non_finite", "constant_streams", "rms_outliers", "equal_states")

_ALL = 1 << 40


def count(con: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """How many rows each of them finds, with its default parameters."""
    found = {}
    for name in ANOMALIES:
        sql, params = query.resolve(name, {"limit": _ALL})
        rows = query.execute(con, f"select count(*) as n from ({sql}\n)", params)
        found[name] = int(rows["n"][0].as_py())
    return found


def warnings(found: dict[str, int]) -> list[str]:
    """One line for each kind that occurs."""
    return [
        f"{n} rows of the query {name}: intact as captured, and odd; see `hslake query LAKE {name}`"
        for name, n in found.items()
        if n
    ]
