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
    # Plain data parallelism runs one engine per replica, whose number newer versions keep in the
    # context, older ones in the runner; within a replica there is no attention DP.
    if context is not None and hasattr(context, "attn_tp_rank"):
        tp, cp = int(context.attn_tp_rank), int(getattr(context, "attn_cp_rank", 0))
        attention_dp = int(getattr(context, "attn_dp_rank", 0))
        replica = getattr(context, "dp_rank", None)
    else:
        from sglang.srt.layers import dp_attention

        tp, cp = int(dp_attention.get_attention_tp_rank()), 0
        attention_dp = int(dp_attention.get_attention_dp_rank())
        replica = None
    if replica is None:
        replica = getattr(runner, "dp_rank", None)
    dp = attention_dp or int(replica or 0)
    sizes = [getattr(settings, name, 1) or 1 for name in ("dp_size", "attn_dp_size")]
    return Rank(tp, cp, dp, int(getattr(settings, "tp_size", 1) or 1), max(map(int, sizes)))
