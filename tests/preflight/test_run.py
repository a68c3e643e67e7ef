"""Preflight: what a good set-up shows, and every way it says no."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import hslake
from hslake.checks import FAIL, PASS, WARN, Check
from hslake.cli import app
from hslake.compact import compact
from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.extract import extract
from hslake.plan import plan_files
from hslake.preflight import PreflightReport, preflight
from hslake.staging.space import RESERVE
from tests import fakeserver
from tests.fakeserver import FakeServer


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return planned(tmp_path / "lake", [40, 300, 7])


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def planned(folder: Path, lengths: list[int]) -> str:
    made = hslake.create(folder, streams=[2, 4, "final"], hidden_size=8, num_layers=8)
    rows = [
        {"sample_id": f"s{i}", "source": "A1", "input_ids": [3 + i * 7 + j for j in range(n)]}
        for i, n in enumerate(lengths)
    ]
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), folder.parent / "plan.parquet")
        plan_files(made.url, [folder.parent / "plan.parquet"])
    return made.url


def by_name(report: PreflightReport) -> dict[str, Check]:
    assert all(c.todo for c in report.checks if c.result != PASS)  # always what to do
    return {c.name: c for c in report.checks}


def test_a_good_set_up_is_go(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url], staging=[staging])
        checks = by_name(report)
        assert report.passed and not report.failures
        # Made without a model, and none is given.
        assert [c.name for c in report.warnings] == ["fingerprint", "log-probs"]
        assert "bit-equal" in checks["batch invariance"].found
        assert checks["structure"].found.startswith("3 streams of 10 x 8 bfloat16, 480 bytes")
        assert checks["states"].result == PASS and checks["foreign parts"].result == PASS
        # The probe is captured, asked for by nobody, and never committed.
        assert next(iter(server.captured)).startswith("__hslake_probe__")
        assert extract(lake, [server.url]).captured == 3
    done = compact(lake, [staging])
    assert done.samples == 3 and done.abandoned == {}
    assert "committed" in by_name(preflight_after(lake, staging))["plan"].found


def preflight_after(lake: str, staging: Path) -> PreflightReport:
    with FakeServer(lake, staging) as server:
        return preflight(lake, [server.url], staging=[staging])


def test_without_staging_it_warns(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url])
    assert report.passed
    assert {c.name for c in report.warnings} == {"fingerprint", "staging", "states", "log-probs"}


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda s: np.zeros_like(s), "stream 2 has constant rows"),
        (lambda s: np.full_like(s, 0x7FC0), "stream 4 has values that are not finite"),
        (lambda s: np.repeat(s[:1], len(s), axis=0), "streams 2 and final are equal"),
        (lambda s: np.repeat(s[:, :1], s.shape[1], axis=1), "is the same for every token"),
    ],
)
def test_bad_states_are_no_go(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch, break_it: object, text: str
) -> None:
    true_states = fakeserver.states_of
    monkeypatch.setattr(
        fakeserver,
        "states_of",
        lambda spec, ids: break_it(true_states(spec, ids)),  # type: ignore[operator]
    )
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url], staging=[staging])
    assert [c.name for c in report.failures] == ["states"]
    assert text in report.failures[0].found and report.failures[0].where == server.url


def test_a_hook_that_sees_nothing(lake: str, staging: Path) -> None:
    for action, text in (
        ("silent", "the hook acknowledged nothing"),
        ("drop", "the hook dropped it: a forward was lost"),
        ("error", "HTTP 500"),
    ):
        with FakeServer(lake, staging, script=lambda rid, nth, a=action: a) as server:
            report = preflight(lake, [server.url], probe_timeout=0.3)
        assert [c.name for c in report.failures] == ["probe"] and text in report.failures[0].found


def test_servers_that_cannot_work(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging) as server:
        server.status_lake_id = "1" * 32
        assert "captures for lake 1111" in by_name(preflight(lake, [server.url]))["hook"].found
        server.status_lake_id = None
        server.disarm("unknown architecture")
        assert "unknown architecture" in by_name(preflight(lake, [server.url]))["hook"].found
        url = server.url
    report = preflight(lake, [url])
    assert not report.passed and "no answer" in by_name(report)["server"].found


def test_samples_that_do_not_fit(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=128) as server:
        found = by_name(preflight(lake, [server.url]))["longest sample"]
        assert (
            found.result == FAIL and "'s1' has 300 tokens, a staging part holds 128" in found.found
        )
    with FakeServer(lake, staging, context=200) as server:
        found = by_name(preflight(lake, [server.url]))["longest sample"]
        assert found.result == FAIL and "the server takes 199" in found.found
        assert "--context-length" in found.todo and "parts" not in found.todo
    with FakeServer(lake, staging, part_tokens=128, context=200, max_parts=20) as server:
        report = preflight(lake, [server.url], burst_s=0.2)
        found = by_name(report)["longest sample"]
        assert "a staging part holds 128 and the server takes 199: 1 of the" in found.found
        assert "parts of at least 300" in found.todo and "--context-length" in found.todo
        # No room makes that one fit: the burst tries what does.
        burst = by_name(report)["burst"]
        assert "longest sample that all servers take (40 tokens) among them" in burst.found


def test_foreign_and_left_behind_parts(lake: str, staging: Path, tmp_path: Path) -> None:
    with FakeServer(lake, staging) as old:
        assert preflight(lake, [old.url], staging=[staging]).passed
    with FakeServer(lake, staging) as old:
        # Nothing but preflight's own probes.
        report = preflight(lake, [old.url], staging=[staging])
        assert "left behind" not in by_name(report)
        extract(lake, [old.url])
    with FakeServer(lake, staging) as server:
        assert (
            by_name(preflight(lake, [server.url], staging=[staging]))["left behind"].result == WARN
        )
        other = planned(tmp_path / "other", [])
        with FakeServer(other, staging):
            report = preflight(lake, [server.url], staging=[staging])
            found = by_name(report)["foreign parts"]
            assert found.result == FAIL and "lake_id" in found.found


def test_room_on_disk_and_in_ram(lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(staging)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    # Enough for the parts, but not for what must stay free beside them.
    room = (RESERVE + 1000, "the filesystem")
    monkeypatch.setattr("hslake.preflight.staging.free_bytes", lambda folder: room)
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url], staging=[staging])
    assert {c.name for c in report.failures} == {"disk space", "staging space"}


def test_staging_on_a_disk_is_a_warning(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hslake.staging import space

    monkeypatch.setattr("hslake.preflight.staging.disk_warning", space.disk_warning)
    for kind, result in (("ext4", WARN), ("tmpfs", PASS)):
        monkeypatch.setattr(space, "filesystem", lambda folder, kind=kind: kind)
        with FakeServer(lake, staging) as server:
            report = preflight(lake, [server.url], staging=[staging])
        found = by_name(report)["staging"]
        assert report.passed and found.result == result and str(staging) in found.found
        assert ("/dev/shm" in found.todo) == (result == WARN)


@pytest.fixture
def keyed() -> Iterator[str]:
    """A server that wants a key, as SGLang's with --api-key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 401)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_wants_a_key(lake: str, keyed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HSLAKE_API_KEY", raising=False)
    found = by_name(preflight(lake, [keyed]))["server"]
    assert found.result == FAIL and "HTTP 401" in found.found and "wants a key" in found.found
    assert found.todo.startswith("export HSLAKE_API_KEY=KEY")
    monkeypatch.setenv("HSLAKE_API_KEY", "wrong")
    assert "wants another key" in by_name(preflight(lake, [keyed]))["server"].found
    with pytest.raises(Missing, match="HSLAKE_API_KEY"):
        extract(lake, [keyed])


def test_remedies_are_those_of_the_reason(lake: str, staging: Path, tmp_path: Path) -> None:
    with FakeServer(lake, staging) as server:
        server.disarm("NoSpace: 1 byte left: lower the staging quota")
        found = by_name(preflight(lake, [server.url]))["hook"]
        assert "lower the staging quota" in found.found
        assert "do as the reason says" in found.todo and "hslake serve" not in found.todo
        server.status_lake_id = "1" * 32
        assert "this lake" in by_name(preflight(lake, [server.url]))["hook"].todo


def test_a_target_that_cannot_be_written(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrote(self: object) -> None:
        raise CheckFailed("the store overwrote an object")

    monkeypatch.setattr("hslake.store.Store.check_put_new", overwrote)
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url])
    assert [c.name for c in report.failures] == ["target"]


def test_nothing_to_check(lake: str, staging: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no server given"):
        preflight(lake, [])
    with pytest.raises(Missing, match="no lake at"):
        preflight(str(tmp_path / "nothing"), ["http://127.0.0.1:1"])
    with FakeServer(lake, staging) as server:
        report = preflight(lake, [server.url], staging=[tmp_path / "nowhere"])
        assert by_name(report)["staging"].result == FAIL
    empty = planned(tmp_path / "empty", [])
    (tmp_path / "staging2").mkdir()
    with FakeServer(empty, tmp_path / "staging2") as server:
        assert by_name(preflight(empty, [server.url]))["plan"].result == FAIL


def test_command(lake: str, staging: Path) -> None:
    runner = CliRunner()
    with FakeServer(lake, staging, max_parts=1) as server:
        call = ["preflight", lake, "--server", server.url, "--staging", str(staging)]
        good = runner.invoke(app, call)
        assert good.exit_code == 0 and "go: " in good.output and "WARN  " in good.output
        assert "in a single part" in good.output
        server.disarm("it broke")
        bad = runner.invoke(app, call)
        assert bad.exit_code == 1 and "no-go: 1 of" in bad.output and "it broke" in bad.output


def test_json_names_each_result(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging) as server:
        call = ["preflight", lake, "--server", server.url, "--burst", "0", "--json"]
        found = json.loads(CliRunner().invoke(app, call).stdout)
    assert {c["result"] for c in found["checks"]} == {"pass", "warn"} and found["passed"] is True
    assert not any("ok" in c for c in found["checks"])


def test_a_fingerprint_without_weights_says_so(tmp_path: Path, staging: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 8, "hidden_size": 8, "vocab_size": 100}))
    lake = hslake.create(tmp_path / "bare", streams=[2, "final"], model_config=config).url
    with FakeServer(lake, staging) as server:
        found = by_name(preflight(lake, [server.url]))["fingerprint"]
    assert found.result == WARN and "any weights for it would pass" in found.found
