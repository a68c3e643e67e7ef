"""log, pin, vacuum, delete, repair and gc-staging as commands: exit codes, JSON, asking first."""

import getpass
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hslake
from hslake.cli import app
from tests.lakes import MadeLake, damage_sample, make_lake


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    made = make_lake(tmp_path, lengths=[30, 300])
    made.add([50])
    return made


def test_log_says_what_and_who(made: MadeLake) -> None:
    assert call("pin", made.url, "run", "--version", 1).exit_code == 0
    rows = json.loads(call("log", made.url, "--json").stdout)
    assert [r["commit_version"] for r in rows] == [2, 1]
    assert rows[1]["added"] == 2 and rows[1]["tokens"] == 330 and rows[1]["stored_bytes"] > 0
    assert rows[1]["pins"] == ["run"] and rows[1]["action"] == "compact"
    assert rows[1]["by"].startswith(f"{getpass.getuser()}@")
    one = call("log", made.url, "--limit", 1)
    assert len(one.stdout.splitlines()) == 3 and "--limit 0 shows all" in one.stderr
    assert len(call("log", made.url, "--limit", 0).stdout.splitlines()) == 4


def test_queries_and_pins_by_name(made: MadeLake) -> None:
    count = "select count(*) as n from samples"
    call("pin", made.url, "run", "--version", 1)
    for version, n in (("run", 2), ("1", 2), ("2", 3)):
        found = call("query", made.url, count, "--version", version, "--json")
        assert json.loads(found.stdout) == [{"n": n}]
    assert "its pins: run" in call("query", made.url, count, "--version", "ran").stderr
    assert call("query", made.url, count, "--version", "-1").exit_code == 2
    gone = call("pin", made.url, "run", "--remove")
    assert gone.exit_code == 0 and "removed run (version 1)" in gone.stdout
    assert call("pin", made.url, "run", "--remove").exit_code == 2
    assert call("pin", made.url, "run", "--version", 2).exit_code == 2
    assert call("pin", made.url, "--list", "--json").stdout.strip() == "[]"


def test_delete_asks_first(made: MadeLake) -> None:
    where = ("--where", "sample_id = 'A1-000000'")
    asked = call("delete", made.url, *where)
    assert asked.exit_code == 2 and "give --yes" in asked.stderr
    assert "1 samples (1 live, 1 planned), 30 tokens" in asked.stdout
    assert call("delete", made.url, *where, "--json").exit_code == 2
    dry = json.loads(call("delete", made.url, *where, "--dry-run", "--json").stdout)
    assert dry["samples"] == 1 and dry["moved"] == 1 and made.lake.version == 2
    call("pin", made.url, "run")
    refused = call("delete", made.url, *where, "--yes")
    assert refused.exit_code == 1 and "run; nothing was deleted" in refused.stderr
    done = call("delete", made.url, *where, "--yes", "--break-pins", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["ok"] and len(report["removed"]) == 1 and "other lakes" in report["remains"]
    assert call("verify", made.url).exit_code == 0
    listed = json.loads(call("pin", made.url, "--list", "--json").stdout)
    assert listed[0]["removed_segments"] == 1
    assert call("delete", made.url, "--where", "1 = 0", "--yes").exit_code == 2
    file = next(made.staging.parent.glob("plan-2.parquet"))
    again = call("plan", made.url, file)
    assert again.exit_code == 0 and "1 samples were deleted from this lake" in again.stderr


def test_delete_says_what_it_would_not_do(made: MadeLake) -> None:
    where = ("--where", "sample_id = 'A1-000000'")
    call("pin", made.url, "run")
    pinned = call("delete", made.url, *where, "--dry-run")
    assert pinned.exit_code == 0 and "without --break-pins nothing is deleted" in pinned.stderr
    done = call("delete", made.url, *where, "--yes", "--break-pins")
    assert done.exit_code == 0 and "deleted before" not in done.stderr
    again = call("delete", made.url, *where, "--yes")
    assert again.exit_code == 0 and "were deleted before" in again.stderr


def test_vacuum_counts_what_it_removes(made: MadeLake) -> None:
    name = made.add([70])[0]  # the only one of its segment
    damage_sample(hslake.open(made.url), name)
    assert call("verify", made.url, "--quarantine").exit_code == 1
    for options, verb in ((("--dry-run",), "would remove"), ((), "removed")):
        found = call("vacuum", made.url, "--retain", "0s", *options)
        assert found.exit_code == 0 and found.stdout.startswith(f"{verb} 1 segments, ")
        assert "in all: 0 orphaned, 1 whose samples are all hidden" in found.stdout
    assert call("vacuum", made.url).stdout.startswith("removed 0 segments, 0 B in all: 0 orphaned")


def test_repair_and_vacuum(made: MadeLake) -> None:
    assert "healthy" in call("repair", made.url).stdout
    entry = Path(made.url) / f"manifest/_delta_log/{2:020d}.json"
    whole = entry.read_bytes()
    entry.write_bytes(b"")
    assert call("verify", made.url).exit_code == 1
    dry = call("repair", made.url, "--dry-run")
    assert dry.exit_code == 0 and "would be put aside" in dry.stdout and entry.exists()
    done = call("repair", made.url)
    assert done.exit_code == 0 and "hslake verify" in done.stdout
    entry = entry.with_name(f"{1:020d}.json")
    entry.write_bytes(b"{")
    broken = json.loads(call("repair", made.url, "--json").stdout)
    assert not broken["ok"] and call("repair", made.url).exit_code == 1
    assert len(whole) > 0


def test_gc_staging(made: MadeLake) -> None:
    made.stage(made.plan([10]))
    dry = call("gc-staging", made.staging, "--dry-run", "--json")
    (folder,) = json.loads(dry.stdout)["folders"]
    assert (folder["state"], folder["samples"], folder["tokens"]) == ("kept", 1, 10)
    kept = call("gc-staging", made.staging)
    assert "--force throws them away" in kept.stdout and "removed 0 folders" in kept.stdout
    assert "removed 1 folders" in call("gc-staging", made.staging, "--force").stdout
    assert list(made.staging.iterdir()) == []
    assert call("gc-staging", made.staging / "none").exit_code == 2
    assert call("gc-staging", made.staging, "--older-than", "old").exit_code == 2
