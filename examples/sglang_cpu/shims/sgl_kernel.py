"""Stand-in for the `sgl_kernel` package, which has no CPU build on PyPI.

SGLang's CPU engine imports its names at module scope. Without AMX every compute path that matters
(norm, rope, activation, attention with torch_native) falls back to PyTorch by itself; the one
helper that has no fallback is written here.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of `req_to_token`."""
    offset = 0
    for row, first, last in zip(
        req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True
    ):
        count = last - first
        slots = out_cache_loc[offset : offset + count]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        offset += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU kernel in this stand-in")

    missing.__name__ = name
    return missing
