"""The check of attach points notices what is missing; tests/e2e runs it on a real SGLang."""

from pathlib import Path

import pytest

from tests.patch import attach_points, fakesglang


def test_an_sglang_that_lacks_things_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakesglang.make(tmp_path)
    assert attach_points.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "== SGLang 0.5.23" in told and "ok   capture of LlamaForCausalLM" not in told
    for what in ("HookRegistry.register", "LogitsProcessor.forward", "ranks", "fields of Forward"):
        assert f"FAIL {what}" in told
    assert "ok   option --cuda-graph-backend-prefill" in told


def test_nothing_to_look_at_is_not_fine() -> None:
    assert attach_points.main([]) == 1
