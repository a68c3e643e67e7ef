"""The hook's environment and the size of staging."""

from functools import partial
from pathlib import Path

import pytest
from hslake_sglang import plugin, settings

from hslake.errors import InvalidInput, Missing, NoSpace
from hslake.staging import space
from hslake.staging.memory import part_bytes
from tests.patch.toy import make_spec

SPEC = make_spec(("2", "final"))


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


def test_a_file_is_not_a_staging_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="is a file"):
        settings.check_staging(tmp_path / "file")


def test_default_size_leaves_half_of_the_space_and_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = part_bytes(SPEC, 10_000)
    size = partial(settings.staging_size, tmp_path, SPEC)

    def free(size: int, where: str = "the filesystem") -> None:
        monkeypatch.setattr(space, "free_bytes", lambda folder: (size, where))

    free(10**12)
    assert size() == (32_768, 4)
    assert size(longest=100_000) == (100_000, 4)
    million = part_bytes(SPEC, 10**6)
    free(2 * 4 * million)
    assert size(longest=10**6) == (10**6, 4)
    free(2 * 4 * million - 2)
    assert size(longest=10**6)[1] == 3  # half of it is less than four of them
    free(4 * one + space.RESERVE)
    assert size() == (10_000, 4)
    assert size(10_000) == (10_000, 4) == size(10_000, 4)
    with pytest.raises(NoSpace, match=r"4 parts of 10,001 tokens.*HSLAKE_PART_TOKENS"):
        size(10_001, 4)
    assert size(10_001) == (10_001, 3)  # nobody asked for four
    with pytest.raises(NoSpace):
        size(10_000, 4, writers=2)
    assert size(10_000, writers=2) == (10_000, 2)
    free(4 * one + space.RESERVE, "the memory cgroup")
    with pytest.raises(NoSpace, match="the memory cgroup has"):
        size(20_000, 4)
    for little in (60 << 20, space.RESERVE, 0):
        free(little)
        with pytest.raises(NoSpace, match="1 parts of 1,024 tokens"):
            size()
    free(4 * one + space.RESERVE)
    with pytest.raises(NoSpace, match="2,000,000 tokens"):
        size(longest=2_000_000)


def test_what_fits_can_really_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that serve does is the one by which parts are made."""
    left = [4 * part_bytes(SPEC, 10_000) + space.RESERVE]
    monkeypatch.setattr(space, "free_bytes", lambda folder: (left[0], "the filesystem"))
    tokens, parts = settings.staging_size(tmp_path, SPEC, 10_000)
    for _ in range(parts):
        space.check_room(tmp_path, part_bytes(SPEC, tokens))
        left[0] -= part_bytes(SPEC, tokens)
    with pytest.raises(NoSpace):
        space.check_room(tmp_path, part_bytes(SPEC, tokens))


def test_the_plugin_does_nothing_without_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.STAGING, raising=False)
    monkeypatch.delenv(settings.RUN, raising=False)
    plugin.register()  # would import SGLang, which is not installed here
    assert settings.RUN not in plugin.os.environ
