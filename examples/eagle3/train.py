"""Train an EAGLE-3 draft head from a lake.

    python -m examples.eagle3.train LAKE --model MODEL_DIR --minutes 2 --out draft.safetensors

The lake gives everything but the frozen embedding and LM head: batches through the loader, the
draft vocabulary from the plan, the validation split from the manifest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hslake
from hslake.errors import InvalidInput
from hslake.progress import Progress, ProgressMaker, Silent
from hslake.torch import HiddenStateDataset, HiddenStateLoader

from .draft import DraftVocab, Eagle3Draft, count_supervised, load_target_head, target_config
from .evaluate import Evaluation, evaluate
from .loss import Batch, ttt_loss

WARMUP = 0.03  # of the budget
FLOOR = 0.05  # of the peak learning rate, at the end


@dataclass(frozen=True)
class Settings:
    """What `train` can be told. The budget is `seconds` of training, or `steps` when given."""

    seconds: float = 100.0
    steps: int | None = None
    tokens_per_batch: int = 640
    ttt_steps: int = 3
    draft_vocab_size: int = 4096
    learning_rate: float = 3e-3
    seed: int = 0


@dataclass(frozen=True)
class TrainReport:
    """What happened: validation before and after, and the training loss of every update."""

    before: Evaluation
    after: Evaluation
    updates: int
    epochs: float
    tokens: int
    seconds: float
    version: int
    parameters: int
    dtype: str
    losses: list[float] = field(repr=False)

    def mean_loss(self, last: bool) -> float:
        """Mean training loss (step 0, nats) of the first or the last tenth of the updates."""
        n = max(1, len(self.losses) // 10)
        part = self.losses[-n:] if last else self.losses[:n]
        return sum(part) / max(1, len(part))


def matmul_dtype() -> torch.dtype:
    """bfloat16 where this machine multiplies it clearly faster than float32, else float32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    took = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        a @ b
        start = time.perf_counter()
        for _ in range(5):
            a @ b
        took[dtype] = time.perf_counter() - start
    return torch.bfloat16 if took[torch.bfloat16] * 1.3 < took[torch.float32] else torch.float32


def keep_freed_memory() -> None:
    """Tell glibc to reuse large freed blocks; else every activation is mapped and zeroed anew.

    About a third of the training time on two cores. Elsewhere (no glibc) it does nothing.
    """
    mmap_max, trim_threshold, top_pad = -4, -1, -2  # from malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 256 << 20)


def make_optimizers(draft: Eagle3Draft, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it went further than AdamW in so few updates. AdamW for the norms."""
    matrices = [p for p in draft.parameters() if p.ndim == 2]
    rest = [p for p in draft.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, weight_decay=0.0),
    ]


def schedule(done: float) -> float:
    """Share of the peak learning rate when `done` in [0, 1] of the budget is spent."""
    warm = min(1.0, (done + 0.002) / WARMUP)
    return warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def make_draft(
    lake: Any, model_dir: str | Path, settings: Settings, dtype: torch.dtype
) -> Eagle3Draft:
    """An untrained draft for this lake's model; vocabulary from the plan's training split."""
    boundaries = len(lake.spec.boundaries)
    config = target_config(model_dir, settings.draft_vocab_size, boundaries)
    if config.hidden_size != lake.spec.hidden_size:
        raise InvalidInput(
            f"{model_dir} has hidden size {config.hidden_size}, the lake holds "
            f"{lake.spec.hidden_size}: give the folder of the model the lake was captured from"
        )
    if not (boundaries and lake.spec.has_final):
        raise InvalidInput(
            f"the lake holds {', '.join(lake.spec.streams)}; EAGLE-3 needs boundaries and `final`: "
            "create the lake with --capture eagle3"
        )
    rows = lake.sql("select input_ids, loss_mask from plan where split = 'train'").fetchall()
    vocab = DraftVocab.from_counts(
        count_supervised(rows, config.vocab_size), config.draft_vocab_size
    )
    torch.manual_seed(settings.seed)
    return Eagle3Draft(config, load_target_head(model_dir), vocab, dtype)


def _loader(lake: Any, split: str, settings: Settings) -> HiddenStateLoader:
    return HiddenStateLoader(
        HiddenStateDataset(lake, split=split),
        tokens_per_batch=settings.tokens_per_batch,
        layout="padded",
        seed=settings.seed,
        oversize="own_batch",
    )


def _epochs(loader: HiddenStateLoader) -> Iterator[Batch]:
    """Batches of epoch after epoch, without end; each iteration of the loader is the next epoch."""
    while True:
        yield from loader


def train(
    lake_url: str,
    model_dir: str | Path,
    settings: Settings = Settings(),
    *,
    version: int | None = None,
    out: str | Path | None = None,
    progress: ProgressMaker = Silent,
) -> TrainReport:
    """Train a draft head on the lake's training split and judge it on its validation split.

    Reads one pinned version of the lake. Writes the draft to `out` when given. Progress counts
    seconds (or updates) and notes the loss.
    """
    keep_freed_memory()
    lake = hslake.open(lake_url, version=version)
    dtype = matmul_dtype()
    draft = make_draft(lake, model_dir, settings, dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16)
    validation = list(_loader(lake, "validation", settings))
    with autocast:
        before = evaluate(draft, validation, settings.ttt_steps)

    optimizers = make_optimizers(draft, settings.learning_rate)
    loader = _loader(lake, "train", settings)
    samples = lake.sql("select count(*) from samples where split = 'train'").fetchall()[0][0]
    losses: list[float] = []
    tokens, seen, start, shown = 0, 0, time.monotonic(), 0
    total = settings.steps or round(settings.seconds)
    with progress(total, "train (updates)" if settings.steps else "train (seconds)") as bar:
        for batch in _epochs(loader):
            spent = time.monotonic() - start
            done = len(losses) / settings.steps if settings.steps else spent / settings.seconds
            if done >= 1.0:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * schedule(done)
            with autocast:
                loss, per_step = ttt_loss(draft, batch, settings.ttt_steps)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            draft.zero_grad()
            losses.append(per_step[0])
            tokens += int(batch["attention_mask"].sum())
            seen += len(batch["input_ids"])
            now = len(losses) if settings.steps else min(total, int(time.monotonic() - start))
            bar.advance(now - shown)
            shown = now
            bar.note(f"loss {per_step[0]:.2f}")
    seconds = time.monotonic() - start
    with autocast:
        after = evaluate(draft, validation, settings.ttt_steps)
    if out is not None:
        draft.save(out)
    return TrainReport(
        before=before,
        after=after,
        updates=len(losses),
        epochs=seen / samples,
        tokens=tokens,
        seconds=seconds,
        version=lake.version,
        parameters=sum(p.numel() for p in draft.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        losses=losses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 draft head from a lake.")
    parser.add_argument("lake", help="lake path or URL")
    parser.add_argument("--model", required=True, help="folder of the target (config, safetensors)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=2.0, help="training time (default 2)")
    budget.add_argument("--steps", type=int, help="number of updates instead of a time")
    parser.add_argument("--tokens-per-batch", type=int, default=Settings.tokens_per_batch)
    parser.add_argument("--ttt-steps", type=int, default=Settings.ttt_steps)
    parser.add_argument("--draft-vocab-size", type=int, default=Settings.draft_vocab_size)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--version", type=int, help="lake version to pin (default: newest)")
    parser.add_argument("--out", default="draft.safetensors", help="where to save the draft")
    args = parser.parse_args()
    settings = Settings(
        seconds=args.minutes * 60,
        steps=args.steps,
        tokens_per_batch=args.tokens_per_batch,
        ttt_steps=args.ttt_steps,
        draft_vocab_size=args.draft_vocab_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    report = train(
        args.lake, args.model, settings, version=args.version, out=args.out, progress=Progress
    )
    print(
        f"lake version {report.version}: {report.updates} updates, {report.epochs:.1f} epochs, "
        f"{report.tokens} tokens in {report.seconds:.0f} s ({report.dtype})"
    )
    print(f"training loss {report.mean_loss(False):.3f} -> {report.mean_loss(True):.3f}")
    for name, e in (("untrained", report.before), ("trained", report.after)):
        shares = "  ".join(f"{a:.1%}" for a in e.agreement)
        print(f"validation, {name:9}: loss {e.loss[0]:.3f}, agreement per step {shares}")
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
