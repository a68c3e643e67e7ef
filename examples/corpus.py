"""A small real corpus out of what every Python installation carries, as a file for `hslake plan`.

Three sources, named as the datasets of a real draft-model mix are:

    A1  source code: the standard library's own modules; the prompt is the file's path and head
    B3  documentation: docstrings and `pydoc` topics as chat answers; the prompt is the question
    B4  prose: licences and read-mes of the installed packages; everything is supervised

The same installation, tokenizer and seed give the same file, byte for byte. Only `tokenizers` is
needed: no network, no data set to fetch.

    python -m examples.corpus MODEL_DIR corpus.jsonl
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

MIN_TOKENS = 20
MAX_TOKENS = 2000
SAMPLES = {"A1": 52, "B3": 52, "B4": 28}
VALIDATION_PERCENT = 10
_GOLDEN = 0.6180339887498949
_FILE_BYTES = 400_000  # a file larger than this is generated data, not something a person wrote


@dataclass(frozen=True)
class Document:
    """One text with its unsupervised beginning. `prompt` is what the split is hashed by."""

    source: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Sample:
    """One row of the plan file: the columns `hslake plan` reads."""

    sample_id: str
    source: str
    split: str
    input_ids: list[int]
    loss_mask: list[int]


def _read(path: Path) -> str:
    """The text of a file, or "" when it is not UTF-8 or too large to be prose or code."""
    try:
        if path.stat().st_size > _FILE_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data"}
    return sorted(
        path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts)
    )


def code_documents() -> Iterator[Document]:
    """Standard library modules; the head, up to the first definition or 25 lines, is the prompt."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _stdlib_files():
        lines = _read(path).splitlines(keepends=True)
        if len(lines) < 5:
            continue
        starts = ("def ", "class ", "@", "async def ")
        head = next((i for i, line in enumerate(lines) if line.startswith(starts)), 5)
        head = max(1, min(head, 25, len(lines) // 2))
        name = path.relative_to(root).as_posix()
        yield Document("A1", f"# file: {name}\n" + "".join(lines[:head]), "".join(lines[head:]))


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _signature(node: ast.AST, owner: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return f"def {owner}{node.name}({ast.unparse(node.args)})"


def docstring_documents() -> Iterator[Document]:
    """`pydoc` topics, then every docstring of the standard library of at least 60 characters."""
    from pydoc_data import topics

    for name in sorted(topics.topics):
        question = f"Explain this part of the Python language: {name}"
        yield Document("B3", _chat(question), topics.topics[name].strip() + "<|im_end|>")
    root = Path(sysconfig.get_path("stdlib"))
    for path in _stdlib_files():
        try:
            tree = ast.parse(_read(path))
        except (SyntaxError, ValueError):
            continue
        module = path.relative_to(root).as_posix().removesuffix(".py").replace("/", ".")
        nodes: list[tuple[ast.AST, str]] = []
        for node in tree.body:
            nodes.append((node, ""))
            if isinstance(node, ast.ClassDef):
                nodes += [(child, f"{node.name}.") for child in node.body]
        for node, owner in nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 60:
                question = f"Document `{_signature(node, owner)}` of the module {module}."
                yield Document("B3", _chat(question), doc + "<|im_end|>")


def prose_documents() -> Iterator[Document]:
    """Python's licence, then licences and descriptions of the installed packages, no text twice."""
    texts = [_read(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt")]
    names = ("LICEN", "COPYING", "NOTICE", "AUTHORS")
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        title = dist.metadata["Name"] or ""
        for file in dist.files or []:
            if ".dist-info" in str(file) and file.name.upper().startswith(names):
                found[f"{title}/{file}"] = _read(Path(str(dist.locate_file(file))))
        # The long description, without the Key: value lines above it.
        found[f"{title}/description"] = (dist.read_text("METADATA") or "").partition("\n\n")[2]
    texts += [found[name] for name in sorted(found)]
    seen: set[str] = set()
    for text in texts:
        text = text.strip()
        # Licences of one family differ in the holder named above, so the end identifies them.
        ending = "".join(text.split())[-160:]
        if len(text) < 200 or ending in seen:
            continue
        seen.add(ending)
        yield Document("B4", "", text)


def _target_lengths(count: int) -> list[int]:
    """`count` lengths, even over log(20) .. log(2000): a few long ones carry most tokens."""
    spread = [(0.5 + i * _GOLDEN) % 1.0 for i in range(count)]
    return [round(MIN_TOKENS * (MAX_TOKENS / MIN_TOKENS) ** u) for u in spread]


def _digest(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def _choose(
    documents: list[Document], count: int, seed: int, tokenizer: Any
) -> list[tuple[Document, list[int], list[int]]]:
    """Give every target length the first unused document long enough for it, cut to that length.

    Documents come in hash order, so neighbours in the file system do not cluster.
    """
    order = sorted(documents, key=lambda d: _digest(seed, d.prompt + d.completion))
    # A token is about three characters; tokenising every file of the library would take a minute.
    pool: list[Document | None] = list(order)
    chosen = []
    for want in sorted(_target_lengths(count), reverse=True):
        best: tuple[int, list[int], list[int]] | None = None
        for i, doc in enumerate(pool):
            if doc is None or len(doc.prompt) + len(doc.completion) < 2 * want:
                continue
            if len(doc.prompt) > 6 * want:  # would leave nothing to supervise
                continue
            prompt = tokenizer.encode(doc.prompt).ids
            rest = tokenizer.encode(doc.completion[: 8 * want]).ids
            ids, mask = prompt + rest, [0] * len(prompt) + [1] * len(rest)
            cut = max(want, len(prompt) + 8)
            if cut > 2 * want or len(ids) < cut:
                continue
            ids, mask = ids[:cut], mask[:cut]
            if best is None or cut < len(best[1]):
                best = (i, ids, mask)
            if cut == want:
                break
        if best is None:
            continue
        i, ids, mask = best
        doc = pool[i]
        assert doc is not None
        pool[i] = None
        if not doc.prompt:
            mask = [0, *mask[1:]]  # nothing predicts the first token
        chosen.append((doc, ids, mask))
    return chosen


def build_corpus(model_dir: str | Path, seed: int = 0) -> list[Sample]:
    """All samples, tokenised with the model's own tokenizer, in sample_id order.

    Lengths 20 .. 2,000 tokens. About ten percent of each source's prompts, chosen by the prompt's
    hash, form the validation split, so a prompt never straddles the splits.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    samples: list[Sample] = []
    makers = {"A1": code_documents, "B3": docstring_documents, "B4": prose_documents}
    for source, maker in makers.items():
        chosen = _choose(list(maker()), SAMPLES[source], seed, tokenizer)
        key = [_digest(seed, "split:" + (doc.prompt or doc.completion)) for doc, _, _ in chosen]
        held_out = set(sorted(key)[: max(1, round(len(set(key)) * VALIDATION_PERCENT / 100))])
        # Numbered in an order that says nothing about length or split.
        shuffled = sorted(range(len(chosen)), key=lambda i: _digest(seed, f"order:{key[i]}"))
        for number, index in enumerate(shuffled):
            _, ids, mask = chosen[index]
            split = "validation" if key[index] in held_out else "train"
            samples.append(Sample(f"{source}-{number:06d}", source, split, ids, mask))
    return samples


def write_jsonl(samples: list[Sample], path: str | Path) -> None:
    """One JSON object a line, as `hslake plan` reads it."""
    with Path(path).open("w", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps(asdict(sample), separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder with tokenizer.json")
    parser.add_argument("out", help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    samples = build_corpus(args.model, args.seed)
    write_jsonl(samples, args.out)
    tokens = sum(len(s.input_ids) for s in samples)
    print(f"{len(samples)} samples, {tokens} tokens -> {args.out}")


if __name__ == "__main__":
    main()
