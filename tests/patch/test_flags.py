"""What serve adds to SGLang's arguments, and what it refuses."""

import enum
from collections.abc import Collection
from types import SimpleNamespace

import pytest
from hslake_sglang import flags, versions
from hslake_sglang.refusals import DECLARED, DECLARES, NO_WEIGHTS

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


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.5.11", "--disable-piecewise-cuda-graph"),
        ("0.5.13", "--disable-piecewise-cuda-graph"),
        ("0.5.14", "--cuda-graph-backend-prefill"),
        ("0.5.15.post1", "--cuda-graph-backend-prefill"),
    ],
)
def test_versions_get_the_graph_flag_that_they_know(version: str, flag: str) -> None:
    added = prepare(version=version)[len(MODEL) :]
    assert flag in added and len([a for a in added if "graph" in a]) == 1
    # What the version's own source says counts more than what is known of versions.
    only = {"--disable-prefill-cuda-graph": "disable_prefill_cuda_graph"}
    assert flags.prepare(MODEL, version=version, dtype="float32", known=only)[-1] == next(
        iter(only)
    )
    nothing = {"--model-path": "model_path"}
    told = flags.prepare(MODEL, version=version, dtype="float32", known=nothing)
    assert not [a for a in told if "graph" in a]


def test_abbreviations_are_what_argparse_takes_them_for() -> None:
    known = {"--pp-size": "pp_size", "--pp-more": "pp_more", "--enable-lora": "enable_lora"}
    spell = lambda *args: flags.spelled_out(args, known)  # noqa: E731
    assert spell("--enable-l", "--pp-s=2") == ["--enable-lora", "--pp-size=2"]
    assert spell("--pp", "2") == ["--pp", "2"]  # SGLang says that it is ambiguous
    assert spell("--pp-size", "-1", "--other") == ["--pp-size", "-1", "--other"]
    assert flags.spelled_out(["--", "-x"], {"--pp-size": "pp_size"}) == ["--", "-x"]
    with pytest.raises(InvalidInput, match="--pp-size"):
        flags.prepare([*MODEL, "--pp-s", "2"], version="0.5.23", dtype="float32", known=known)


def test_a_new_spelling_of_a_refused_setting_is_found_by_its_attribute() -> None:
    known = {"--stages": "pp_size"}
    with pytest.raises(InvalidInput, match="--pp-size: with pipeline"):
        flags.prepare([*MODEL, "--stages", "2"], version="0.5.23", dtype="float32", known=known)


def test_a_config_files_content_counts_as_arguments() -> None:
    config = {
        "model_path": "m",
        "enable-lora": False,
        "stop": [],
        "names": ["a", "b"],
        "cuda-graph-config": {"prefill": {"backend": "full"}},
        "enable_metrics": True,
    }
    assert flags.config_args(config) == [
        *("--model-path", "m", "--names", "a", "b"),
        *("--cuda-graph-config", '{"prefill": {"backend": "full"}}', "--enable-metrics"),
    ]

    def with_config(config: dict, *args: str) -> list[str]:
        return flags.prepare(args, version="0.5.23", dtype="bfloat16", config=config)

    with pytest.raises(InvalidInput, match="--cuda-graph-config prefill"):
        with_config(config)
    with pytest.raises(InvalidInput, match="--dtype float16"):
        with_config({"model": "m", "dtype": "float16"})
    # The command line wins over the file.
    fine = ("--dtype", "bfloat16")
    assert with_config({"model": "m", "dtype": "float16", "pp-size": 1}, *fine)[:2] == [*fine]
    with pytest.raises(InvalidInput, match="--model-path is missing"):
        with_config({}, "--config", "server.yaml")
    # A file that could not be read may name the model.
    flags.prepare(["--config", "server.yaml"], version="0.5.23", dtype="bfloat16", config=None)


@pytest.mark.parametrize(
    ("args", "tokens", "writers"),
    [
        ((), 8192, 1),
        (("--chunked-prefill-size", "512"), 512, 1),
        (("--dp-size", "4"), 8192, 4),  # replicas, each with the whole chunk
        (("--dp-size", "4", "--enable-dp-attention"), 2048, 4),
        (("--attn-dp-size", "2", "--chunked-prefill-size=100"), 50, 2),
        (("--dp-size", "many"), 8192, 1),
    ],
)
def test_tokens_of_a_forward_and_writers(args: tuple, tokens: int, writers: int) -> None:
    assert (flags.chunk_tokens(args), flags.writers(args)) == (tokens, writers)


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
        (["--enable-nsa-prefill-context-parallel"], "context"),
        (["--return-hidden-states-mode", "last"], "final"),
        (["--enforce-piecewise-cuda-graph"], "request ids"),
        (["--uno-lora-path", "somewhere"], "adapter"),
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
        (["--load-format", "dummy"], "use auto"),
        (["--load-format=bitsandbytes"], "use auto"),
        (["--json-model-override-args", '{"rope_theta": 500}'], "config.json"),
        (["--quantization", "fp8"], "another model"),
        (["--torchao-config", "int8wo"], "another model"),
        (["--modelopt-quant", "fp8"], "another model"),
        (["--weight-cache-mode", "client"], "use off"),
        (["--kt-weight-path", "experts"], "weights are not those"),
        (["--checkpoint-engine-wait-weights-before-ready"], "weights are not those"),
        (["--enable-memory-saver"], "weights may leave"),
        (["--decrypted-config-file", "c.json"], "config.json"),
        (["--model-config-parser", "mine"], "config.json"),
        (["--forward-hooks", "[{}]"], "may change the states"),
        (["--kv-cache-dtype", "fp8_e4m3"], "use auto"),
        (["--kv-cache-dtype", "float32"], "use auto"),
    ],
)
def test_refuses_with_the_option_and_the_fix(args: list[str], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare(*args)
    assert named in str(caught.value)
    assert args[0].partition("=")[0][2:5] in str(caught.value)


def test_harmless_values_pass() -> None:
    prepare("--pp-size", "1", "--disaggregation-mode", "prefill", "--tp-size", "8")
    prepare("--enable-lora", "false", "--decoupled-spec-role", "null", "--enable-http2")
    prepare("--load-format", "runai_streamer", "--weight-cache-mode", "off", "--revision", "main")
    prepare(
        "--json-model-override-args", "{}", "--kv-cache-dtype", "bf16", "--quantization", "none"
    )


def test_facts_about_lake_and_model_make_some_settings_harmless() -> None:
    def refused(facts: set[str], *args: str) -> bool:
        try:
            flags.prepare([*MODEL, *args], version="0.5.23", dtype="bfloat16", facts=facts)
        except InvalidInput:
            return True
        return False

    dummy, fp8 = ("--load-format", "dummy"), ("--quantization", "fp8")
    assert refused({DECLARED}, *dummy) and not refused({NO_WEIGHTS}, *dummy)
    assert refused({NO_WEIGHTS}, *fp8) and not refused({DECLARED}, *fp8)
    for online in ("quark_mxfp4", "nvfp4_online", "minimax_m3_nvfp4"):
        assert refused({NO_WEIGHTS, DECLARED}, "--quantization", online)
    known = {DECLARED, DECLARES + "fp8"}
    assert not refused(known, "--quantization", "FP8") and not refused(known)
    assert refused(known, "--quantization", "modelopt_fp4")


def test_experts_are_those_that_the_router_chose() -> None:
    prepare("--ep-dispatch-algorithm", "static")
    with pytest.raises(InvalidInput, match=r"--ep-dispatch-algorithm: .*at random"):
        prepare("--ep-dispatch-algorithm", "fake")


def test_http2_had_processes_of_its_own_in_old_versions() -> None:
    with pytest.raises(InvalidInput, match="--enable-http2"):
        prepare("--enable-http2", version="0.5.13")


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


class LoadFormat(enum.Enum):
    AUTO, DUMMY = "auto", "dummy"


def test_the_model_of_a_running_server_is_its_folders() -> None:
    """Also where SGLang's source or a --config file has decided it."""

    def found(facts: Collection[str] = (), **settings: object) -> str:
        return " ".join(flags.check_running(SimpleNamespace(**settings), "0.5.23", facts))

    usual = {"quantization": None, "json_model_override_args": "{}", "forward_hooks": None}
    usual |= {"torchao_config": "", "weight_cache_mode": "off", "enable_memory_saver": False}
    usual |= {"model_config_parser": "auto", "modelopt_quant": None, "kv_cache_dtype": "fp8_e4m3"}
    assert found(load_format=LoadFormat.AUTO, **usual) == found(load_format="auto", **usual) == ""
    assert "--load-format" in found(load_format=LoadFormat.DUMMY)
    assert found([NO_WEIGHTS], load_format="dummy") == ""
    assert "--quantization" in found(quantization="fp8")
    assert found([DECLARED], quantization="fp8") == ""
    assert found([DECLARED, DECLARES + "fp8"], quantization="fp8") == ""
    told = found([DECLARED, DECLARES + "fp8"], quantization="modelopt_fp4")
    assert "not what the model's own files declare" in told and "(fp8)" in told
    assert "--json-model" in found(json_model_override_args='{"rms_norm_eps": 0.01}')


def test_prefill_graphs_of_a_running_server() -> None:
    def found(version: str, **settings: object) -> str:
        return " ".join(flags.check_running(SimpleNamespace(**settings), version))

    def config(backend: str) -> SimpleNamespace:
        return SimpleNamespace(prefill=SimpleNamespace(backend=backend))

    fix = "--cuda-graph-backend-prefill disabled is missing"
    assert fix in found("0.5.23", device="cuda", cuda_graph_config=config("breakable"))
    assert found("0.5.23", device="cuda", cuda_graph_config=config("disabled")) == ""
    assert found("0.5.23", device="cpu", cuda_graph_config=config("breakable")) == ""
    old = "--disable-piecewise-cuda-graph is missing"
    assert old in found("0.5.12", device="cuda", disable_piecewise_cuda_graph=False)
    assert found("0.5.12", device="cuda", disable_piecewise_cuda_graph=True) == ""
