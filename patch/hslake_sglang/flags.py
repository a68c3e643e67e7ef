"""What `hslake serve` adds to SGLang's arguments and what it refuses, with the reason and the fix.

Two views of one rule: `prepare` reads the argument list before SGLang starts, `check_running` reads
the server's effective settings inside the worker, which also sees what other code has decided.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hslake.errors import InvalidInput
from hslake_sglang import versions
from hslake_sglang.refusals import refusals

DEFAULT_CHUNK = 8192
MODEL = ("--model-path", "--model")
TP = ("--tp-size", "--tensor-parallel-size")
DP = ("--dp-size", "--data-parallel-size")
ATTENTION_DP = ("--attn-dp-size", "--attention-data-parallel-size")
CHUNK = "--chunked-prefill-size"
CACHE = "--kv-cache-dtype"
MEMORY = "--mem-fraction-static"
_GRAPH_BACKEND = "--cuda-graph-backend-prefill"
_NO_GRAPHS = ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph")
_GRAPH = "a prefill CUDA graph hides the batch's request ids from the hook"


def option_value(args: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for any of `names` (`--x v` or `--x=v`); "" for a bare switch."""
    found: str | None = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        else:
            following = args[i + 1] if i + 1 < len(args) else ""
            found = "" if following.startswith("--") else following
    return found


def number(args: Sequence[str], names: Sequence[str], default: int = 1) -> int:
    """The whole number given for any of `names`; `default` without one, or with something else,
    of which SGLang says what it thinks."""
    text = option_value(args, names) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else default


def spelled_out(args: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """`args` with unique abbreviations of the options in `known` written out, as argparse reads
    them: `--pp 2` is `--pp-size 2` where nothing else begins with `--pp`."""
    full = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name.startswith("--") and len(name) > 2 and name not in known:
            fits = [option for option in known if option.startswith(name)]
            if len(fits) == 1:
                arg = fits[0] + equals + value
        full.append(arg)
    return full


def config_args(config: Mapping[str, Any]) -> list[str]:
    """The arguments that a `--config` file's content stands for. SGLang puts them before those of
    the command line, so the latter win."""
    args: list[str] = []
    for key, value in config.items():
        option = "--" + str(key).replace("_", "-")
        if value is True:
            args.append(option)
        elif value is False or value == []:
            continue
        elif isinstance(value, list):
            args += [option, *map(str, value)]
        else:
            args += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return args


def prepare(
    args: Sequence[str],
    *,
    version: str,
    dtype: str,
    known: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: Collection[str] = (),
) -> list[str]:
    """SGLang's arguments with what capture needs for SGLang `version` and a lake of `dtype`.

    `known`: the options of this SGLang with their attributes (source.options), when they could be
    read. `config`: content of the `--config` file. `facts`: what makes some settings harmless
    (served.facts). Raises InvalidInput on an unsupported version and on arguments that break
    capture; all problems are listed in one message.
    """
    if problem := versions.problem(version):
        raise InvalidInput(problem)
    wrong: list[str] = []
    args = spelled_out(args, known or {})
    every = [*spelled_out(config_args(config or {}), known or {}), *args]
    unread = config is None and option_value(every, ["--config"]) is not None
    if option_value(every, MODEL) is None and not unread:
        wrong.append("--model-path is missing: name the model's folder after `--`")
    for rule in refusals(versions.parse(version), facts):
        spellings = {*rule.options, *(o for o, a in (known or {}).items() if a == rule.attribute)}
        value = option_value(every, sorted(spellings))
        if value is not None and rule.breaks(value):
            wrong.append(f"{rule.options[0]}: {rule.reason}")
    wrong += _refused_graphs(every)
    wrong += _refused_cache(every, dtype)
    more, trouble = _dtype(every, dtype)
    wrong += trouble
    chunk, trouble = _chunk(every)
    wrong += trouble
    if wrong:
        raise InvalidInput("SGLang's arguments break capture:\n  " + "\n  ".join(wrong))
    more += chunk
    if option_value(every, ["--disable-radix-cache"]) is None:
        more.append("--disable-radix-cache")
    if not _graphs_are_off(every):
        more += _without_graphs(version, known)
    return [*args, *more]


def writers(args: Sequence[str]) -> int:
    """Writers of a server with these arguments: one for each data-parallel rank."""
    return max(number(args, DP), number(args, ATTENTION_DP))


def chunk_tokens(args: Sequence[str]) -> int:
    """The most prompt tokens of one forward on one rank: under DP attention SGLang divides
    --chunked-prefill-size by the number of ranks."""
    chunk = number(args, [CHUNK], DEFAULT_CHUNK)
    shares = number(args, ATTENTION_DP)
    if option_value(args, ["--enable-dp-attention"]) is not None:
        shares = max(shares, number(args, DP))
    return max(1, chunk // max(1, shares))


def _graphs_are_off(args: Sequence[str]) -> bool:
    return option_value(args, [_GRAPH_BACKEND]) is not None or any(
        option_value(args, [name]) is not None for name in _NO_GRAPHS
    )


def _without_graphs(version: str, known: Mapping[str, str] | None) -> list[str]:
    """The arguments for no prefill graphs: those that this SGLang knows."""
    ways = [versions.no_prefill_graph_flags(version), [_GRAPH_BACKEND, "disabled"]]
    ways += [[name] for name in _NO_GRAPHS]
    return next((way for way in ways if not known or way[0] in known), [])


def _refused_graphs(args: Sequence[str]) -> list[str]:
    wrong = []
    backend = option_value(args, [_GRAPH_BACKEND])
    if backend not in (None, "disabled"):
        wrong.append(f"{_GRAPH_BACKEND} {backend}: {_GRAPH}; use `disabled`")
    config = option_value(args, ["--cuda-graph-config"])
    if config:
        try:
            prefill = json.loads(config).get("prefill", {})
        except (ValueError, AttributeError):
            return [*wrong, f"--cuda-graph-config: {config!r} is not a JSON object"]
        if isinstance(prefill, dict) and prefill.get("backend", "disabled") != "disabled":
            wrong.append(f"--cuda-graph-config prefill: {_GRAPH}; set its backend to `disabled`")
    return wrong


def _refused_cache(args: Sequence[str], lake: str) -> list[str]:
    """Keys and values that are rounded to another type than the lake's: every row attends to them,
    those of a later chunk more than others, and nothing in the lake would tell. What a model's own
    files declare comes with `auto`."""
    given = option_value(args, [CACHE])
    if given in (None, "", "auto") or {"bf16": "bfloat16"}.get(str(given), given) == lake:
        return []
    return [f"{CACHE} {given}: states would depend on rounded keys and values; use auto"]


def _dtype(args: Sequence[str], lake: str) -> tuple[list[str], list[str]]:
    names = {"half": "float16", "float": "float32"}
    given = option_value(args, ["--dtype"])
    if given in (None, "auto"):
        return ["--dtype", lake], []
    assert given is not None
    if names.get(given, given) != lake:
        return [], [f"--dtype {given}: the lake stores {lake}, never cast; use --dtype {lake}"]
    return [], []


def _chunk(args: Sequence[str]) -> tuple[list[str], list[str]]:
    given = option_value(args, [CHUNK])
    if given is None:
        return [CHUNK, str(DEFAULT_CHUNK)], []
    if number(args, [CHUNK], 0) > 0:
        return [], []
    return [], [f"{CHUNK} {given}: expected a fixed positive number, such as 8192"]


def effective(settings: Any, name: str) -> Any:
    """One setting of a running server as SGLang resolved it; None when it has no such setting.

    From 0.5.19 on the attributes of ServerArgs keep what was given, and decisions lie beside them.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolution_result

        return resolution_result(settings, name)
    except Exception:  # an older version, or a stand-in without the bookkeeping
        return getattr(settings, name, None)


def check_running(settings: Any, version: str, facts: Collection[str] = ()) -> list[str]:
    """Problems of a running server's effective settings (any object with SGLang's attribute names).

    Catches what a `--config` file, a bare `sglang serve` or SGLang itself brings past `prepare`.
    `facts` as there.
    """
    problem = versions.problem(version)
    found: dict[str, str] = {}  # by reason: SGLang may set one thing because of another
    for rule in refusals(versions.OLDEST if problem else versions.parse(version), facts):
        if rule.breaks(effective(settings, rule.attribute)):
            found.setdefault(rule.reason, rule.options[0])
    wrong = [problem] if problem else []
    wrong += [f"{option}: {reason}" for reason, option in found.items()]
    if effective(settings, "disable_radix_cache") is False:
        wrong.append("--disable-radix-cache is missing: cached rows are not computed, so not seen")
    if not problem and effective(settings, "device") == "cuda" and _has_prefill_graphs(settings):
        fix = " ".join(versions.no_prefill_graph_flags(version))
        wrong.append(f"{fix} is missing: {_GRAPH}")
    return wrong


def _has_prefill_graphs(settings: Any) -> bool:
    prefill = getattr(effective(settings, "cuda_graph_config"), "prefill", None)
    if prefill is None:
        return effective(settings, "disable_piecewise_cuda_graph") is False
    backend = getattr(prefill, "backend", "disabled")
    return str(getattr(backend, "value", backend)) != "disabled"
