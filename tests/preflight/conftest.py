"""Staging of these tests lies wherever pytest puts it, which is a disk on most machines."""

import pytest


@pytest.fixture(autouse=True)
def in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hslake.preflight.staging.disk_warning", lambda folder: None)
