"""Text and chats to tokens: exact masks or a clear error, with a tokenizer made on the spot."""

from pathlib import Path

import pytest
from hslake.plantext import tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hslake.errors import InvalidInput, Missing

WORDS = ["[UNK]", "<u>", "<a>", "<e>", "hello", "there", "how", "are", "you", "fine"]
PLAIN = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} <e> "
    "{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}<u> {{ m.content }} <e> {% else %}<a> "
    "{% generation %}{{ m.content }} <e> {% endgeneration %}{% endif %}{% endfor %}"
)
# Drops what the assistant said in all but the last turn, as templates of reasoning models do.
FORGETS = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}"
    "{% if m.role == 'user' or loop.last %}{{ m.content }} {% endif %}<e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
]


def save(folder: Path, template: str | None) -> str:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


def test_sharegpt_is_the_same_chat(tmp_path: Path) -> None:
    tokenize = tokenizer(save(tmp_path, PLAIN))
    names = {"user": "human", "assistant": "gpt"}
    chat = [{"from": names[t["role"]], "value": t["content"]} for t in CHAT]
    assert tokenize("conversations", chat, "x") == tokenize("messages", CHAT, "x")
    with pytest.raises(InvalidInput, match=r"^x: turn 2: from 'bing'"):
        tokenize("conversations", [chat[0], {"from": "bing", "value": "hello"}], "x")
    with pytest.raises(InvalidInput, match=r"^x: turn 1: expected text in `role`"):
        tokenize("conversations", [{"from": "human"}], "x")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_mask_covers_the_assistant(tmp_path: Path, template: str) -> None:
    ids, mask = tokenizer(save(tmp_path, template))("messages", CHAT, "x")
    words = [WORDS[i] for i in ids]
    assert " ".join(words) == ("<u> hello <e> <a> hello there <e> <u> how are you <e> <a> fine <e>")
    kept = [w for w, m in zip(words, mask, strict=True) if m]
    assert kept == ["hello", "there", "<e>", "fine", "<e>"]


def test_text_is_supervised_everywhere(tmp_path: Path) -> None:
    ids, mask = tokenizer(save(tmp_path, None))("text", "hello you", "x")
    assert ids == [4, 8] and mask == [1, 1]


def test_refusals(tmp_path: Path) -> None:
    tokenize = tokenizer(save(tmp_path / "plain", PLAIN))
    for chat, message in (
        ([], "list of turns"),
        ("hello", "list of turns"),
        ([{"role": "user"}], "turn 1: expected text"),
        ([{**CHAT[0], "tool_calls": [1]}], "`tool_calls` is not supported"),
        (CHAT[:1], "no assistant tokens"),
        (CHAT[1:], "starts with the assistant"),
    ):
        with pytest.raises(InvalidInput, match=f"^x: .*{message}"):
            tokenize("messages", chat, "x")
    with pytest.raises(InvalidInput, match="expected text"):
        tokenize("text", 3, "x")
    with pytest.raises(InvalidInput, match=r"turn 2: .*marked exactly"):
        tokenizer(save(tmp_path / "forgets", FORGETS))("messages", CHAT, "x")
    with pytest.raises(InvalidInput, match="no chat template"):
        tokenizer(save(tmp_path / "none", None))("messages", CHAT, "x")
    with pytest.raises(Missing, match="no such directory"):
        tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        tokenizer(str(tmp_path / "empty"))
