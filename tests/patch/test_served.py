"""What a model's own files say of its quantisation and its context."""

import json
from pathlib import Path
from typing import Any

import pytest
from hslake_sglang.served import context_length, declared_quantisation


def write(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "files", "accepted", "refused"),
    [
        ({"quant_method": "fp8"}, {}, "fp8", "modelopt_fp4"),
        ({"quant_method": "gptq"}, {}, "gptq_marlin", "awq"),
        ({"quant_method": "compressed-tensors"}, {}, "compressed_tensors", "w8a8_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "modelopt_fp4", "modelopt_fp8"),
        ({"quant_algo": "FP8"}, {}, "modelopt_fp8", "fp8"),
        ({"bits": 8}, {}, "(unnamed)", "fp8"),
        (
            {},
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            "modelopt_fp4",
            "modelopt_fp8",
        ),
        ({}, {"quantize_config": {"bits": 4}}, "gptq", "fp8"),
        ({}, {"quantize_config": {"w_bit": 4}}, "awq", "fp8"),
        ({}, {"quantize_config": {"quant_method": "gptq"}}, "gptq", "awq"),
        ({}, {"quant_config": {"w_bit": 4}}, "awq", "gptq"),
        ({}, {"quantization_config": {"bits": 4}}, "auto-round", "fp8"),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptq", "auto-round"),
        ({}, {"quant_model_description": {}}, "modelslim", "fp8"),
    ],
)
def test_declared_quantisation(
    tmp_path: Path, config: dict, files: dict, accepted: str, refused: str
) -> None:
    given = {"quantization_config": config} if config else {}
    found = declared_quantisation(write(tmp_path, given, **files))
    assert found is not None and accepted in found and refused not in found


def test_no_quantisation_and_no_folder(tmp_path: Path) -> None:
    assert declared_quantisation(write(tmp_path, {"text_config": {}})) == frozenset()
    assert declared_quantisation(tmp_path / "nowhere") is None
    assert declared_quantisation(None) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "seq_length": 32}, 32),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 16}}, 16),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 16}}}, 16),
        ({"max_position_embeddings": 64, "text_config": {"hidden_size": 1}}, None),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2}}, None),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"factor": 2, "original_max_position_embeddings": 32},
            },
            64,
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8}},
            64,
        ),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"full": {"factor": 8}}}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"architectures": ["LlavaLlamaForCausalLM"], "max_position_embeddings": 64}, None),
        ({}, None),
    ],
)
def test_context_length(tmp_path: Path, config: dict, length: int | None) -> None:
    assert context_length(write(tmp_path, config)) == length
