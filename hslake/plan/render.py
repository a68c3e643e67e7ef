"""A conversation as text, and which characters of it the assistant wrote.

By the chat template's own generation marks where it has them. Otherwise by rendering turn by turn:
what the assistant wrote lies between the prompt it would have got and the end of its turn, if these
beginnings are beginnings of the whole. Where only the end is not, as the template writes more into
a last turn, it must be the turn's content and end and nothing else. Otherwise the mask cannot be
exact, and the conversation is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hslake.errors import InvalidInput
from hslake.plan.chat import Turn

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = "hslake8d1f"  # in no conversation
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Template:
    """How conversations are rendered: `tok` a transformers tokenizer, `text` the chat template
    (None: the tokenizer's own), `arguments` of the template, `last_turn_only` what is marked."""

    tok: Any
    text: str | None
    arguments: Mapping[str, Any]
    last_turn_only: bool = False

    @property
    def source(self) -> str | None:
        """The template itself; None when there is none that can be looked at."""
        if self.text is not None:
            return self.text
        own = getattr(self.tok, "chat_template", None)
        return own.get("default") if isinstance(own, dict) else own


def render(
    template: Template, turns: Sequence[Turn], tools: list[Any] | None, where: str
) -> tuple[str, Spans]:
    """The conversation's text and the spans [start, end) of it that are to be supervised. Raises
    InvalidInput naming the turn."""
    source = template.source
    if not source and not _has_own(template.tok):
        raise InvalidInput(
            f"{where}: this tokenizer has no chat template; give one with --chat-template FILE, or "
            "`text` instead"
        )
    if not any(t["role"] == "assistant" for t in turns):
        raise InvalidInput(f"{where}: no assistant tokens to supervise")
    try:
        if source and _MARK.search(source):
            text, spans = _by_marks(template, source, turns, tools, where)
        else:
            text, spans = _by_turn(template, turns, tools, where)
    except InvalidInput:
        raise
    except Exception as error:  # a template raises whatever it likes
        raise InvalidInput(f"{where}: the chat template refuses it: {error}") from error
    spans = [s for s in spans if s[1] > s[0]]
    if not spans:
        raise InvalidInput(f"{where}: no assistant tokens to supervise")
    return text, spans


def _has_own(tok: Any) -> bool:
    """Whether the tokenizer renders by code of its own."""
    from transformers import PreTrainedTokenizerBase

    return type(tok).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _text(template: Template, turns: Sequence[Turn], tools: list[Any] | None, prompt: bool) -> str:
    chosen = {} if template.text is None else {"chat_template": template.text}
    found = template.tok.apply_chat_template(
        list(turns),
        tools=tools,
        tokenize=False,
        add_generation_prompt=prompt,
        **chosen,
        **template.arguments,
    )
    return str(found)


def _by_marks(
    template: Template, source: str, turns: Sequence[Turn], tools: list[Any] | None, where: str
) -> tuple[str, Spans]:
    """From the template's generation marks, as characters.

    Not by transformers' own mask: where a marked span ends in a character without a token of its
    own, it supervises everything up to the end of the conversation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [list(turns)],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=True,
        **{**template.tok.special_tokens_map, **template.arguments},
    )
    (text,), (spans,) = rendered
    if text != _text(template, turns, tools, False):
        raise InvalidInput(
            f"{where}: the tokenizer does not render as its chat template says; give input_ids"
        )
    found = [(int(start), int(end)) for start, end in spans]
    if template.last_turn_only and found:
        if turns[-1]["role"] != "assistant":
            raise InvalidInput(f"{where}: does not end with the assistant, expected its last turn")
        found = found[-1:]
    return text, found


def _by_turn(
    template: Template, turns: Sequence[Turn], tools: list[Any] | None, where: str
) -> tuple[str, Spans]:
    whole = _text(template, turns, tools, False)
    at = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    if template.last_turn_only:
        if at[-1] != len(turns) - 1:
            raise InvalidInput(f"{where}: does not end with the assistant, expected its last turn")
        at = at[-1:]
    spans = []
    for i in at:
        if i == 0:
            raise InvalidInput(f"{where}: starts with the assistant; begin with a user's turn")
        # Up to where the model would start to write, and up to where it stops.
        start = _text(template, turns[:i], tools, True)
        end = whole if i == len(turns) - 1 else _text(template, turns[: i + 1], tools, False)
        if whole.startswith(start) and whole.startswith(end) and len(end) >= len(start):
            spans.append((len(start), len(end)))
            continue
        said = _as_said(template, turns[: i + 1], tools)
        if said is None or not whole.startswith(start) or not whole.startswith(said, len(start)):
            raise InvalidInput(_inexact(template, turns, i, where))
        spans.append((len(start), len(start) + len(said)))
    return whole, spans


def _as_said(template: Template, turns: Sequence[Turn], tools: list[Any] | None) -> str | None:
    """What the last of `turns` wrote, its content and the end of its turn; None when it wrote more.

    For templates that put something before the content of a conversation's last turn alone, such as
    an empty thought. The end of a turn is what follows a word in the place of its content.
    """
    turn = turns[-1]
    content = turn["content"].strip()
    more = [k for k in turn if k not in ("role", "content", "name")]
    if more or not content or "think>" in content:
        return None
    around = _text(template, [*turns[:-1], {**turn, "content": _WORD}], tools, False)
    if around.count(_WORD) != 1:
        return None
    return content + around.partition(_WORD)[2]


def _inexact(template: Template, turns: Sequence[Turn], i: int, where: str) -> str:
    last = i == len(turns) - 1
    what = (
        "the chat template renders the beginning of the conversation differently from the whole, "
        "so the assistant's tokens cannot be marked exactly"
    )
    if last:
        todo = (
            "a template argument may decide it (--template-arg, for example enable_thinking=true); "
            "or give a template with generation marks (--chat-template FILE), or input_ids and "
            "loss_mask"
        )
    else:
        todo = (
            "templates that drop the reasoning of earlier turns do so: mark the last turn only "
            "(--last-turn-only), give a template with generation marks (--chat-template FILE), or "
            "input_ids and loss_mask"
        )
    return f"{where}: turn {i + 1}: {what}; {todo}"
