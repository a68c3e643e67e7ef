"""What is read from SGLang's source without importing it."""

from pathlib import Path

import pytest
from hslake_sglang import source

from tests.patch import fakesglang


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fakesglang.make(tmp_path)


def problem(root: Path, *named: str, foreign: bool = False) -> str | None:
    return source.capture_problem(root, named, "0.5.23", foreign=foreign)


def test_options_of_fields_and_of_argparse(root: Path) -> None:
    found = source.options(root)
    assert found["--model-path"] == found["--model"] == "model_path"
    assert found["--tensor-parallel-size"] == found["--tp-size"] == "tp_size"
    assert found["--pp-size"] == found["--pipeline-parallel-size"] == "pp_size"
    assert found["--stages"] == "pp_size"
    assert found["--disable-piecewise-cuda-graph"] == "disable_piecewise_cuda_graph"
    assert found["--config"] == "config"
    assert not {"--inner-state", "--untold"} & found.keys()


def test_options_of_argument_groups_are_found_too(root: Path) -> None:
    group = root / "srt/arg_groups/fields/lora.py"
    group.parent.mkdir(parents=True)
    group.write_text('class Lora:\n    uno_lora_path: A[str, "An adapter."] = None\n')
    assert source.options(root)["--uno-lora-path"] == "uno_lora_path"


def test_source_that_does_not_parse_tells_nothing(root: Path) -> None:
    (root / "srt/server_args.py").write_text("def (")
    assert source.options(root) == {}
    assert source.options(root / "nowhere") == {}


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "PictureForConditionalGeneration", "ChildForCausalLM"],
)
def test_models_that_capture(root: Path, architecture: str) -> None:
    assert source.Models(root).captures(architecture) is True
    assert problem(root, architecture) is None


@pytest.mark.parametrize(
    "architecture", ["PlainForCausalLM", "HalfForCausalLM", "DeafForConditionalGeneration"]
)
def test_models_that_cannot_are_named_with_the_version(root: Path, architecture: str) -> None:
    told = problem(root, architecture)
    assert told and architecture in told and "0.5.23" in told and "capture-hf" in told


def test_what_cannot_be_told_is_left_to_the_worker(root: Path, tmp_path: Path) -> None:
    assert source.Models(root).captures("AnyForConditionalGeneration") is None
    assert problem(root, "AnyForConditionalGeneration") is None
    assert problem(root) is None
    assert problem(tmp_path / "nowhere", "PlainForCausalLM") is None


def test_an_unknown_architecture(root: Path) -> None:
    told = problem(root, "NewForCausalLM")
    assert told and "NewForCausalLM" in told and "no model" in told
    assert problem(root, "NewForCausalLM", foreign=True) is None  # another package may have it
    assert problem(root, "NewForCausalLM", "LlamaForCausalLM") is None
    stand_in = root / "srt/models/transformers.py"
    llama = "self.layers_to_capture = self.capture_aux_hidden_states = 0"
    stand_in.write_text(stand_in.read_text().replace("pass", llama))
    assert problem(root, "NewForCausalLM") is None


def test_ways_to_change_the_weights_wherever_a_version_has_them(root: Path) -> None:
    assert source.weight_changes(root) == []  # nothing there: the plugin does not arm
    folder = root / "srt/model_executor"
    folder.mkdir()
    methods = ("load_model", "update_weights_from_disk", "load_lora_adapter", "unload_lora_adapter")
    methods += ("check_weights",)
    text = "class ModelRunner:\n" + "".join(f"    def {m}(self): ...\n" for m in methods)
    (folder / "model_runner.py").write_text(text + "def update_weights_elsewhere(): ...\n")
    runner = "sglang.srt.model_executor.model_runner.ModelRunner."
    names = ("update_weights_from_disk", "load_lora_adapter", "check_weights")
    old = [runner + name for name in names]
    assert source.weight_changes(root) == old
    part = folder / "model_runner_components/weight_updater.py"
    part.parent.mkdir()
    part.write_text("class WeightUpdater:\n    def update_weights_from_somewhere_new(self): ...\n")
    (new,) = set(source.weight_changes(root)) - set(old)
    assert new.endswith("weight_updater.WeightUpdater.update_weights_from_somewhere_new")
    part.write_text("def (")
    assert source.weight_changes(root) == old
