"""Checks that an SGLang has everything the hook attaches to, without importing it.

    python -m tests.patch.attach_points FOLDER...

FOLDER is an unpacked wheel or a site-packages that holds `sglang/`. Exits with 1 when one lacks
something. Behind docs/sglang.md's list of versions that were only read.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hslake_sglang import source, versions
from hslake_sglang.refusals import refusals

ARCHITECTURES = ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
BATCH = {
    *("rids", "input_ids", "input_embeds", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"),
    *("mm_inputs", "lora_ids", "forward_mode"),
}
LOGITS = ["self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"]
# Every way to give a running server other weights or an adapter: what the names contain.
WAYS = ("from_disk", "weights_from_distributed", "from_tensor", "from_ipc", "load_lora_adapter")
ADDED = ("--dtype", "--chunked-prefill-size", "--disable-radix-cache", "--mem-fraction-static")


@dataclass(frozen=True)
class Check:
    """One thing the hook relies on. `ok` is None for a fact that is told but cannot be wrong."""

    what: str
    ok: bool | None
    found: str


@dataclass(frozen=True)
class Source:
    """One SGLang: `folder` holds the package."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "sglang"

    @property
    def version(self) -> str:
        """From the name of the wheel's metadata."""
        names = [p.name for p in self.folder.glob("sglang-*.dist-info")]
        return names[0].removeprefix("sglang-").removesuffix(".dist-info") if names else ""

    def text(self, name: str) -> str:
        path = self.root / "srt" / name
        return path.read_text("utf-8") if path.is_file() else ""

    def tree(self, name: str) -> ast.Module:
        return ast.parse(self.text(name))

    @cached_property
    def arguments(self) -> str:
        """Everything that makes server arguments and their defaults."""
        files = [self.root / "srt/server_args.py", *(self.root / "srt/arg_groups").rglob("*.py")]
        return "\n".join(f.read_text("utf-8") for f in files)


def named(tree: ast.AST, name: str) -> ast.AST:
    """The class or function `name` directly inside `tree`; an empty module when there is none."""
    body = getattr(tree, "body", [])
    return next((n for n in body if getattr(n, "name", "") == name), ast.Module([], []))


def parameters(tree: ast.AST) -> list[str]:
    args = getattr(tree, "args", None)
    return [a.arg for a in (*args.posonlyargs, *args.args)] if args else []


def fields(tree: ast.AST) -> set[str]:
    """Names assigned in a class body."""
    found = set()
    for node in getattr(tree, "body", []):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def check(folder: Path) -> list[Check]:
    """Every check of the SGLang in `folder`."""
    sglang = Source(folder)
    parts = (_version, _plugins, _worker, _weights, _batch, _http, _models, _ranks, _options)
    parts += (_numbers,)
    return [one for part in parts for one in part(sglang)]


def _version(s: Source) -> Iterator[Check]:
    problem = versions.problem(s.version)
    yield Check("version", problem is None, problem or s.version)


def _plugins(s: Source) -> Iterator[Check]:
    group = '"sglang.srt.plugins"' in s.text("plugins/__init__.py")
    yield Check("entry point group sglang.srt.plugins", group, str(group))
    registry = s.tree("plugins/hook_registry.py")
    register = parameters(named(named(registry, "HookRegistry"), "register"))
    yield Check("HookRegistry.register", len(register) >= 4, ", ".join(register))
    kinds = fields(named(registry, "HookType"))
    yield Check("HookType", kinds >= {"BEFORE", "AFTER"}, ", ".join(sorted(kinds)))
    loaders = [
        str(p.relative_to(s.root))
        for p in [*s.root.glob("launch_server.py"), *(s.root / "srt/managers").glob("*.py")]
        if "load_plugins()" in p.read_text("utf-8")
    ]
    both = any("launch" in p for p in loaders) and any("scheduler" in p for p in loaders)
    yield Check("launcher and scheduler load plugins", both, ", ".join(loaders))


def _worker(s: Source) -> Iterator[Check]:
    name = "model_executor/model_runner.py"
    runner = named(s.tree(name), "ModelRunner")
    load, forward = (parameters(named(runner, m)) for m in ("load_model", "forward"))
    yield Check("ModelRunner.load_model", load[:1] == ["self"], ", ".join(load))
    yield Check("ModelRunner.forward", forward[:2] == ["self", "forward_batch"], ", ".join(forward))
    given = {n.attr for n in ast.walk(runner) if isinstance(n, ast.Attribute)}
    used = {"model", "server_args", "device", "is_draft_worker"}
    yield Check("attributes of the runner", given >= used, ", ".join(sorted(used - given)) or "all")
    yield Check("runner knows its dp_rank", None, str("dp_rank" in given))
    logits = named(named(s.tree("layers/logits_processor.py"), "LogitsProcessor"), "forward")
    found = parameters(logits)
    yield Check("LogitsProcessor.forward", found[: len(LOGITS)] == LOGITS, ", ".join(found))


def _weights(s: Source) -> Iterator[Check]:
    changes = source.weight_changes(s.root)
    names = [c.rpartition(".")[2] for c in changes]
    missing = [way for way in WAYS if not any(way in name for name in names)]
    yield Check("weight changes that are hooked", not missing, ", ".join(missing or names))
    # Whoever else calls the model's load_weights in a worker goes through one of them.
    folder = s.root / "srt/managers"
    direct = [p.name for p in folder.rglob("*.py") if ".load_weights(" in p.read_text("utf-8")]
    yield Check("no other way to load weights", not direct, ", ".join(direct) or "none")
    updater = s.text("model_executor/model_runner_components/weight_updater.py")
    knows = not updater or "get_model_runner: " in updater
    yield Check("the weight updater knows its runner", knows, str(knows))


def _batch(s: Source) -> Iterator[Check]:
    tree = s.tree("model_executor/forward_batch_info.py")
    missing = BATCH - fields(named(tree, "ForwardBatch"))
    yield Check("fields of ForwardBatch", not missing, ", ".join(sorted(missing)) or "all")
    modes = fields(named(tree, "ForwardMode"))
    yield Check("ForwardMode", modes >= {"EXTEND", "MIXED"}, ", ".join(sorted(modes)))


def _http(s: Source) -> Iterator[Check]:
    tree = s.tree("entrypoints/http_server.py")
    start = parameters(named(tree, "_setup_and_run_http_server"))
    yield Check("_setup_and_run_http_server", bool(start), ", ".join(start))
    yield Check("app of the HTTP server", "app" in fields(tree), "app")
    auth = s.text("utils/auth.py")
    free = sorted(set(re.findall(r'path\.startswith\("(/\w+)"\)', auth)))
    yield Check("paths free of the API key", "/hslake" not in free and bool(free), ", ".join(free))


def _models(s: Source) -> Iterator[Check]:
    models = source.Models(s.root)
    for name in ARCHITECTURES:
        body = models.body(name)
        kind = "packed" if "AuxHiddenStatePacker(" in body else "list"
        whole = bool(models.captures(name)) and "self.norm" in body and "self.layers" in body
        yield Check(f"capture of {name}", whole, kind)
    wrapper = "self.language_model = DeepseekV3ForCausalLM(" in models.body(ARCHITECTURES[2])
    yield Check("Kimi's language_model", wrapper, str(wrapper))
    able = sum(models.captures(a) is True for a in models.architectures)
    yield Check("architectures with a capture", None, f"{able} of {len(models.architectures)}")


def _ranks(s: Source) -> Iterator[Check]:
    context = s.text("runtime_context.py")
    ranks = {n for n in ("attn_tp_rank", "attn_dp_rank", "attn_cp_rank") if n in context}
    if "def get_parallel(" in context and len(ranks) == 3:
        yield Check("ranks", True, "runtime_context.get_parallel()")
        return
    old = s.tree("layers/dp_attention.py")
    names = ("get_attention_tp_rank", "get_attention_dp_rank")
    whole = all(isinstance(named(old, n), ast.FunctionDef) for n in names)
    yield Check("ranks", whole, "layers.dp_attention" if whole else "none")


def _options(s: Source) -> Iterator[Check]:
    known = source.options(s.root)
    yield Check("options could be read", len(known) > 300, str(len(known)))
    graphs = versions.no_prefill_graph_flags(s.version)[0]
    for option in (*ADDED, graphs):
        yield Check(f"option {option}", option in known, known.get(option, "unknown"))
    yield Check("option --watchdog-timeout", "--watchdog-timeout" in known, "known")
    rules = refusals(versions.parse(s.version))
    refused = [o for rule in rules for o in rule.options if o in known]
    yield Check("refused options that it knows", len(refused) > 15, f"{len(refused)}")
    # Some only stand for another option by now, and set that one.
    checked = {rule.attribute for rule in rules} | {"cuda_graph_backend_prefill"}
    wrong = [
        f"{option} sets {known[option]}"
        for rule in rules
        for option in rule.options
        if option in known
        and known[option] not in checked
        and "--" + known[option].replace("_", "-") not in rule.options
    ]
    yield Check("refused options set what is checked", not wrong, "; ".join(wrong) or "all")


def _numbers(s: Source) -> Iterator[Check]:
    found = re.findall(r"chunked_prefill_size // (?:self\.|cfg\.)(\w+)", s.arguments)
    divided = [d for d in found if d.endswith("dp_size")]
    yield Check("DP attention divides the chunk by", bool(divided), ", ".join(divided))
    watchdog = re.search(r"watchdog_timeout: [^\n]*?(?:\[.*?\])? = (\d+)", s.arguments, re.S)
    yield Check("watchdog seconds", None, watchdog[1] if watchdog else "unknown")


def main(folders: list[str]) -> int:
    """Print the checks of every folder, failures marked; 1 when there is one."""
    failed = 0
    for folder in folders:
        print(f"== SGLang {Source(Path(folder)).version or '?'}")
        for one in check(Path(folder)):
            mark = {True: "ok  ", False: "FAIL", None: "note"}[one.ok]
            failed += one.ok is False
            print(f"{mark} {one.what}: {one.found}")
    return 1 if failed or not folders else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
