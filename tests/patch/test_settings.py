"""The hook's environment and the size of staging."""

from collections import namedtuple
from pathlib import Path

import pytest
from hslake_sglang import plugin, settings

from hslake.errors import InvalidInput, Missing, NoSpace
from tests.patch.toy import make_spec

SPEC = make_spec(("2", "final"))
Usage = namedtuple("Usage", "total used free")


def env(staging: Path, **more: str) -> dict[str, str]:
    return {settings.STAGING: str(staging), settings.SPEC: settings.spec_env(SPEC), **more}


def test_round_trip_through_the_environment(tmp_path: Path) -> None:
    found = settings.load(env(tmp_path, HSLAKE_PART_TOKENS="128", HSLAKE_MAX_PARTS="2"))
    assert (found.spec, found.part_tokens, found.max_parts) == (SPEC, 128, 2)
    assert "\n" not in settings.spec_env(SPEC)


def test_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="nowhere"):
        settings.load(env(tmp_path / "nowhere"))
    with pytest.raises(InvalidInput, match="HSLAKE_LAKE"):
        settings.load({settings.STAGING: str(tmp_path)})
    for wrong in ("many", "0", "-1", "²", "9" * 5000):
        with pytest.raises(InvalidInput, match="HSLAKE_PART_TOKENS"):
            settings.load(env(tmp_path, HSLAKE_PART_TOKENS=wrong))


def test_default_size_leaves_half_of_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = SPEC.bytes_per_token + 4

    def free(rows: int) -> None:
        usage = Usage(0, 0, rows * row)
        monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: usage)

    free(10**9)
    assert settings.staging_size(tmp_path, SPEC) == (32_768, 4)
    free(80_000)
    assert settings.staging_size(tmp_path, SPEC) == (10_000, 4)
    assert settings.staging_size(tmp_path, SPEC, writers=2) == (5_000, 4)
    assert settings.staging_size(tmp_path, SPEC, 20_000, 4) == (20_000, 4)
    with pytest.raises(NoSpace, match="HSLAKE_PART_TOKENS"):
        settings.staging_size(tmp_path, SPEC, 20_001, 4)
    free(8_000)
    with pytest.raises(NoSpace):
        settings.staging_size(tmp_path, SPEC)


def test_the_plugin_does_nothing_without_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.STAGING, raising=False)
    monkeypatch.delenv(settings.RUN, raising=False)
    plugin.register()  # would import SGLang, which is not installed here
    assert settings.RUN not in plugin.os.environ
