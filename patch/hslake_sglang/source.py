"""What an SGLang's source says, read without importing it: importing takes a GPU and half a minute.

`root` is everywhere the folder of the package `sglang`, installed or unpacked from its wheel.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# What a language model of SGLang must have to hand out the states between its layers.
INNER, OUTER = "layers_to_capture", "capture_aux_hidden_states"
_CLASS = re.compile(r"^class (\w+).*?(?=^[^\s)#]|\Z)", re.M | re.S)
_ENTRIES = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\[.*?\]|\w+)", re.M | re.S)
# A submodel made by a class that only the model's config names, as in Llava.
_BY_CONFIG = re.compile(r"self\.(?:language_model|model|llm|inner)\s*=\s*[a-z_][\w.]*\(")
FALLBACK = "TransformersForCausalLM"

# Where a running server is given other weights: methods of these classes with such names. What they
# are called and where they stand differs between versions; a new one is likely to fit too.
_WEIGHT_CLASSES = (
    ("model_executor.model_runner", "ModelRunner"),
    ("model_executor.model_runner_components.weight_updater", "WeightUpdater"),  # from 0.5.16 on
)
_WEIGHT_CHANGE = re.compile(
    r"(update_weights|load_weights|begin_weight_update|end_weight_update|load_lora_adapter"
    r"|check_weights)"  # one of whose actions overwrites them all
)


def weight_changes(root: Path) -> list[str]:
    """Full names of the methods that give a running server other weights or an adapter.

    Empty when the source cannot be read by this Python.
    """
    found = []
    for module, owner in _WEIGHT_CLASSES:
        path = root / "srt" / (module.replace(".", "/") + ".py")
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue  # this version has no such file
        bodies = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner)
        methods = [n.name for body in bodies for n in body if isinstance(n, ast.FunctionDef)]
        found += [f"sglang.srt.{module}.{owner}.{m}" for m in methods if _WEIGHT_CHANGE.match(m)]
    return found


def options(root: Path) -> dict[str, str]:
    """The server's command line options, each with the attribute of ServerArgs that it sets.

    Empty when the source cannot be read by this Python.
    """
    srt = root / "srt"
    found: dict[str, str] = {}
    for path in [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]:
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (OSError, ValueError, SyntaxError):
            return {}
        for node in ast.walk(tree):
            for name, attribute in _options_of(node):
                found.setdefault(name, attribute)
    return found


def _options_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
        names = [str(_constant(a)) for a in node.args if str(_constant(a)).startswith("--")]
        given = {k.arg: _constant(k.value) for k in node.keywords}
        if names:
            attribute = str(given.get("dest") or names[0][2:].replace("-", "_"))
            yield from ((name, attribute) for name in names)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield from _options_of_field(node.target.id, node.annotation)


def _options_of_field(attribute: str, annotation: ast.expr) -> Iterator[tuple[str, str]]:
    """Newer versions derive the options from fields: `pp_size: A[int, Arg(aliases=[…])] = 1`."""
    if not isinstance(annotation, ast.Subscript) or getattr(annotation.value, "id", "") != "A":
        return
    inner = annotation.slice
    facts: dict[str | None, ast.expr] = {}
    for item in inner.elts if isinstance(inner, ast.Tuple) else []:
        if isinstance(item, ast.Call) and getattr(item.func, "id", "") == "Arg":
            facts = {k.arg: k.value for k in item.keywords}
    if "no_cli" in facts and _constant(facts["no_cli"]) is True:
        return
    name = _constant(facts["cli_name"]) if "cli_name" in facts else None
    yield str(name or "--" + attribute.replace("_", "-")), attribute
    aliases = facts.get("aliases")
    for alias in aliases.elts if isinstance(aliases, ast.List) else []:
        yield str(_constant(alias)), attribute


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


@dataclass(frozen=True)
class Models:
    """The model classes of `root`."""

    root: Path

    @cached_property
    def _texts(self) -> list[str]:
        files = sorted((self.root / "srt" / "models").rglob("*.py"))
        return [f.read_text("utf-8", "replace") for f in files]

    @cached_property
    def _bodies(self) -> dict[str, str]:
        bodies: dict[str, str] = {}
        for text in self._texts:
            for match in _CLASS.finditer(text):
                bodies[match[1]] = bodies.get(match[1], "") + match[0]
        return bodies

    @cached_property
    def architectures(self) -> frozenset[str]:
        """Every architecture that a config.json can name."""
        found = (re.findall(r"\w+", m[1]) for t in self._texts for m in _ENTRIES.finditer(t))
        return frozenset(name for names in found for name in names)

    def body(self, name: str) -> str:
        """Source of the classes called `name`, and of all model classes they mention.

        Too much rather than too little: only what is nowhere in it is surely missing.
        """
        seen: set[str] = set()
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in seen and one in self._bodies:
                seen.add(one)
                todo += re.findall(r"\b[A-Z]\w+", self._bodies[one])
        return "".join(self._bodies[one] for one in seen)

    def captures(self, architecture: str) -> bool | None:
        """Whether this architecture can hand out the states between its layers; None when only
        the running server can tell."""
        text = self.body(architecture)
        if re.search(rf"\b{INNER}\b", text) and re.search(rf"\b{OUTER}\b", text):
            return True
        return None if not text or _BY_CONFIG.search(text) else False


def capture_problem(
    root: Path, named: Sequence[str], version: str, *, foreign: bool = False
) -> str | None:
    """Why SGLang `version` cannot capture from a model whose config.json names architectures
    `named`, or None. `foreign`: packages beside SGLang may bring models of their own.
    """
    models = Models(root)
    if not named or not models.architectures:
        return None
    known = [name for name in named if name in models.architectures]
    if not known:
        if foreign or models.captures(FALLBACK) is not False:
            return None
        return (
            f"SGLang {version} has no model for architecture {', '.join(named)}, and its stand-in "
            f"for unknown models ({FALLBACK}) cannot capture: use a version that has it"
        )
    if models.captures(known[0]) is not False:
        return None
    return (
        f"SGLang {version} cannot capture from architecture {known[0]}: its model has no "
        f"`{INNER}` with `{OUTER}`; use a newer SGLang, or `hslake capture-hf`, which can"
    )
