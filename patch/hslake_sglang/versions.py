"""SGLang versions: which ones the hook knows, and how flags are called in them."""

import importlib.metadata
import re

OLDEST = (0, 5, 11)  # the first with the plugin entry point
BEYOND = (0, 6, 0)
TRIED = ("0.5.15.post1", "0.5.23")


def parse(version: str) -> tuple[int, int, int]:
    """`0.5.15.post1` -> (0, 5, 15). Raises ValueError on text that is not a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if not match:
        raise ValueError(f"{version!r} is not a version number")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def problem(version: str) -> str | None:
    """Why the hook cannot work with this SGLang version, or None."""
    try:
        found = parse(version)
    except ValueError:
        return f"cannot tell the SGLang version from {version!r}; install a released SGLang"
    if OLDEST <= found < BEYOND:
        return None
    first, last = (".".join(map(str, v)) for v in (OLDEST, BEYOND))
    return (
        f"SGLang {version} is not supported: the hook needs a version from {first} to below "
        f"{last} (tried: {', '.join(TRIED)}); install one of these"
    )


def no_prefill_graph_flags(version: str) -> list[str]:
    """The arguments that switch prefill CUDA graphs off in this version.

    Under such a graph the logits processor sees a rebuilt batch without request ids.
    """
    if parse(version) < (0, 5, 14):
        return ["--disable-piecewise-cuda-graph"]
    return ["--cuda-graph-backend-prefill", "disabled"]


def installed() -> str:
    """Version of the SGLang in this interpreter; "" when there is none."""
    return _version("sglang")


def hook() -> str:
    """Version of the hook, which is hslake's; "" when hslake is not installed."""
    return _version("hslake")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
