"""A conversation as chat templates take it, from OpenAI's `messages` or ShareGPT's `conversations`.

Roles are system, user, assistant and tool. What a template may read is kept (`reasoning_content`,
`tool_calls`, `name`, …); what cannot be text is refused.
"""

import json
from typing import Any

from hslake.errors import InvalidInput
from hslake.plan.checks import short

# Names of the roles in either style. A function_call is the assistant's, what comes back a tool's.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
_CALL = "function_call"
_KEPT = ("reasoning_content", "reasoning", "thinking", "name", "tool_call_id")  # text

Turn = dict[str, Any]


def turns(value: Any, where: str) -> list[Turn]:
    """The turns of a conversation. Raises InvalidInput naming the turn."""
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        # Hugging Face keeps a list of structs as a struct of lists.
        if len({len(v) for v in value.values()}) != 1:
            raise InvalidInput(f"{where}: its lists differ in length")
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not value:
        found = "no turns" if isinstance(value, list | dict) and not value else type(value).__name__
        raise InvalidInput(f"{where}: found {found}, expected a list of turns")
    return [_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(value, 1)]


def tools(value: Any, where: str) -> list[Any] | None:
    """The tools of a conversation, a list or its JSON text; None for none. Raises InvalidInput."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{where}: not JSON ({error}), expected a list of tools") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
        raise InvalidInput(f"{where}: found {short(value)}, expected a list of objects")
    return value


def _turn(turn: Any, where: str) -> Turn:
    given = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
    said = "role"
    if "from" in given and "role" not in given:
        given = {
            "role": given.pop("from"),
            "content": given.pop("value", None),
            **{k: v for k, v in given.items() if k not in ("from", "value")},
        }
        said = "from"
    name, content = given.pop("role", None), given.pop("content", None)
    if not isinstance(name, str):
        raise InvalidInput(
            f"{where}: expected text in `role` and `content` (or in `from` and `value`)"
        )
    role = _ROLES.get(name)
    if role is None:
        raise InvalidInput(f"{where}: {said} {name!r}: expected one of {', '.join(_ROLES)}")
    found: Turn = {"role": role, "content": None}
    if name == _CALL:
        found["tool_calls"] = _calls(_json(content, where), where)
        content = ""
    calls = given.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = _calls(calls, where)
    found["content"] = _text(content, where, optional="tool_calls" in found)
    for key in _KEPT:
        if key in given:
            found[key] = _text(given.pop(key), f"{where}: {key}")
    odd = [k for k, v in given.items() if k not in ("weight", "loss", "train", "id") or v == 0]
    if odd:
        raise InvalidInput(
            f"{where}: `{min(odd)}` is not supported: remove it, or give input_ids and loss_mask"
        )
    return found


def _text(content: Any, where: str, optional: bool = False) -> str:
    """Text, or parts that are all text, joined as they are."""
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            text = part.get("text") if isinstance(part, dict) else part
            if kind != "text" or not isinstance(text, str):
                raise InvalidInput(
                    f"{where}: a part of type {kind!r}: only text can be planned, media cannot"
                )
            parts.append(text)
        content = "".join(parts)
    if not isinstance(content, str):
        raise InvalidInput(
            f"{where}: expected text in `role` and `content` (or in `from` and `value`)"
        )
    return content


def _json(content: Any, where: str) -> Any:
    if isinstance(content, str):
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"{where}: a {_CALL} that is not JSON ({error}): expected name and arguments"
            ) from None
    return content


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form. Arguments given as JSON text become the object, as servers hand
    them to the template."""
    calls = [value] if isinstance(value, dict) else value
    if isinstance(calls, str):
        calls = _json(calls, where)
    if not isinstance(calls, list) or not calls:
        raise InvalidInput(f"{where}: tool_calls: found {short(value)}, expected a list of calls")
    found = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise InvalidInput(
                f"{where}: tool_calls: found {short(call)}, expected a function with a name"
            )
        arguments = inner.get("arguments", inner.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        one: dict[str, Any] = {
            "type": "function",
            "function": {"name": inner["name"], "arguments": arguments},
        }
        if isinstance(call.get("id"), str):
            one = {"id": call["id"], **one}
        found.append(one)
    return found
