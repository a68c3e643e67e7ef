"""No message and no report shows a password or a key."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hslake
from hslake.cli import app
from hslake.errors import InvalidInput, Missing, Unavailable, has_password, without_secrets
from hslake.plan.rows import read_rows
from hslake.store import open_store

KEYED = (
    "s3://AKIAX:abc/def+ghi@bucket/lake",
    "s3://AKIAX:123/def+ghi@bucket/lake",
    "s3://AKIAX:abcdef@bucket/x@y",
    "simplecache::s3://AKIAX:abc/def@bucket/lake",
    "http://u:abc@host:80/x",
    "http://u:abc/def@host:80/x",
)
RUN = "from hslake.cli import app; app()"
CLEAN = (
    "s3://bucket/lake",
    "s3://bucket/lake@v1",
    "s3://bucket/a:b@c",
    "http://host:8080/x@y",
    "https://host/a:b@c",
    "/local/a:b@c",
)


@pytest.mark.parametrize("url", KEYED)
def test_keys_in_urls(url: str) -> None:
    for text in (url, f"s3://bucket/a,{url}", f"'{url}'"):
        shown = without_secrets(text)
        assert not any(s in shown for s in ("AKIA", "abc", "def", "123")) and "***@" in shown
    assert has_password(url)
    with pytest.raises(InvalidInput, match="holds a password") as e:
        open_store(url)
    assert "abc" not in str(e.value)
    with pytest.raises(InvalidInput, match="holds a password") as e:
        list(read_rows(f"{url}.jsonl"))
    assert "abc" not in str(e.value)


@pytest.mark.parametrize("url", CLEAN)
def test_an_at_in_a_path_is_no_key(url: str) -> None:
    assert not has_password(url) and without_secrets(url) == url
    assert without_secrets("s3://token@bucket/x") == "s3://***@bucket/x"


def test_plan_files_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/x\.jsonl: cannot be reached"):
        list(read_rows("http://127.0.0.1:9/x.jsonl"))
    with pytest.raises(Missing, match="no such file"):
        list(read_rows(f"file://{tmp_path}/x.jsonl"))


def test_a_plan_file_without_credentials(tmp_path: Path) -> None:
    hslake.create(tmp_path / "lake", hidden_size=8, num_layers=4, capture="1")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    nothing = {
        k: str(tmp_path / "none") for k in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    }
    more = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", RUN, "plan", str(tmp_path / "lake"), "s3://b/x.jsonl"]
    found = subprocess.run(
        [*command, "--source", "A1"],
        env={**clean, **nothing, **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2, found.stderr
    assert "s3://b/x.jsonl: the store cannot be reached or refuses (NoCredentials" in found.stderr


@pytest.mark.parametrize("command", ["status", "preflight"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_passwords_of_servers(tmp_path: Path, command: str, more: tuple[str, ...]) -> None:
    lake = hslake.create(tmp_path / "lake", hidden_size=8, num_layers=4, capture="1").url
    found = CliRunner().invoke(
        app, [command, lake, "--server", "http://u:hunter2@127.0.0.1:9", *more]
    )
    assert "hunter2" not in found.output and "***@127.0.0.1:9" in found.output
