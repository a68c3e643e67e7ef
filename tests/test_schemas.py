"""Every format is written down in schemas/, is a valid schema, and is what the code goes by."""

from pathlib import Path

import jsonschema
import pytest

from hslake import schemas
from hslake.errors import InvalidInput
from hslake.pins import pin
from hslake.server import ServerDown, parse_status
from hslake.staging import read_status
from hslake.verify import verify
from hslake.versions import log
from tests.lakes import make_lake

NAMES = {p.stem for p in schemas.data_dir("schemas").glob("*.json")}
TABLES = {name for name in NAMES if "fields" in schemas.load(name)}
VECTORS = "checksum_vectors"  # data for other implementations; tests/test_checksum.py reads it


@pytest.mark.parametrize("name", sorted(NAMES - {VECTORS}))
def test_schemas_are_schemas(name: str) -> None:
    found = schemas.load(name)
    if name not in TABLES:
        jsonschema.Draft202012Validator.check_schema(found)
        assert found["title"]
        return
    assert found["name"] == name and found["version"] == 1
    assert all(f["doc"] for f in found["fields"])
    assert schemas.arrow_schema(name).names == [f["name"] for f in found["fields"]]


def test_every_schema_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("hslake.torch")
    used: set[str] = set()
    load = schemas.load

    def recording(name: str) -> dict:
        used.add(name)
        return load(name)

    monkeypatch.setattr(schemas, "load", recording)
    schemas.arrow_schema.cache_clear()
    made = make_lake(tmp_path, lengths=[10, 20])
    pin(made.url, "a")
    log(made.url)
    made.stage(made.plan([30]))
    parse_status(read_status(made.staging), "here")
    assert verify(made.url).ok
    loader = torch.HiddenStateLoader(torch.HiddenStateDataset(made.lake))
    loader.load_state_dict(loader.state_dict())
    assert NAMES - used == {VECTORS}


def test_status_says_what_its_schema_says(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    made.stage(made.plan([30, 40]))
    document = read_status(made.staging)
    schema = schemas.load("status")
    optional = {"compactor", "roots", "others", "others_more"}  # of some who answer
    assert document.keys() == schema["properties"].keys() - optional
    (writer,) = document["writers"]
    more = schema["$defs"]["shown"]["properties"]
    assert writer.keys() == schema["$defs"]["writer"]["properties"].keys() | more.keys()
    events = [f["name"] for f in schemas.load("events")["fields"]]
    assert list(writer["events"][0]) == events == list(more["events"]["items"]["properties"])
    for wrong, field in (
        ({**document, "armed": "yes"}, "armed"),
        ({**document, "writers": [{**writer, "free_rows": -1}]}, "writers/0/free_rows"),
        ({**document, "writers": [{**writer, "events": [{"seq": 1}]}]}, "writers/0/events/0"),
        ([], "the top level"),
        ({"format": 1}, "is a required property"),
    ):
        with pytest.raises(ServerDown, match=rf"http://x: .*{field}"):
            parse_status(wrong, "http://x")
    with pytest.raises(ServerDown, match="status format 2"):
        parse_status({**document, "format": 2}, "http://x")


def test_an_error_names_the_field() -> None:
    with pytest.raises(InvalidInput, match=r"pin\.json: version: -1 is less than"):
        schemas.validate({"name": "a", "version": -1, "pinned_at": ""}, "pin", "pins/pin.json")
    with pytest.raises(InvalidInput, match="here is not JSON"):
        schemas.parse_json("{", "here")
