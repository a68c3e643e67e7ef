"""Capture through Hugging Face: a tiny random Llama, against transformers' own hidden states."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import hslake
from hslake import query
from hslake.compact import compact
from hslake.errors import InvalidInput, Missing, NoSpace
from hslake.plan import plan_files
from hslake.staging import scan
from hslake.torch.capture_hf import CaptureReport, capture_hf

transformers = pytest.importorskip("transformers")
LAYERS, HIDDEN, VOCAB = 4, 32, 200
LENGTHS = {"A1-a": 5, "A1-b": 70, "B3-a": 1, "B3-b": 33}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_model(folder: Path, seed: int = 0) -> Path:
    """A random Llama whose norms are not ones, so that before and after the norm differ."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model")


def make_lake(folder: Path, model: Path, capture: str, dtype: str = "float32") -> str:
    """A lake with a plan of LENGTHS and a staging directory beside it."""
    url = str(folder / "lake")
    hslake.create(url, model_config=model / "config.json", capture=capture, dtype=dtype)
    rng = np.random.default_rng(3)
    with (folder / "plan.jsonl").open("w") as out:
        for name, length in LENGTHS.items():
            ids = rng.integers(0, VOCAB, length).tolist()
            out.write(json.dumps({"sample_id": name, "source": name[:2], "input_ids": ids}) + "\n")
    plan_files(url, [folder / "plan.jsonl"])
    (folder / "staging").mkdir()
    return url


def run(folder: Path, model: Path, **more: object) -> CaptureReport:
    return capture_hf(str(folder / "lake"), model, folder / "staging", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_boundary_equals_transformers_own(
    tmp_path: Path, model_dir: Path, dtype: str
) -> None:
    streams = [*(str(b) for b in range(LAYERS + 1)), "final"]
    url = make_lake(tmp_path, model_dir, ",".join(streams), dtype)
    report = run(tmp_path, model_dir)
    assert (report.planned, report.captured, report.tokens) == (4, 4, sum(LENGTHS.values()))
    compact(url, [tmp_path / "staging"])
    lake = hslake.open(url)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype])
    seen: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for name, length in LENGTHS.items():
        sample = lake.read(name)
        with torch.inference_mode():
            ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
            states = [s[0] for s in model(ids, output_hidden_states=True).hidden_states]
        # transformers' last entry is after the norm, so boundary num_layers is none of its list.
        expected = torch.stack([*states[:-1], seen.pop(), states[-1]])
        found = sample.hidden_states
        assert found.shape == (LAYERS + 2, length, HIDDEN)
        bits = expected.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
        assert np.array_equal(np.asarray(found).view(bits.dtype), bits)


def test_the_manifest_says_who_captured(tmp_path: Path, model_dir: Path) -> None:
    url = make_lake(tmp_path, model_dir, "1,2,final")
    run(tmp_path, model_dir)
    compact(url, [tmp_path / "staging"])
    rows = query.run(
        hslake.open(url), "select distinct engine, engine_version, hook_version from manifest"
    ).to_pylist()
    assert rows == [
        {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "hook_version": hslake.__version__,
        }
    ]


def test_only_what_lacks_is_captured(tmp_path: Path, model_dir: Path) -> None:
    url = make_lake(tmp_path, model_dir, "2,final")
    first = run(tmp_path, model_dir, limit=1)
    assert (first.captured, first.tokens) == (1, 70)  # the longest comes first
    second = run(tmp_path, model_dir, where="source = 'A1'")
    assert (second.planned, second.staged, second.captured, second.tokens) == (2, 1, 1, 5)
    compact(url, [tmp_path / "staging"])
    third = run(tmp_path, model_dir)
    assert (third.committed, third.staged, third.captured) == (2, 0, 2)
    compact(url, [tmp_path / "staging"])
    last = run(tmp_path, model_dir)
    assert (last.planned, last.committed, last.captured) == (4, 4, 0)
    assert scan(tmp_path / "staging") == []
    assert query.run(hslake.open(url), "select count(*) as n from samples").to_pylist() == [
        {"n": 4}
    ]


def test_another_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    url = str(tmp_path / "lake")
    hslake.create(url, model_config=model_dir / "config.json", capture="1,final", dtype="float32")
    (tmp_path / "staging").mkdir()
    other = make_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    with pytest.raises(InvalidInput, match="the model"):
        run(tmp_path, other)
    assert scan(tmp_path / "staging") == []


def test_a_model_that_cannot_be_told_from_another_is_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    make_lake(tmp_path, model_dir, "1,final")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((model_dir / "config.json").read_text())
    (other / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(InvalidInput, match="no safetensors files"):
        run(tmp_path, other)


def test_staging_in_the_lake_is_refused(tmp_path: Path, model_dir: Path) -> None:
    url = make_lake(tmp_path, model_dir, "1,final")
    with pytest.raises(InvalidInput, match="in each other"):
        capture_hf(url, model_dir, url)


def test_missing_folders_are_named(tmp_path: Path, model_dir: Path) -> None:
    url = make_lake(tmp_path, model_dir, "1,final")
    with pytest.raises(Missing, match="nowhere"):
        capture_hf(url, model_dir, tmp_path / "nowhere")
    with pytest.raises(Missing, match="no-model"):
        capture_hf(url, tmp_path / "no-model", tmp_path / "staging")


def test_samples_the_model_cannot_take_stop_before_any_work(
    tmp_path: Path, model_dir: Path
) -> None:
    url = make_lake(tmp_path, model_dir, "1,final")
    long = {"sample_id": "long", "source": "A1", "input_ids": [1] * 129}
    (tmp_path / "more.jsonl").write_text(json.dumps(long) + "\n")
    plan_files(url, [tmp_path / "more.jsonl"])
    with pytest.raises(InvalidInput, match="128 positions: long"):
        run(tmp_path, model_dir)
    assert scan(tmp_path / "staging") == []
    assert run(tmp_path, model_dir, where="length <= 128").captured == 4


def test_full_staging_is_an_error_that_keeps_what_was_captured(
    tmp_path: Path, model_dir: Path
) -> None:
    url = make_lake(tmp_path, model_dir, "1,final")
    with pytest.raises(NoSpace, match="compact"):
        run(tmp_path, model_dir, part_tokens=80, max_parts=1, wait_s=0.1)
    compact(url, [tmp_path / "staging"])
    rest = run(tmp_path, model_dir)
    assert rest.committed >= 1 and rest.committed + rest.captured == 4
    (tmp_path / "b").mkdir()
    make_lake(tmp_path / "b", model_dir, "1,final")
    with pytest.raises(InvalidInput, match="part_tokens is 69"):
        run(tmp_path / "b", model_dir, part_tokens=69)
