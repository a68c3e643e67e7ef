"""Which process of a parallel server this is, in every supported SGLang version."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rank:
    """Place of one worker: the writer is attention-TP rank 0 (and CP rank 0) of each DP rank."""

    attention_tp: int
    attention_cp: int
    dp: int
    tp_size: int
    dp_size: int

    @property
    def writes(self) -> bool:
        """States are complete on every attention-TP rank; exactly one of them stores them."""
        return self.attention_tp == 0 and self.attention_cp == 0


def _context() -> Any | None:
    """SGLang's parallel context (newer versions), else None."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel()
    except ImportError:
        return None


def of(runner: Any) -> Rank:
    """The Rank of SGLang's ModelRunner `runner`."""
    settings = runner.server_args
    context = _context()
    if context is not None and hasattr(context, "attn_tp_rank"):
        tp, cp = int(context.attn_tp_rank), int(getattr(context, "attn_cp_rank", 0))
        attention_dp = int(getattr(context, "attn_dp_rank", 0))
    else:
        from sglang.srt.layers import dp_attention

        tp, cp = int(dp_attention.get_attention_tp_rank()), 0
        attention_dp = int(dp_attention.get_attention_dp_rank())
    dp = attention_dp or _replica(runner, context)
    sizes = [getattr(settings, name, 1) or 1 for name in ("dp_size", "attn_dp_size")]
    return Rank(tp, cp, dp, int(getattr(settings, "tp_size", 1) or 1), max(map(int, sizes)))


def _replica(runner: Any, context: Any) -> int:
    """Rank under plain data parallelism, which runs one engine per replica. Told by the parallel
    context from 0.5.21 on, by the runner in 0.5.12 to 0.5.15, by its `ps` in 0.5.16 to 0.5.20."""
    for owner in (context, runner, getattr(runner, "ps", None)):
        rank = getattr(owner, "dp_rank", None)
        if rank is not None:
            return int(rank)
    return 0
