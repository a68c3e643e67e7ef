"""The LM head out of model folders of all kinds, against a plain softmax."""

import json
from pathlib import Path

import numpy as np
import pytest

from hslake import lmhead
from hslake.errors import Corrupt, HslakeError, Missing
from hslake.lmhead import Unsupported, find_head, next_log_probs, tolerance
from tests.models import bf16, log_probs, to_bits, write_model, write_safetensors

VOCAB, HIDDEN, ROWS = 300, 16, 12


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture
def rows(rng: np.random.Generator) -> np.ndarray:
    return bf16(rng, ROWS, HIDDEN)


@pytest.fixture
def targets(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, VOCAB, ROWS)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("lm_head.weight", False),
        ("language_model.lm_head.weight", None),
        ("model.embed_tokens.weight", True),
        ("language_model.model.embed_tokens.weight", None),
    ],
)
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_every_kind_of_head(
    tmp_path: Path,
    rng: np.random.Generator,
    rows: np.ndarray,
    targets: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tied: bool | None,
    stored: str,
) -> None:
    monkeypatch.setattr(lmhead, "_BLOCK_BYTES", 37 * HIDDEN * 8)  # an odd last block
    weight = bf16(rng, VOCAB, HIDDEN).astype("<f2").astype("<f4")  # exact in all three
    weight = (weight.view("<u4") & 0xFFFF0000).view("<f4")
    as_stored = {"bfloat16": to_bits, "float16": lambda w: w.astype("<f2"), "float32": np.array}
    config = {} if tied is None else {"tie_word_embeddings": tied}
    other = {"model.norm.weight": np.ones(HIDDEN, "<f4")}
    folder = write_model(tmp_path, {**other, name: as_stored[stored](weight)}, **config)
    done: list[float] = []
    found = next_log_probs(find_head(folder), rows, targets, "float32", done.append)
    logits = rows.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(found.values, log_probs(logits, targets), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.peaks, np.abs(logits).max(1))
    assert len(done) == -(-VOCAB // 37) and done[-1] == 1.0


def test_tied_or_not_decides_which_tensor(tmp_path: Path, rng: np.random.Generator) -> None:
    both = {
        "model.embed_tokens.weight": bf16(rng, VOCAB, HIDDEN),
        "lm_head.weight": bf16(rng, VOCAB, HIDDEN),
    }
    for tied, name in ((True, "model.embed_tokens.weight"), (False, "lm_head.weight")):
        folder = write_model(tmp_path, both, text_config={"tie_word_embeddings": tied})
        assert find_head(folder).weight.name == name
    del both["lm_head.weight"]
    with pytest.raises(Unsupported, match="no LM head was found"):
        find_head(write_model(tmp_path, both, tie_word_embeddings=False))


def test_scale_cap_bias_and_padding(
    tmp_path: Path, rng: np.random.Generator, rows: np.ndarray, targets: np.ndarray
) -> None:
    weight, bias = bf16(rng, VOCAB + 20, HIDDEN), bf16(rng, VOCAB + 20)
    folder = write_model(
        tmp_path,
        {"lm_head.weight": weight, "lm_head.bias": bias},
        vocab_size=VOCAB,
        logits_scaling=4.0,
        logit_scale=0.5,
        final_logit_softcapping=2.0,
    )
    found = next_log_probs(find_head(folder), rows, targets, "float32")
    logits = (rows.astype(np.float64) @ weight[:VOCAB].T.astype(np.float64) + bias[:VOCAB]) / 8
    capped = 2 * np.tanh(logits / 2)
    np.testing.assert_allclose(found.values, log_probs(capped, targets), rtol=0, atol=1e-6)


def test_the_server_holds_the_head_in_its_own_dtype(
    tmp_path: Path, rng: np.random.Generator, rows: np.ndarray, targets: np.ndarray
) -> None:
    weight = rng.normal(size=(VOCAB, HIDDEN)).astype("<f4")
    head = find_head(write_model(tmp_path, {"lm_head.weight": weight}))
    for dtype, cast in (("bfloat16", _round_bf16), ("float16", lambda w: w.astype("<f2"))):
        logits = rows.astype(np.float64) @ cast(weight).astype(np.float64).T
        found = next_log_probs(head, rows, targets, dtype)
        np.testing.assert_allclose(found.values, log_probs(logits, targets), rtol=0, atol=1e-5)


def _round_bf16(values: np.ndarray) -> np.ndarray:
    """To the nearest of the two neighbours."""
    low = (values.view("<u4") & 0xFFFF0000).view("<f4")
    high = ((values.view("<u4") & 0xFFFF0000) + 0x10000).astype("<u4").view("<f4")
    return np.where(np.abs(values - low) < np.abs(high - values), low, high)


def test_sharded_and_only_the_heads_shard_needed(
    tmp_path: Path, rng: np.random.Generator, rows: np.ndarray, targets: np.ndarray
) -> None:
    (tmp_path / "config.json").write_text("{}")
    weight = bf16(rng, VOCAB, HIDDEN)
    write_safetensors(tmp_path / "b.safetensors", {"lm_head.weight": to_bits(weight)})
    index = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    text = json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    found = next_log_probs(find_head(tmp_path), rows, targets, "bfloat16")
    logits = rows.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(found.values, log_probs(logits, targets), rtol=0, atol=1e-5)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(Missing, match="finish the download"):
        find_head(tmp_path)


I8 = np.ones((VOCAB, HIDDEN), "i1")
F4 = np.ones((VOCAB, HIDDEN), "<f4")


@pytest.mark.parametrize(
    ("tensors", "config", "text"),
    [
        ({"lm_head.weight": I8}, {}, "stored as I8"),
        ({"lm_head.weight": F4, "lm_head.weight_scale": F4}, {}, "is quantised"),
        ({"lm_head.weight_packed": F4, "model.embed_tokens.weight": F4}, {}, "is quantised"),
        ({"my_own_head": F4}, {}, "no LM head was found"),
        ({"lm_head.weight": F4}, {"output_multiplier_scale": 0.1}, "not understood"),
        ({"lm_head.weight": F4[0]}, {}, "has shape"),
    ],
)
def test_what_cannot_be_judged_says_so(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, float], text: str
) -> None:
    with pytest.raises(Unsupported, match=text):
        find_head(write_model(tmp_path, tensors, **config))


def test_broken_folders(
    tmp_path: Path, rows: np.ndarray, targets: np.ndarray, rng: np.random.Generator
) -> None:
    with pytest.raises(Missing, match=r"config\.json"):
        find_head(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Missing, match="no safetensors"):
        find_head(tmp_path)
    head = find_head(write_model(tmp_path, {"lm_head.weight": F4}))
    with pytest.raises(Unsupported, match="another model's"):
        next_log_probs(head, rows[:, 1:], targets, "float32")
    with pytest.raises(Unsupported, match="outside the head's vocabulary"):
        next_log_probs(head, rows, targets + VOCAB, "float32")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Corrupt, match="cut off"):
        next_log_probs(head, rows, targets, "float32")
    file.write_bytes(b"x")
    with pytest.raises(HslakeError):
        find_head(tmp_path)


def test_the_tolerance_covers_rounded_logits_and_little_more(rng: np.random.Generator) -> None:
    """What a bfloat16 server does: logits rounded to bfloat16 before the softmax."""
    logits = rng.normal(size=(200, 5000)) * 8
    targets = rng.integers(0, 5000, 200)
    rounded = _round_bf16(logits.astype("<f4")).astype(np.float64)
    off = np.abs(log_probs(rounded, targets) - log_probs(logits, targets))
    allowed = tolerance("bfloat16", np.abs(logits).max(1))
    assert (off <= allowed).all() and off.max() > allowed.max() / 20
    assert (tolerance("float32", np.array([40.0])) < 2e-3).all()
