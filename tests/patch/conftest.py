"""What tests of `serve` have in common."""

from pathlib import Path

import pytest

from tests.patch import fakesglang


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """What stands in for SGLang: real files that a real interpreter finds."""
    return fakesglang.make(tmp_path / "site")
