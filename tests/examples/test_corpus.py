"""The demo's corpus: real text, deterministic, with the lengths, masks and splits it promises."""

import json
from collections import Counter
from pathlib import Path

import pytest

from examples import corpus

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a few merges: about two characters a token, no model needed."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    text = [d.completion[:2000] for d in list(corpus.code_documents())[:60]]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def samples(model_dir: Path) -> list[corpus.Sample]:
    return corpus.build_corpus(model_dir)


def test_enough_samples_from_three_sources_in_bounds(samples: list[corpus.Sample]) -> None:
    assert len(samples) >= 96
    assert set(Counter(s.source for s in samples)) == {"A1", "B3", "B4"}
    lengths = [len(s.input_ids) for s in samples]
    assert min(lengths) >= corpus.MIN_TOKENS and max(lengths) <= corpus.MAX_TOKENS
    assert min(lengths) < 40 and sum(n > 1000 for n in lengths) >= 5
    assert 300 < sum(lengths) / len(lengths) < 600


def test_ids_are_unique_and_texts_too(samples: list[corpus.Sample]) -> None:
    assert len({s.sample_id for s in samples}) == len(samples)
    assert len({tuple(s.input_ids) for s in samples}) == len(samples)


def test_masks_supervise_the_completion_only(samples: list[corpus.Sample]) -> None:
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.input_ids)
        prompt = sample.loss_mask.index(1)
        assert prompt >= 1
        assert sample.loss_mask == [0] * prompt + [1] * (len(sample.input_ids) - prompt)
        assert sum(sample.loss_mask) >= 8
        if sample.source == "B4":
            assert prompt == 1


def test_about_a_tenth_of_each_source_is_held_out(samples: list[corpus.Sample]) -> None:
    for source in ("A1", "B3", "B4"):
        splits = Counter(s.split for s in samples if s.source == source)
        assert 0.05 < splits["validation"] / splits.total() < 0.15


def test_prompts_do_not_straddle_splits(samples: list[corpus.Sample]) -> None:
    by_prompt: dict[tuple[int, ...], set[str]] = {}
    for s in samples:
        if s.source != "B4":
            prompt = tuple(s.input_ids[: s.loss_mask.index(1)])
            by_prompt.setdefault(prompt, set()).add(s.split)
    assert all(len(splits) == 1 for splits in by_prompt.values())


def test_the_same_machine_gives_the_same_bytes(
    model_dir: Path, samples: list[corpus.Sample], tmp_path: Path
) -> None:
    corpus.write_jsonl(samples, tmp_path / "a.jsonl")
    corpus.write_jsonl(corpus.build_corpus(model_dir), tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    row = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert set(row) == {"sample_id", "source", "split", "input_ids", "loss_mask"}
