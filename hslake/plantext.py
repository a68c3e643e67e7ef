"""Tokens and loss mask of `text` and chats in a plan file, by the model's tokenizer.

`text` is supervised everywhere. Of a chat (`messages` with role and content, or `conversations`
with ShareGPT's from and value), the assistant's turns are: by the chat template's own generation
marks where it has them, otherwise by rendering turn by turn, and only where the rendered beginnings
are exact beginnings of the whole conversation.
"""

import re
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput, Missing
from hslake.planfile import CHATS, Tokenize

# ShareGPT's names of the roles.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
}
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenizer(folder: str) -> Tokenize:
    """A Tokenize for `hslake.planfile` from the tokenizer files in `folder`.

    Needs the extra `hf`. Runs no code from the folder and fetches nothing.
    """
    if not Path(folder).is_dir():
        raise Missing(f"--tokenizer {folder}: no such directory, expected the model's folder")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidInput(
            f"--tokenizer needs transformers: pip install 'hslake[hf]' ({error})"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InvalidInput(f"--tokenizer {folder}: cannot be loaded: {error}") from error

    def tokenize(column: str, value: Any, where: str) -> tuple[list[int], list[int]]:
        if column in CHATS:
            return _messages(loaded, value, where)
        if not isinstance(value, str):
            raise InvalidInput(f"{where}: found {type(value).__name__}, expected text")
        ids = list(loaded.encode(value))
        return ids, [1] * len(ids)

    return tokenize


def _messages(tok: Any, value: Any, where: str) -> tuple[list[int], list[int]]:
    turns = _check(value, where)
    if not tok.chat_template:
        raise InvalidInput(f"{where}: this tokenizer has no chat template; give `text` instead")
    try:
        by = _by_marks if _MARK.search(tok.chat_template) else _by_turn
        ids, mask = by(tok, turns, where)
    except InvalidInput:
        raise
    except Exception as error:  # a template raises whatever it likes
        raise InvalidInput(f"{where}: the chat template refuses it: {error}") from error
    if not any(mask):
        raise InvalidInput(f"{where}: no assistant tokens to supervise")
    return ids, mask


def _by_marks(tok: Any, turns: list[dict[str, str]], where: str) -> tuple[list[int], list[int]]:
    """Mask from the template's generation marks.

    Not by transformers' own mask: where a marked span ends in a character without a token of its
    own, it supervises everything up to the end of the conversation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [turns],
        chat_template=tok.chat_template,
        return_assistant_tokens_mask=True,
        **tok.special_tokens_map,
    )
    texts, spans = rendered
    out = tok(texts[0], add_special_tokens=False, return_offsets_mapping=True)
    ids = list(out["input_ids"])
    mask = [0] * len(ids)
    for start, end in spans[0]:
        for i, (first, last) in enumerate(out["offset_mapping"]):
            inside = min(last, end) - max(first, start)
            if inside > 0 and inside != last - first:
                raise InvalidInput(
                    f"{where}: token {i} lies across the edge of what the assistant said, so it "
                    "cannot be marked exactly; give input_ids and loss_mask"
                )
            mask[i] |= inside > 0
    if ids != _render(tok, turns, False):
        raise InvalidInput(
            f"{where}: the rendered chat does not tokenise as the tokenizer's own; give input_ids"
        )
    return ids, [int(m) for m in mask]


def _by_turn(tok: Any, turns: list[dict[str, str]], where: str) -> tuple[list[int], list[int]]:
    ids = _render(tok, turns, False)
    mask = [0] * len(ids)
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        # Up to where the model would start to write, and up to where it stops.
        if i == 0:
            raise InvalidInput(f"{where}: starts with the assistant; begin with a user's turn")
        start, end = _render(tok, turns[:i], True), _render(tok, turns[: i + 1], False)
        if ids[: len(start)] != start or ids[: len(end)] != end or len(end) < len(start):
            raise InvalidInput(
                f"{where}: turn {i + 1}: the chat template renders the beginning of the "
                "conversation differently from the whole, so the assistant's tokens cannot be "
                "marked exactly; give input_ids and loss_mask"
            )
        mask[len(start) : len(end)] = [1] * (len(end) - len(start))
    return ids, mask


def _render(tok: Any, turns: list[dict[str, str]], prompt: bool) -> list[int]:
    out = tok.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=prompt, return_dict=True
    )
    return list(out["input_ids"])


def _check(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"{where}: found {type(value).__name__}, expected a list of turns")
    return [_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(value, 1)]


def _turn(turn: Any, where: str) -> dict[str, str]:
    """A turn as role and content, from either style."""
    given = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
    if "from" in given and "role" not in given:
        role = _ROLES.get(given.pop("from"), "")
        if not role:
            raise InvalidInput(
                f"{where}: from {turn['from']!r}: expected one of {', '.join(_ROLES)}"
            )
        given = {"role": role, "content": given.pop("value", None), **given}
    role, content = given.pop("role", None), given.pop("content", None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidInput(
            f"{where}: expected text in `role` and `content` (or in `from` and `value`)"
        )
    if given:
        raise InvalidInput(f"{where}: `{min(given)}` is not supported yet; give input_ids")
    return {"role": role, "content": content}
