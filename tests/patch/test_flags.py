"""What serve adds to SGLang's arguments, and what it refuses."""

from types import SimpleNamespace

import pytest
from hslake_sglang import flags, versions

from hslake.errors import InvalidInput

MODEL = ["--model-path", "m"]


def prepare(*more: str, version: str = "0.5.23", dtype: str = "bfloat16") -> list[str]:
    return flags.prepare([*MODEL, *more], version=version, dtype=dtype)


def test_adds_what_extraction_needs() -> None:
    assert prepare() == [
        *MODEL,
        *("--dtype", "bfloat16"),
        *("--chunked-prefill-size", "8192"),
        "--disable-radix-cache",
        *("--cuda-graph-backend-prefill", "disabled"),
    ]


def test_keeps_what_is_already_right() -> None:
    given = [
        *("--dtype=float", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
        *("--chunked-prefill-size", "32"),
    ]
    assert prepare(*given, dtype="float32") == [*MODEL, *given]
    assert prepare("--dtype", "auto")[-1] != "auto"  # the last one counts
    assert flags.option_value(prepare("--dtype", "auto"), ["--dtype"]) == "bfloat16"


def test_old_versions_get_their_own_graph_flag() -> None:
    assert "--disable-piecewise-cuda-graph" in prepare(version="0.5.12")
    assert "--cuda-graph-backend-prefill" in prepare(version="0.5.15.post1")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--pp-size", "2"], "pipeline"),
        (["--pipeline-parallel-size=4"], "pipeline"),
        (["--enable-two-batch-overlap"], "two-batch"),
        (["--speculative-algorithm", "EAGLE3"], "speculative"),
        (["--enable-layernorm-sp"], "layernorm"),
        (["--attn-cp-size", "2"], "context"),
        (["--enable-prefill-cp"], "context"),
        (["--enable-lora"], "adapter"),
        (["--lora-paths", "a=b"], "adapter"),
        (["--enable-return-hidden-states"], "final"),
        (["--disaggregation-mode", "decode"], "prefill side"),
        (["--enable-hicache"], "cache"),
        (["--tokenizer-worker-num", "2"], "use 1"),
        (["--cuda-graph-backend-prefill", "full"], "disabled"),
        (["--cuda-graph-config", '{"prefill": {"backend": "full"}}'], "disabled"),
        (["--cuda-graph-config", "{"], "JSON"),
        (["--chunked-prefill-size", "-1"], "positive"),
        (["--dtype", "float16"], "bfloat16"),
    ],
)
def test_refuses_with_the_option_and_the_fix(args: list[str], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare(*args)
    assert named in str(caught.value)
    assert args[0].partition("=")[0][2:5] in str(caught.value)


def test_harmless_values_pass() -> None:
    prepare("--pp-size", "1", "--disaggregation-mode", "prefill", "--tp-size", "8")


def test_all_problems_in_one_message() -> None:
    with pytest.raises(InvalidInput) as caught:
        flags.prepare(["--pp-size", "2", "--enable-lora"], version="0.5.23", dtype="bfloat16")
    assert all(x in str(caught.value) for x in ("--pp-size", "--enable-lora", "--model-path"))


@pytest.mark.parametrize("version", ["0.5.10", "0.4.9.post2", "0.6.0", "1.0", "nightly", ""])
def test_unsupported_versions_are_refused(version: str) -> None:
    with pytest.raises(InvalidInput, match="SGLang"):
        prepare(version=version)


@pytest.mark.parametrize("version", [*versions.TRIED, "0.5.11", "0.5.12.post1"])
def test_supported_versions(version: str) -> None:
    prepare(version=version)


def test_running_settings_are_checked_too() -> None:
    fine = SimpleNamespace(pp_size=1, disable_radix_cache=True, speculative_algorithm=None)
    assert flags.check_running(fine, "0.5.23") == []
    bad = SimpleNamespace(pp_size=2, disable_radix_cache=False, enable_lora=True)
    found = " ".join(flags.check_running(bad, "0.5.10"))
    assert all(x in found for x in ("--pp-size", "radix", "--enable-lora", "0.5.10"))
