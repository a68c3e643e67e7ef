"""Text and chats to tokens: exact masks or a clear error, with a tokenizer made on the spot."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hslake.errors import InvalidInput, Missing
from hslake.plan import tokens
from hslake.plan.chat import tools, turns
from hslake.plan.tokens import Text, TextOptions, Tokenizer, content_hash

WORDS = ["[UNK]", "<u>", "<a>", "<e>", "hello", "there", "how", "are", "you", "fine", "think"]
PLAIN = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} <e> "
    "{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}<u> {{ m.content }} <e> {% else %}<a> "
    "{% generation %}{{ m.content }} <e> {% endgeneration %}{% endif %}{% endfor %}"
)
# Drops the reasoning of all but the last turn, as templates of reasoning models do.
FORGETS = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}"
    "{% if m.reasoning_content and loop.last %}think {{ m.reasoning_content }} think {% endif %}"
    "{{ m.content }} <e> {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
# Begins the last turn alone with a thought, be it empty.
EMPTY = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}"
    "{% if m.role != 'user' and loop.last %}think {{ m.reasoning_content }} think {% endif %}"
    "{{ m.content.split('think>')[-1] }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
# Writes tools and calls out.
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %} <e>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
]
SMOL = Path(os.environ.get("HSLAKE_TEST_MODEL", "no such folder"))


def save(folder: Path, template: str | None) -> str:
    words = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


def save_bytes(folder: Path, template: str, **parts: Any) -> str:
    """A byte-level tokenizer, which keeps every character, but for what `parts` do to it."""
    bpe = Backend(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<e>"], initial_alphabet=alphabet, vocab_size=300)
    bpe.train_from_iterator(["hello there \n\n <user> <assistant> how are you"] * 5, trainer)
    for name, part in parts.items():
        setattr(bpe, name, part)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe)
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


def encode(
    folder: str, value: Any, column: str = "messages", tools: Any = None, **options: Any
) -> tuple[list[int], list[int]]:
    """Ids and mask of one row."""
    (found,) = Tokenizer(TextOptions(folder, **options))([Text(column, value, tools, "x")])
    if isinstance(found, InvalidInput):
        raise found
    return found.input_ids.tolist(), found.loss_mask.tolist()


def supervised(folder: str, value: Any, **options: Any) -> str:
    """The text of the supervised tokens."""
    ids, mask = encode(folder, value, **options)
    chosen = [i for i, m in zip(ids, mask, strict=True) if m]
    return Tokenizer(TextOptions(folder)).decode([chosen])[0]


def test_sharegpt_is_the_same_chat(tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN)
    names = {"user": "human", "assistant": "gpt"}
    chat = [{"from": names[t["role"]], "value": t["content"]} for t in CHAT]
    assert encode(folder, chat, "conversations") == encode(folder, CHAT)
    columns = {k: [t[k] for t in chat] for k in ("from", "value")}  # as Hugging Face keeps it
    assert encode(folder, columns, "conversations") == encode(folder, CHAT)
    with pytest.raises(InvalidInput, match=r"^x: turn 2: from 'bing'"):
        encode(folder, [chat[0], {"from": "bing", "value": "hello"}], "conversations")
    with pytest.raises(InvalidInput, match=r"^x: turn 1: expected text in `role`"):
        encode(folder, [{"from": "human"}], "conversations")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_mask_covers_the_assistant(tmp_path: Path, template: str) -> None:
    folder = save(tmp_path, template)
    ids, mask = encode(folder, CHAT)
    words = [WORDS[i] for i in ids]
    assert " ".join(words) == ("<u> hello <e> <a> hello there <e> <u> how are you <e> <a> fine <e>")
    kept = [w for w, m in zip(words, mask, strict=True) if m]
    assert kept == ["hello", "there", "<e>", "fine", "<e>"]
    last = encode(folder, CHAT, last_turn_only=True)
    assert last[0] == ids and sum(last[1]) == 2 and last[1][-2:] == [1, 1]
    with pytest.raises(InvalidInput, match="does not end with the assistant"):
        encode(folder, CHAT[:3], last_turn_only=True)


def test_text_is_supervised_everywhere(tmp_path: Path) -> None:
    assert encode(save(tmp_path, None), "hello you", "text") == ([4, 8], [1, 1])


def test_reasoning_that_is_dropped(tmp_path: Path) -> None:
    folder = save(tmp_path, FORGETS)
    thinking = [CHAT[0], {**CHAT[1], "reasoning_content": "how"}, *CHAT[2:3],
                {**CHAT[3], "reasoning_content": "are"}]  # fmt: skip
    with pytest.raises(InvalidInput, match=r"^x: turn 2: .*--last-turn-only"):
        encode(folder, thinking)
    assert supervised(folder, thinking, last_turn_only=True) == "think are think fine <e>"
    # Nothing is dropped where there is nothing to drop.
    assert supervised(folder, CHAT) == "hello there <e> fine <e>"


def test_an_empty_thought_in_the_last_turn_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, EMPTY)
    assert supervised(folder, CHAT) == "hello there <e> think think fine <e>"
    reasons = [CHAT[0], {**CHAT[1], "reasoning_content": "how"}, *CHAT[2:]]
    for turn in (reasons[1], {**CHAT[1], "content": "think> hello"}, {**CHAT[1], "content": " "}):
        with pytest.raises(InvalidInput, match=r"^x: turn 2: .*--last-turn-only"):
            encode(folder, [CHAT[0], turn, *CHAT[2:]])


def test_arguments_and_templates(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "{% if shout %}how {% endif %}" + PLAIN)
    plain = encode(folder, CHAT)
    loud = encode(folder, CHAT, template_args={"shout": True})
    assert loud == ([6, *plain[0]], [0, *plain[1]])
    assert encode(folder, CHAT, template_args={"shout": False}) == plain
    file = tmp_path / "t.jinja"
    file.write_text(MARKED)
    assert encode(folder, CHAT, chat_template=str(file)) == plain
    hashes = {
        (t.tokenizer_hash, t.template_hash)
        for t in (
            Tokenizer(TextOptions(folder, **options))  # type: ignore[arg-type]
            for options in (
                {},
                {"template_args": {"shout": True}},
                {"chat_template": str(file)},
                {"last_turn_only": True},
            )
        )
    }
    assert len(hashes) == 4 and len({t for t, _ in hashes}) == 1
    other = Tokenizer(TextOptions(save(tmp_path / "other", "how " + PLAIN)))
    assert other.tokenizer_hash in {t for t, _ in hashes}
    assert other.template_hash not in {t for _, t in hashes}
    with pytest.raises(Missing, match="--chat-template"):
        Tokenizer(TextOptions(folder, chat_template=str(tmp_path / "none")))


def test_tools_and_calls(tmp_path: Path) -> None:
    folder = save_bytes(tmp_path, TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("hel", "lo")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "there"},
    ]  # fmt: skip
    offered = [{"type": "function", "function": {"name": "f"}}]
    ids, _ = encode(folder, chat, tools=offered)
    text = Tokenizer(TextOptions(folder)).decode([ids])[0]
    assert text == (
        '[{"type": "function", "function": {"name": "f"}}]\n<user>\nhello <e>\n'
        '<assistant>\n f {"a": null} <e>\n<tool>\n7 <e>\n<assistant>\nthere <e>\n'
    )
    assert supervised(folder, chat, tools=offered) == ' f {"a": null} <e>\nthere <e>\n'
    said = '[{"type": "function", "function": {"name": "f"}}]'
    assert encode(folder, chat, tools=said) == encode(folder, chat, tools=offered)
    gpt = [
        {"from": "human", "value": "hello"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": null}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "there"},
    ]
    assert encode(folder, gpt, "conversations", tools=said) == encode(folder, chat, tools=said)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "list of turns"),
        ("hello", "list of turns"),
        ([{"role": "user"}], "turn 1: expected text"),
        ([{**CHAT[0], "tool_calls": [1]}], "turn 1: tool_calls: found 1"),
        ([{**CHAT[0], "audio": "x"}], "turn 1: `audio` is not supported"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "turn 1: a part of type 'image_u"),
        ([{"role": "king", "content": "x"}], "turn 1: role 'king'"),
        ([{"from": "function_call", "value": "f(x)"}], "turn 1: a function_call that is not JSON"),
        (CHAT[:1], "no assistant tokens"),
        (CHAT[1:], "starts with the assistant"),
    ],
)
def test_refused_chats(tmp_path: Path, chat: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^x: .*{message}"):
        encode(save(tmp_path, PLAIN), chat)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="expected text"):
        encode(save(tmp_path / "plain", PLAIN), 3, "text")
    with pytest.raises(InvalidInput, match="no chat template"):
        encode(save(tmp_path / "none", None), CHAT)
    with pytest.raises(InvalidInput, match="refuses it"):
        encode(save(tmp_path / "raises", "{{ raise_exception('no') }}"), CHAT)
    with pytest.raises(InvalidInput, match="tools: not JSON"):
        tools("[", "tools")
    with pytest.raises(InvalidInput, match="tools: found"):
        tools([1], "tools")
    with pytest.raises(Missing, match="no such directory"):
        Tokenizer(TextOptions(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        Tokenizer(TextOptions(str(tmp_path / "empty")))


def test_one_bad_row_spoils_no_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer(TextOptions(save(tmp_path, PLAIN)))
    rows = [Text("messages", CHAT, None, "a"), Text("messages", [], None, "b"),
            Text("text", "hello", None, "c"), Text("messages", CHAT[:2], None, "d")]  # fmt: skip
    one, bad, text, two = tokenizer(rows)
    assert isinstance(bad, InvalidInput) and str(bad).startswith("b: ")
    lengths = [len(t.input_ids) for t in (one, text, two) if not isinstance(t, InvalidInput)]
    assert lengths == [15, 1, 7]


def test_edges_inside_a_token_are_refused(tmp_path: Path) -> None:
    folder = save_bytes(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = [{"role": "user", "content": "hel"}, {"role": "assistant", "content": "lo"}]
    with pytest.raises(InvalidInput, match="lies across the edge"):
        encode(folder, chat)


def test_text_that_does_not_come_back(tmp_path: Path) -> None:
    folder = save_bytes(tmp_path, TOOLS, normalizer=normalizers.NFKC())
    tokenizer = Tokenizer(TextOptions(folder))
    said = ["hello", "hello ﬁne", "hello\n\n there"]
    found = tokenizer([Text("text", t, None, "x") for t in said])
    assert [t.lost for t in found if not isinstance(t, InvalidInput)] == [
        None, "character 6: 'ﬁne' comes back as 'fine'", None]  # fmt: skip
    assert tokens.first_difference("abc", "ab") == "character 2: 'c' comes back as ''"


def test_a_tokenizer_without_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_bytes(tmp_path, TOOLS)
    fast = encode(folder, CHAT)
    monkeypatch.setattr(tokens, "_plain_backend", lambda tok: None)
    assert encode(folder, CHAT) == fast
    edge = [{"role": "user", "content": "hel"}, {"role": "assistant", "content": "lo"}]
    with pytest.raises(InvalidInput, match="lies across the edge"):
        encode(
            save_bytes(tmp_path / "b", "{% for m in messages %}{{ m.content }}{% endfor %}"), edge
        )


def test_content_does_not_depend_on_the_order_of_keys() -> None:
    def of(value: Any, column: str = "messages", tools: Any = None) -> str:
        return content_hash(Text(column, value, tools, "x"))

    turned: list[Mapping[str, str]] = [dict(reversed(list(t.items()))) for t in CHAT]
    assert of(CHAT) == of(turned) == of(CHAT, "conversations")
    assert len({of(CHAT), of(CHAT[:2]), of(CHAT, tools=[{}]), of("a", "text")}) == 4
    assert turns(CHAT, "x") == CHAT


@pytest.mark.skipif(not SMOL.is_dir(), reason="no SmolLM2 here")
def test_a_real_tokenizer() -> None:
    chat = [
        {"role": "system", "content": "Be brief.\n\n"},
        {"role": "user", "content": "  caf\u00e9 \u65e5\u672c\U0001f389\n\n\n"},
        {"role": "assistant", "content": "Yes:  \n\n 'tis \U0001f389 \n"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "end\u0301"},
    ]
    ids, mask = encode(str(SMOL), chat)
    expected = "Yes:  \n\n 'tis \U0001f389 \n<|im_end|>\nend\u0301<|im_end|>\n"
    assert supervised(str(SMOL), chat) == expected
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(SMOL, local_files_only=True)
    assert ids == own.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert np.count_nonzero(mask) == sum(mask) < len(ids)
