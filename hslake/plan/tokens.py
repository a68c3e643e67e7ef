"""Text and conversations to tokens and loss mask, many at once, by the model's own tokenizer.

Fast tokenizers take a batch on all cores, without Python's lock. Every text is decoded again: what
does not come back is told, as training would see other text than was written.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hslake.errors import InvalidInput, Missing
from hslake.plan.chat import tools as read_tools
from hslake.plan.chat import turns as read_turns
from hslake.plan.files import CHATS
from hslake.plan.render import Spans, Template, render

# Of a tokenizer's folder, what decides its tokens.
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_AROUND = 20  # characters shown of a difference


@dataclass(frozen=True)
class TextOptions:
    """How text becomes tokens. `tokenizer`: the model's folder; `chat_template`: a file, instead of
    its own; `template_args`: what the template gets beside the conversation; `last_turn_only`: of a
    conversation, supervise the assistant's last turn; `trust_remote_code`: run the folder's code.
    """

    tokenizer: str
    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    last_turn_only: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Text:
    """One row's text: `column` is "text" or one of CHATS, `value` what is in it."""

    column: str
    value: Any
    tools: Any
    where: str


@dataclass(frozen=True)
class Tokens:
    """`input_ids` int32 and `loss_mask` uint8, [length]; `lost`: where decoding gives other text,
    in words, or None."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lost: str | None = None


def content_hash(text: Text) -> str:
    """What identifies a row's text or conversation whatever template renders it, hex."""
    parts = [text.column == "text", text.value, text.tools]
    said = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(said.encode()).digest()[:16].hex()


class Tokenizer:
    """The tokenizer of a folder. Fetches nothing, and runs no code of the folder unless told to.

    `tokenizer_hash`: of its files; `template_hash`: of chat template, arguments and what is marked.
    Needs the extra `hf`.
    """

    def __init__(self, options: TextOptions) -> None:
        folder = options.tokenizer
        if not Path(folder).is_dir():
            raise Missing(f"--tokenizer {folder}: no such directory, expected the model's folder")
        self._tok = _load(folder, options.trust_remote_code)
        self._fast = _plain_backend(self._tok)
        text = _read_template(options.chat_template)
        self.template = Template(
            self._tok, text, dict(options.template_args), options.last_turn_only
        )
        self.tokenizer_hash = _files_hash(Path(folder))
        said = [self.template.source, self.template.arguments, options.last_turn_only]
        self.template_hash = _hash(json.dumps(said, sort_keys=True).encode())

    def __call__(self, rows: Sequence[Text]) -> list[Tokens | InvalidInput]:
        """Tokens of each row, or what is wrong with it."""
        found: list[Tokens | InvalidInput | None] = [None] * len(rows)
        rendered: dict[int, tuple[str, Spans | None]] = {}
        for i, row in enumerate(rows):
            try:
                rendered[i] = self._text(row)
            except InvalidInput as error:
                found[i] = error
        # Of plain text all tokens count, also those that the tokenizer puts around it.
        for chats in (True, False):
            some = [i for i, (_, spans) in rendered.items() if (spans is not None) == chats]
            texts = [rendered[i][0] for i in some]
            for i, ids, mask in self._encode(texts, [rendered[j][1] for j in some], rows, some):
                found[i] = mask if isinstance(mask, InvalidInput) else Tokens(ids, mask)
        self._look_back(rendered, found)
        return [f if f is not None else InvalidInput("no tokens") for f in found]

    def _text(self, row: Text) -> tuple[str, Spans | None]:
        if row.column in CHATS:
            turns = read_turns(row.value, row.where)
            return render(self.template, turns, read_tools(row.tools, row.where), row.where)
        if not isinstance(row.value, str):
            raise InvalidInput(f"{row.where}: found {type(row.value).__name__}, expected text")
        try:
            row.value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{row.where}: is not valid Unicode text") from None
        return row.value, None

    def _encode(
        self, texts: list[str], spans: list[Spans | None], rows: Sequence[Text], at: list[int]
    ) -> list[tuple[int, np.ndarray, Any]]:
        """(row, input_ids, mask or what is wrong) of texts that are all chats, or none is."""
        found: list[tuple[int, np.ndarray, Any]] = []
        if not texts:
            return found
        if spans[0] is None:
            for i, ids in zip(at, self._tok(texts)["input_ids"], strict=True):
                array = np.array(ids, np.int32)
                found.append((i, array, np.ones(len(array), np.uint8)))
            return found
        if self._fast is not None:
            encodings = self._fast.encode_batch(texts, add_special_tokens=False)
            pairs: Any = ((e.ids, e.offsets) for e in encodings)
        else:
            pairs = ((self._ids(t), None) for t in texts)
        for i, text, marked, (ids, offsets) in zip(at, texts, spans, pairs, strict=True):
            array = np.array(ids, np.int32)
            try:
                if offsets is None:
                    mask = self._mask_by_prefix(text, ids, marked or [], rows[i].where)
                else:
                    mask = _mask_by_offsets(offsets, marked or [], rows[i].where)
            except InvalidInput as error:
                found.append((i, array, error))
            else:
                found.append((i, array, mask))
        return found

    def _ids(self, text: str) -> list[int]:
        return list(self._tok.encode(text, add_special_tokens=False))

    def _mask_by_prefix(self, text: str, ids: list[int], spans: Spans, where: str) -> np.ndarray:
        """Of a tokenizer that does not say where its tokens lie: an edge is one if the text up to
        it has the tokens that the whole begins with."""
        mask = np.zeros(len(ids), np.uint8)
        for start, end in spans:
            edges = [self._ids(text[:at]) for at in (start, end)]
            for edge in edges:
                if ids[: len(edge)] != edge:
                    raise InvalidInput(_straddles(where, len(edge)))
            mask[len(edges[0]) : len(edges[1])] = 1
        return mask

    def _look_back(
        self,
        rendered: Mapping[int, tuple[str, Spans | None]],
        found: list[Tokens | InvalidInput | None],
    ) -> None:
        """Decode everything again and note what differs."""
        at = [i for i in rendered if isinstance(found[i], Tokens)]
        plain = [i for i in at if rendered[i][1] is None]
        ids = {i: found[i].input_ids.tolist() for i in at}  # type: ignore[union-attr]
        if plain:  # without what the tokenizer puts around text
            bare = self._tok([rendered[i][0] for i in plain], add_special_tokens=False)
            ids |= dict(zip(plain, bare["input_ids"], strict=True))
        for i, text in zip(at, self.decode([ids[i] for i in at]), strict=True):
            tokens = found[i]
            assert isinstance(tokens, Tokens)
            lost = first_difference(rendered[i][0], text)
            if lost:
                found[i] = Tokens(tokens.input_ids, tokens.loss_mask, lost)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids, special tokens and spaces as they are."""
        if self._fast is not None:
            found: list[str] = self._fast.decode_batch(list(rows), skip_special_tokens=False)
            return found
        keep = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [self._tok.decode(list(r), **keep) for r in rows]

    def bare(self, text: str) -> np.ndarray:
        """Ids of a text without what the tokenizer puts around it, int32."""
        return np.array(self._ids(text), np.int32)


def _mask_by_offsets(offsets: Any, spans: Spans, where: str) -> np.ndarray:
    """1 for tokens inside a span. Raises InvalidInput for one that lies across an edge."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), np.uint8)
    for start, end in spans:
        inside = np.minimum(places[:, 1], end) - np.maximum(places[:, 0], start)
        across = np.flatnonzero((inside > 0) & (inside != places[:, 1] - places[:, 0]))
        if len(across):
            raise InvalidInput(_straddles(where, int(across[0])))
        mask[inside > 0] = 1
    return mask


def _straddles(where: str, token: int) -> str:
    return (
        f"{where}: token {token} lies across the edge of what the assistant said, so it cannot be "
        "marked exactly; give input_ids and loss_mask"
    )


def first_difference(wanted: str, found: str) -> str | None:
    """Where two texts begin to differ, in words; None when they are the same."""
    if wanted == found:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )
    return (
        f"character {at}: {wanted[at : at + _AROUND]!r} comes back as {found[at : at + _AROUND]!r}"
    )


# -- loading ------------------------------------------------------------------------------------


def _load(folder: str, trust: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidInput(
            f"--tokenizer needs transformers: pip install 'hslake[hf]' ({error})"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        hint = "" if trust else " (a tokenizer with code of its own needs --trust-remote-code)"
        raise InvalidInput(f"--tokenizer {folder}: cannot be loaded: {error}{hint}") from error


def _plain_backend(tok: Any) -> Any:
    """A fast tokenizer's own, which says of every token where it lies; None when it has none.

    Without the post-processor: it adds nothing here, and may leave white space out of the offsets.
    """
    backend = getattr(tok, "backend_tokenizer", None)
    if not getattr(tok, "is_fast", False) or backend is None:
        return None
    from tokenizers import Tokenizer as Backend

    copy: Any = Backend.from_str(backend.to_str())
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    return copy


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except FileNotFoundError:
        raise Missing(f"--chat-template {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--chat-template {path}: cannot be read: {error}") from None


def _files_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in [*(folder / n for n in _FILES), *sorted(folder.glob("tokenization*.py"))]:
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.name} {len(data)}\n".encode() + data)
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            said = json.loads(config.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{config} is not JSON: {error}") from None
        if isinstance(said, dict):  # the template has a hash of its own
            said = {k: v for k, v in said.items() if k not in ("chat_template", "name_or_path")}
        digest.update(json.dumps(said, sort_keys=True).encode())
    return digest.digest()[:16].hex()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).digest()[:16].hex()
