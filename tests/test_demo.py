"""The demo end to end through Hugging Face on a tiny model, and what it says when it cannot run."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import hslake
from examples import corpus
from hslake import demo, query
from hslake.errors import InvalidInput, Missing

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random eight-layer Llama with a byte tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    text = [document.completion[:1000] for document in corpus.prose_documents()]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        max_position_embeddings=4096,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_whole_pipeline(model_dir: Path, tmp_path: Path) -> None:
    shown = StringIO()
    report = demo.run_demo(
        tmp_path,
        engine="hf",
        model=model_dir,
        train_seconds=2,
        limit=8,
        console=Console(file=shown, width=80),
    )
    lake = hslake.open(report.lake)
    assert report.samples == lake.sql("select * from samples").to_arrow_table().num_rows >= 6
    assert {r["source"] for r in report.coverage[:-1]} == {"A1", "B3", "B4"}
    assert all(check.passed == check.total > 0 for check in report.checks)
    assert 0 < report.stored_bytes < report.raw_bytes
    assert report.updates > 0 and len(report.agreement_after) == 3
    assert Path(report.draft).is_file()
    text = shown.getvalue()
    assert report.lake in text and "Hugging Face" in text and "query" in text
    assert query.run(lake, "select distinct engine from samples").to_pylist() == [
        {"engine": "transformers"}
    ]


def test_a_second_run_leaves_the_first_alone(tmp_path: Path) -> None:
    first, second = demo._fresh_folder(tmp_path), demo._fresh_folder(tmp_path)
    assert (first.name, second.name) == ("run-001", "run-002")


def test_what_is_missing_is_named(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="vllm"):
        demo.run_demo(tmp_path, engine="vllm", model=model_dir)
    with pytest.raises(Missing, match="make demo"):
        demo.run_demo(tmp_path, engine="hf")
    with pytest.raises(Missing, match="--server-python"):
        demo.run_demo(tmp_path, model=model_dir, server_python=tmp_path / "python")
    assert list(tmp_path.iterdir()) == []


def test_without_the_examples_it_says_so(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hslake, "__file__", str(tmp_path / "site-packages/hslake/__init__.py"))
    with pytest.raises(Missing, match="checkout"):
        demo.run_demo(tmp_path, engine="hf", model=model_dir)
