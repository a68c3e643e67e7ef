"""What people do today, as a plugin of the `torch_save` server: in the forward pass, one file per
request with the concatenated states, written by torch.save to /dev/shm.

Takes the same streams as hslake's hook, through the same taps.
"""

import os
from pathlib import Path
from typing import Any

import torch
from hslake_sglang import ranks
from hslake_sglang.taps import Taps, find_logits_processors, logits_inputs

from benchmarks.hook.settings import PREFIX
from hslake.spec import LakeSpec

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_ATTRIBUTE = "_bench_saver"


class Saver:
    """Saves the states of one worker's forwards."""

    def __init__(self, taps: Taps, folder: Path | None) -> None:
        self.taps, self.folder = taps, folder
        self.batch: Any = None

    def before_forward(self, batch: Any) -> None:
        """Keep the live batch: only it has the request ids."""
        name = getattr(batch.forward_mode, "name", "")
        prefill = name in ("EXTEND", "MIXED") and batch.extend_seq_lens_cpu is not None
        self.batch = batch if prefill else None
        if prefill:
            self.taps.listen()

    def before_logits(self, hidden: Any, aux: Any) -> None:
        """One file for each request of the forward."""
        batch, self.batch = self.batch, None
        if batch is None:
            return
        lengths = [int(n) for n in batch.extend_seq_lens_cpu]
        streams = self.taps.collect(hidden, aux, sum(lengths))
        row = 0
        for i, n in enumerate(lengths):
            rid, prefix = str(batch.rids[i]), int(batch.extend_prefix_lens_cpu[i])
            if self.folder is not None and rid.startswith(PREFIX) and n:
                item = {
                    "input_ids": batch.input_ids[row : row + n].cpu(),
                    "hidden_states": torch.cat([s[row : row + n] for s in streams], -1).cpu(),
                }
                torch.save(item, self.folder / f"{rid}.{prefix}.pt")
            row += n
        self.taps.rest()


def after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ModelRunner.load_model."""
    spec = LakeSpec.from_json(os.environ["BENCH_SPEC"], where="BENCH_SPEC")
    folder = Path(os.environ["BENCH_SAVE_TO"]) if ranks.of(runner).writes else None
    saver = Saver(Taps(runner.model, spec), folder)
    for processor in find_logits_processors(runner.model):
        processor.register_forward_pre_hook(
            lambda module, args, kwargs: saver.before_logits(*logits_inputs(args, kwargs)),
            with_kwargs=True,
        )
    setattr(runner, _ATTRIBUTE, saver)


def before_forward(runner: Any, forward_batch: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ModelRunner.forward."""
    saver = getattr(runner, _ATTRIBUTE, None)
    batch = forward_batch if forward_batch is not None else kwargs.get("forward_batch")
    if saver is not None and batch is not None:
        saver.before_forward(batch)


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.load_model", after_load_model, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", before_forward, HookType.BEFORE)
