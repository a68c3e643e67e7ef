"""Bad input of every kind: an error that names what and where, and a lake that is as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import hslake
from hslake.cli import app
from hslake.errors import Corrupt, InvalidInput, Missing
from tests.lakes import MadeLake, make_lake

Snapshot = dict[str, bytes]
Row = dict[str, Any]
GOOD: Row = {"sample_id": "good", "input_ids": [1, 2], "loss_mask": [0, 1], "source": "A1"}
SIZE = ("--hidden-size", 8, "--num-layers", 12)


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def snapshot(folder: str | Path) -> Snapshot:
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def refused(found: Result, *messages: str, code: int = 2) -> None:
    assert found.exit_code == code, (found.exit_code, found.output)
    assert found.stderr.startswith(("error: ", "Usage: "))
    assert "Traceback" not in found.output and "a bug in hslake" not in found.output
    for message in messages:
        assert message in found.stderr, found.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeLake:
    return make_lake(tmp_path_factory.mktemp("made"), lengths=[10, 300, 20])


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return hslake.create(tmp_path / "lake", hidden_size=8, num_layers=12, capture="eagle3").url


def write(path: Path, rows: list[Row]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    return path


# -- plan ---------------------------------------------------------------------------------------

# what is wrong, the column that the message names, a part of the message
PLAN_ROWS: list[tuple[Row, str, str]] = [
    ({"input_ids": [], "loss_mask": None}, "input_ids", "is empty"),
    ({"input_ids": None}, "input_ids", "missing"),
    ({"input_ids": [-1, 2]}, "input_ids", "token 0 is -1"),
    ({"input_ids": [1, 2**31]}, "input_ids", "token 1 is 2147483648"),
    ({"input_ids": [1, 100]}, "input_ids", "token 1 is 100, expected 0 to 99"),
    ({"input_ids": [1.0, 2.0]}, "input_ids", "item 0 is 1.0 (float)"),
    ({"input_ids": [True, False]}, "input_ids", "(bool)"),
    ({"input_ids": ["a", "b"]}, "input_ids", "(str)"),
    ({"input_ids": [1, None]}, "input_ids", "item 1 is None"),
    ({"input_ids": [[1], [2]]}, "input_ids", "(list)"),
    ({"input_ids": 5}, "input_ids", "expected a list"),
    ({"loss_mask": [1]}, "loss_mask", "1 values for 2 tokens"),
    ({"loss_mask": [1, 2]}, "loss_mask", "value 1 is 2"),
    ({"loss_mask": [0.0, 1.0]}, "loss_mask", "(float)"),
    ({"sample_id": "a/b"}, "sample_id", "contains '/'"),
    ({"sample_id": "it's"}, "sample_id", "quotes"),
    ({"sample_id": 'say "a"'}, "sample_id", "quotes"),
    ({"sample_id": "a\nb"}, "sample_id", "contains '\\n'"),
    ({"sample_id": "a\u2028b"}, "sample_id", "contains '\\u2028'"),
    ({"sample_id": "a\x85b"}, "sample_id", "contains '\\x85'"),
    ({"sample_id": "a\u202eb"}, "sample_id", "invisible"),
    ({"sample_id": "a\u200bb"}, "sample_id", "invisible"),
    ({"sample_id": ".."}, "sample_id", "'..'"),
    ({"sample_id": " a"}, "sample_id", "white space"),
    ({"sample_id": ""}, "sample_id", "non-empty"),
    ({"sample_id": "é" * 101}, "sample_id", "202 bytes"),
    ({"sample_id": "__hslake_probe__1"}, "sample_id", "reserved"),
    ({"source": None}, "source", "--source"),
    ({"source": "s" * 41}, "source", "41 bytes"),
    ({"split": "a/b"}, "split", "contains '/'"),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(("bad", "field", "message"), PLAN_ROWS)
def test_plan_rows(tmp_path: Path, kind: str, bad: Row, field: str, message: str) -> None:
    config = {"num_hidden_layers": 12, "hidden_size": 8, "vocab_size": 100, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lake = hslake.create(
        tmp_path / "lake", model_config=tmp_path / "config.json", capture="eagle3"
    ).url
    before = snapshot(lake)
    row = {**GOOD, "sample_id": "other", **bad}
    # A column has one type, so the good row before is of the bad one's.
    rows = [GOOD, row] if kind == "jsonl" else [row]
    file = write(tmp_path / f"rows.{kind}", rows)
    refused(call("plan", lake, file), f"{file}: row {len(rows)}: {field}: ", message)
    assert snapshot(lake) == before


def test_plan_duplicates(lake: str, tmp_path: Path) -> None:
    other = {**GOOD, "sample_id": "other"}
    one, two = write(tmp_path / "one.jsonl", [GOOD]), write(tmp_path / "two.arrow", [other, GOOD])
    before = snapshot(lake)
    refused(call("plan", lake, one, two), f"{two}: row 2: sample_id: 'good'", f"{one}: row 1")
    refused(call("plan", lake, two, two), f"{two}: row 1: sample_id: 'other'")
    assert snapshot(lake) == before
    assert call("plan", lake, one).exit_code == 0
    before = snapshot(lake)
    for changed, field in (
        ({"input_ids": [1, 3]}, "input_ids: 'good' has other tokens"),
        ({"loss_mask": [1, 1]}, "loss_mask: 'good' has another mask"),
        ({"source": "B3"}, "source: 'good' has 'B3', planned 'A1'"),
    ):
        rows = write(tmp_path / "changed.parquet", [other, {**GOOD, **changed}])
        refused(call("plan", lake, rows), f"{rows}: row 2: {field}")
    assert snapshot(lake) == before


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"input_ids": [1]', "row 1: not a line of JSON"),
        ("a.jsonl", b"[1]", "row 1: found [1], expected a JSON object"),
        ("a.jsonl", b"\xff\xfe", "row 1: not a line of JSON"),
        ("a.jsonl", b'{"sample_id": "\\ud800", "input_ids": [1], "source": "a"}', "Unicode"),
        ("a.parquet", b"", "not a readable parquet file"),
        ("a.parquet", b"PAR1 and no more", "not a readable parquet file"),
        ("a.arrow", b"ARROW1 and no more", "not a readable arrow file"),
        ("a.csv", b"1,2", "cannot tell its format"),
        ("none.jsonl", None, "there is no such file"),
    ],
)
def test_plan_files(lake: str, tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    before = snapshot(lake)
    refused(call("plan", lake, tmp_path / name), str(tmp_path / name), message)
    assert snapshot(lake) == before


def test_a_plan_of_nothing_says_so(lake: str, tmp_path: Path) -> None:
    found = call("plan", lake, write(tmp_path / "rows.jsonl", []))
    assert found.exit_code == 0 and "the files hold no rows" in found.stderr


# -- create -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ("13", "'13' is no stream; expected boundaries from 0 to 12"),
        ("-1", "'-1' is no stream"),
        ("middle", "'middle' is no stream"),
        ("eagle3,final", "'eagle3' is no stream"),
        ("9" * 5000, "9' is no stream"),
        ("1,,2", "'' is no stream"),
        ("", "'' is no stream"),
    ],
)
def test_capture_lists(tmp_path: Path, capture: str, message: str) -> None:
    refused(call("create", tmp_path / "x", *SIZE, "--capture", capture), "--capture", message)
    assert not (tmp_path / "x").exists()


def test_capture_out_of_order_is_sorted_and_shown(tmp_path: Path) -> None:
    found = call("create", tmp_path / "x", *SIZE, "--capture", "final,9,2")
    assert found.exit_code == 0 and "2, 9, final" in found.stdout


@pytest.mark.parametrize("draft", ["[]", "3", '{"eagle_config": [1]}', "{}", "{"])
def test_draft_configs(tmp_path: Path, draft: str) -> None:
    (tmp_path / "draft.json").write_text(draft)
    more = ("--capture-from", tmp_path / "draft.json", "--convention", "vllm")
    refused(call("create", tmp_path / "x", *SIZE, *more), str(tmp_path / "draft.json"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:/bucket/lake", "is this a URL? expected s3://"),
        ("S3:/bucket/lake", "is this a URL? expected s3://"),
        ("file:/data/lake", "is this a URL? expected file://"),
        ("s3://", "s3://: found '' for a bucket"),
        ("s3:///lake", "found '' for a bucket"),
        ("s3://two words/lake", "found 'two words' for a bucket"),
        ("/proc/lake", "/proc/lake: no file can be made there"),
    ],
)
def test_urls_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call("create", url, *SIZE, "--capture", "eagle3"), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", "endpoint: found '127.0.0.1:9000', expected an"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "endpoint: found 'localhost:9000'"),
        ("AWS_ENDPOINT_URL", "http://", "endpoint: found 'http://'"),
        ("AWS_ENDPOINT_URL", "http://h:99999", "endpoint: found 'http://h:99999'"),
        ("AWS_ENDPOINT_URL", "http://a b", "endpoint: found 'http://a b'"),
        ("AWS_ENDPOINT_URL", "http://us er:sekrit@h", "endpoint: found one with an '@'"),
        ("AWS_REGION", "eu\n", "region 'eu\\n', expected one such as us-east-1"),
        ("AWS_ACCESS_KEY_ID", "sekrit\nkey", "the key id holds white space"),
        ("AWS_SESSION_TOKEN", "sekrit\n", "the session token holds white space"),
    ],
)
def test_settings_of_s3_that_its_clients_panic_over(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(name, value)
    found = call("status", "s3://bucket/lake")
    refused(found, "s3://bucket/lake: the settings of AWS do not read", message)
    assert "sekrit" not in found.output


def test_a_panic_is_no_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rust's panics are no Exception; a real one, out of the client's own code."""
    from obstore.store import S3Store

    def panic(*_: object, **__: object) -> None:
        key = {"access_key_id": "a\nb", "secret_access_key": "c"}
        S3Store("bucket", config={**key, "endpoint": "http://127.0.0.1:9"}).list().collect()

    monkeypatch.setattr(hslake, "create", panic)
    found = call("create", tmp_path / "lake", *SIZE, "--capture", "eagle3")
    assert found.exit_code == 3, (found.exit_code, found.output)
    assert "a bug in hslake: PanicException" in found.stderr


def test_places_where_no_lake_can_be(lake: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "lake"):
        refused(call("create", place, *SIZE, "--capture", "2"), f"{tmp_path / 'file'} is a file")
    assert (tmp_path / "file").read_text() == "mine"
    refused(call("create", "/proc/lake", *SIZE, "--capture", "2"), "/proc/lake")
    before = snapshot(lake)
    refused(call("create", lake, *SIZE, "--capture", "2"), "there is a lake at")
    assert snapshot(lake) == before
    refused(
        call("create", tmp_path / "x", "--hidden-size", 10**30, "--num-layers", 2, "--capture", 1),
        "hidden_size",
    )
    assert not (tmp_path / "x").exists()


# -- damaged lakes ------------------------------------------------------------------------------


def spec_with(**change: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps(json.loads(text) | change).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: b"", "is not JSON"),
        (lambda text: text[:50], "is not JSON"),
        (lambda text: b"\xff", "is not JSON"),
        (lambda text: b"[]", "is not of type 'object'"),
        (lambda text: b"[" * 100_000, "is not JSON"),
        (lambda text: b'{"a":' * 100_000, "is not JSON"),
        (lambda text: text[:-2] + b', "codec": ' + b"9" * 5000 + b"}", "is not JSON"),
        (spec_with(format_version=2), "format version 2; this hslake reads up to 1: upgrade"),
        (spec_with(format_version="1"), "format_version: 1 was expected"),
        (spec_with(streams=["99"]), "'99' is no stream"),
        # Read in another order, every stream would be taken for another.
        (spec_with(streams=["final", "2"]), "streams: found ['final', '2']"),
        (spec_with(codec=None), "codec: None is not one of"),
        (spec_with(extra=1), "'extra' was unexpected"),
        (spec_with(dtype="float16"), "digest: found"),  # another model of as many bytes
        (spec_with(digest="0" * 64), "digest: found"),
        (spec_with(lake_id="0" * 32), "the file was changed"),
    ],
)
def test_damaged_specs(lake: str, damage: Callable[[bytes], bytes], message: str) -> None:
    path = Path(lake) / "hslake.json"
    path.write_bytes(damage(path.read_bytes()))
    before = snapshot(lake)
    for args in (("query", lake, "coverage"), ("verify", lake), ("pin", lake, "x")):
        refused(call(*args), str(path), message)
    with pytest.raises(InvalidInput):
        hslake.open(lake)
    assert snapshot(lake) == before


def test_a_spec_without_a_digest_opens(lake: str) -> None:
    path = Path(lake) / "hslake.json"
    document = json.loads(path.read_text())
    text = json.dumps({k: v for k, v in document.items() if k != "digest"}, sort_keys=True)
    assert document.pop("digest") and hslake.open(lake).spec.to_json() == path.read_text()
    path.write_text(text)
    assert hslake.open(lake).spec.codec == document["codec"]


def test_a_spec_that_cannot_be_read(lake: str) -> None:
    path = Path(lake) / "hslake.json"
    path.unlink()
    path.mkdir()
    refused(call("query", lake, "coverage"), f"error: {path}: Is a directory")


def test_damaged_pins(lake: str) -> None:
    path = Path(lake) / "pins" / "a.json"
    path.parent.mkdir()
    other = json.dumps({"name": "b", "version": 0, "pinned_at": "2026-01-02T03:04:05+00:00"})
    for text, message in (("{", "is not JSON"), ("{}", "'name' is a required"), (other, "'b'")):
        path.write_text(text)
        for args in (("pin", lake, "--list"), ("pin", lake, "a")):
            refused(call(*args), str(path), message, code=1)
        found = call("log", lake)  # which goes on without it, and says so
        assert found.exit_code == 0 and f"warning: {path}" in found.stderr
        for level in ("manifest", "full"):
            found = call("verify", lake, "--level", level, "--quarantine")
            refused(found, "1 findings, 0 samples", code=1)
            assert str(path) in found.stdout and message in found.stdout
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    assert call("pin", lake, "new").exit_code == 0


def test_damaged_table_files(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10, 300])
    file = next((Path(made.url) / "manifest").glob("*.parquet"))
    whole = file.read_bytes()
    reads = (("query", made.url, "coverage"), ("log", made.url), ("verify", made.url))
    for data in (b"", whole[: len(whole) // 2]):
        file.write_bytes(data)
        for args in reads:
            refused(call(*args), file.name, code=1)
    file.unlink()
    for args in reads:
        refused(call(*args), file.name, code=1)
    # A flipped bit in the data: DuckDB would read on, `verify` and every commit may not.
    at = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(0).column(1)
    data = bytearray(whole)
    data[at.data_page_offset + at.total_compressed_size // 2] ^= 16
    file.write_bytes(data)
    refused(call("verify", made.url), file.name, code=1)
    with pytest.raises(Corrupt, match="manifest"):
        made.lake.manifest_table().arrow()


def test_damage_that_costs_no_sample(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    next(Path(made.url).glob("segments/*/hidden_states/zarr.json")).write_text("{")
    found = call("verify", made.url)
    refused(found, "1 findings, 0 samples damaged", "every sample reads back", code=1)


# -- queries and versions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("gaps", "limit=-1", "limit: found '-1', expected a whole number of at least 0"),
        ("lengths", "width=0", "width: found '0', expected a whole number of at least 1"),
        ("lengths", "width=1.5", "width: found '1.5', expected a whole number"),
        ("epoch", "seed=-1", "seed: found '-1'"),
        ("epoch", f"seed={2**63}", "seed: found"),
        ("forecast", "ratio=-0.1", "ratio: found '-0.1', expected a number of at least 0"),
        ("forecast", "ratio=nan", "ratio: found 'nan'"),
        ("forecast", "ratio=inf", "ratio: found 'inf'"),
        ("select $a", "b=1", "parameters: a"),
    ],
)
def test_query_parameters(made: MadeLake, args: tuple[str, str, str]) -> None:
    refused(call("query", made.url, args[0], "-p", args[1]), args[2])


def test_unknown_versions(made: MadeLake) -> None:
    before = snapshot(made.url)
    for args in (("query", made.url, "coverage"), ("pin", made.url, "x")):
        refused(call(*args, "--version", 99), "version 99", "0 to 1")
        refused(call(*args, "--version", 10**30), f"version {10**30}")
        refused(call(*args, "--version", -1), "version")
    assert call("pin", made.url, "a", "--version", 1).exit_code == 0
    assert call("pin", made.url, "a", "--version", 1).exit_code == 0
    refused(call("pin", made.url, "a", "--version", 0), "'a' names version 1 already")
    refused(call("vacuum", made.url, "--retain", "9999999999d"), "--retain", "36500d")
    assert snapshot(made.url).items() - before.items() == {
        (p, b) for p, b in snapshot(made.url).items() if p.endswith("pins/a.json")
    }
    for version in (10**30, str(10**30)):  # no number that Delta could be asked for
        with pytest.raises(Missing, match=f"has no version {10**30}"):
            hslake.open(made.url, version)
    for version in (-1, "1.5 ", 1.0, True):
        with pytest.raises(InvalidInput, match="version: found"):
            hslake.open(made.url, version)  # type: ignore[arg-type]
    with pytest.raises(Missing, match="no version 99: it has 0 to 1"):
        hslake.open(made.url, 99)


def test_numbers_that_no_table_can_hold(made: MadeLake, tmp_path: Path) -> None:
    for option, value in (("--estimate-tokens", 10**30), ("--estimate-bytes", f"{10**20}TB")):
        found = call("create", tmp_path / "x", *SIZE, "--capture", "2", option, value)
        refused(found, "estimate/", "is greater than the maximum")
        assert not (tmp_path / "x").exists()
    found = call("verify", made.url, "--sample", 10**30)
    assert found.exit_code == 0 and "looked at    3 samples" in found.stdout


def test_where_and_output(made: MadeLake, tmp_path: Path) -> None:
    refused(call("verify", made.url, "--where", "nope = 1"), "--where 'nope = 1'", "nope")
    nothing = call("verify", made.url, "--where", "length > 100000")
    refused(nothing, "--where 'length > 100000' selects no sample")
    found = call("verify", made.url, "--where", "length = 10 -- short", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["samples"] == 1
    refused(call("query", made.url, "coverage", "--output", tmp_path), f"{tmp_path}: Is a direc")


# -- Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "selec 1",
        "select nope from samples",
        "select * from nowhere",
        "select $a",
        "delete from samples",
        "select * from read_csv('/etc/hostname')",
        "",
    ],
)
def test_sql(made: MadeLake, sql: str) -> None:
    with pytest.raises(InvalidInput, match="the query"):
        made.lake.sql(sql)


def test_reads(made: MadeLake) -> None:
    lake, (name, *_) = made.lake, made.samples
    with pytest.raises(Missing, match="no sample 'nope'"):
        lake.read("nope")
    with pytest.raises(InvalidInput, match="sample_id: found 3"):
        lake.read(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="stream 7 is not in the lake; it has 2, 4, 6, final"):
        lake.read(name, streams=[7])
    for rows in (3, (0, 3), "all"):
        with pytest.raises(InvalidInput, match=r"rows: found .* expected a slice"):
            lake.read(name, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="step of 1"):
        lake.read(name, rows=slice(0, 10, 2))
    for one in ("final", 2):
        sample = lake.read(name, streams=one)
        assert sample.streams == (str(one),) and sample.hidden_states.shape == (1, 10, 8)


LOADER: list[dict[str, Any]] = [
    {"tokens_per_batch": 0},
    {"tokens_per_batch": "many"},
    {"tokens_per_batch": 1.5},
    {"tokens_per_batch": 100},
    {"layout": "dense"},
    {"rank": 1},
    {"world_size": 0},
    {"seed": -1},
    {"seed": "x"},
    {"threads": 0},
    {"threads": 1.5},
    {"prefetch_bytes": -1},
    {"error_budget": -1},
    {"on_error": "ignore"},
    {"oversize": "cut"},
    {"pad_multiple": 0},
    {"pad_multiple": 3},
]


@pytest.mark.parametrize("settings", LOADER)
def test_loader_settings(made: MadeLake, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("hslake.torch")
    (name,) = settings
    with pytest.raises(InvalidInput, match=name):
        len(torch.HiddenStateLoader(torch.HiddenStateDataset(made.lake), **settings))


def test_datasets(made: MadeLake) -> None:
    torch = pytest.importorskip("hslake.torch")
    for settings, message in (
        ({"where": "nope = 1"}, r"where='nope = 1'.*nope"),
        ({"where": "length >"}, "syntax error"),
        ({"streams": ["7"]}, "streams"),
        ({"version": "newest"}, "version: found 'newest'"),
        ({"version": 1.0}, "version: found 1.0"),
        ({"version": True}, "version: found True"),
    ):
        with pytest.raises(InvalidInput, match=message):
            torch.HiddenStateDataset(made.lake, **settings)
    with pytest.raises(Missing, match="no version 99"):
        torch.HiddenStateDataset(made.lake, version=99)
    with pytest.raises(InvalidInput, match="expected a HiddenStateDataset"):
        torch.HiddenStateLoader(made.lake)
    loader = torch.HiddenStateLoader(torch.HiddenStateDataset(made.lake))
    for state in (None, [], {}, {**loader.state_dict(), "epoch": True}):
        with pytest.raises(InvalidInput, match="pass what state_dict"):
            loader.load_state_dict(state)


def test_two_values_after_one_option(tmp_path: Path) -> None:
    found = call("compact", tmp_path, "--staging", "A", "B")
    refused(found, "extra argument", "(B)", "--staging A --staging B")
    assert "repeat" not in call("log", tmp_path, "B").output
