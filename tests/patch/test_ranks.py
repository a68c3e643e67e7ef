"""Which rank a worker is, from what SGLang's versions offer. What a real 0.5.23 offers is tried in
tests/e2e/test_parallel.py."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hslake_sglang import ranks
from hslake_sglang.ranks import Rank


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of an SGLang that is not installed here."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = ModuleType(path)
        monkeypatch.setitem(sys.modules, path, module)
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(sys.modules[name]).update(content)


def newer(monkeypatch: pytest.MonkeyPatch, **context: Any) -> None:
    parallel = SimpleNamespace(**context)
    install(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: parallel)


def older(monkeypatch: pytest.MonkeyPatch, tp: int, dp: int) -> None:
    install(
        monkeypatch,
        "sglang.srt.layers.dp_attention",
        get_attention_tp_rank=lambda: tp,
        get_attention_dp_rank=lambda: dp,
    )


def runner(dp_rank: int | None = None, **settings: Any) -> Any:
    return SimpleNamespace(dp_rank=dp_rank, server_args=SimpleNamespace(**settings))


def test_the_context_of_newer_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    newer(monkeypatch, attn_tp_rank=1, attn_cp_rank=0, attn_dp_rank=3, dp_rank=None)
    found = ranks.of(runner(tp_size=8, dp_size=4))
    assert found == Rank(1, 0, 3, 8, 4) and not found.writes


def test_replicas_of_newer_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    newer(monkeypatch, attn_tp_rank=0, attn_cp_rank=0, attn_dp_rank=0, dp_rank=1)
    found = ranks.of(SimpleNamespace(server_args=SimpleNamespace(tp_size=1, dp_size=2)))
    assert found == Rank(0, 0, 1, 1, 2) and found.writes


@pytest.mark.parametrize(("attention_dp", "replica", "dp"), [(2, None, 2), (0, 1, 1), (0, None, 0)])
def test_older_versions(
    monkeypatch: pytest.MonkeyPatch, attention_dp: int, replica: int | None, dp: int
) -> None:
    older(monkeypatch, 0, attention_dp)
    found = ranks.of(runner(replica, tp_size=4, dp_size=4))
    assert found == Rank(0, 0, dp, 4, 4) and found.writes


def test_one_rank_of_an_attention_group_writes() -> None:
    group = [Rank(tp, cp, 0, 4, 1) for tp in range(2) for cp in range(2)]
    assert [rank.writes for rank in group] == [True, False, False, False]
