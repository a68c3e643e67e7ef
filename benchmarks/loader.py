"""Loader against what trainers use today: torch .pt and safetensors files, one per sample.

    python benchmarks/loader.py                       # 7168 wide, made-up bfloat16 states
    python benchmarks/loader.py --npz states.npz      # real states, laid side by side to the width

Every contender reads the same samples in the same batches, in one run, from the page cache, and
hands out the same padded tensors. GB/s counts useful bytes of states (no padding) over an epoch;
worker processes are started beforehand and kept. Writes benchmarks/results/loader.json.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hslake.torch import HiddenStateDataset, HiddenStateLoader, collate_batch  # noqa: E402
from hslake.torch.collate import from_bits  # noqa: E402
from tests.lakes import make_lake  # noqa: E402


class Files(Dataset):
    """One file per sample, as SpecForge, Model-Optimizer and speculators lay them out."""

    def __init__(self, folder: Path, ids: list[str], kind: str) -> None:
        self.folder, self.ids, self.kind = folder, ids, kind

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        path = self.folder / f"{self.ids[index]}.{self.kind}"
        if self.kind == "pt":
            item = torch.load(path, weights_only=True)
        else:
            item = load_file(path)
        return {**item, "sample_id": self.ids[index]}


def states_source(args: argparse.Namespace) -> Callable[[np.random.Generator, int], np.ndarray]:
    """A function (rng, length) -> bit patterns uint16 [stream, length, hidden]."""
    shape = (args.streams, args.hidden)
    if args.npz:
        real = np.load(args.npz)["hidden_states"]  # uint16 [token, stream, width]

        def from_real(rng: np.random.Generator, length: int) -> np.ndarray:
            copies = -(-shape[1] // real.shape[2])
            out = np.empty((shape[0], length, copies * real.shape[2]), np.uint16)
            for k in range(copies):
                rows = rng.integers(0, len(real), length)  # real vectors, side by side
                part = real[rows][:, np.arange(shape[0]) % real.shape[1]]
                out[:, :, k * real.shape[2] : (k + 1) * real.shape[2]] = part.transpose(1, 0, 2)
            return np.ascontiguousarray(out[:, :, : shape[1]])

        return from_real

    def made_up(rng: np.random.Generator, length: int) -> np.ndarray:
        # Normal values whose scale differs by channel: exponents spread about as in real states.
        scale = np.exp(np.random.default_rng(1).normal(0, 0.6, shape[1])).astype(np.float32)
        out = np.empty((shape[0], length, shape[1]), np.uint16)
        for stream in range(shape[0]):
            values = rng.standard_normal((length, shape[1]), dtype=np.float32) * scale
            out[stream] = values.view(np.uint32) >> np.uint32(16)
        return out

    return made_up


def write_files(folder: Path, made: object) -> None:
    """The same samples as .pt and .safetensors files."""
    folder.mkdir()
    for name, sample in made.samples.items():  # type: ignore[attr-defined]
        wide = np.concatenate(list(sample.states[:-1]), axis=1)
        item = {
            "input_ids": torch.tensor(sample.input_ids),
            "loss_mask": torch.tensor(sample.loss_mask),
            "hidden_state": from_bits(wide, "bfloat16"),
            "target": from_bits(np.ascontiguousarray(sample.states[-1]), "bfloat16"),
        }
        torch.save(item, folder / f"{name}.pt")
        save_file(item, folder / f"{name}.safetensors")


def folder_bytes(folder: Path, pattern: str) -> int:
    """Bytes of the files below `folder` that match."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def epoch_seconds(loader: Iterable[dict], samples: int) -> float:
    """Seconds that one epoch takes; the same epoch every time."""
    if isinstance(loader, HiddenStateLoader):
        loader.set_epoch(0)
        loader.reset()
    start = time.perf_counter()
    seen = sum(len(batch["sample_ids"]) for batch in loader)
    seconds = time.perf_counter() - start
    if seen != samples:
        raise SystemExit(f"{seen} samples seen, expected {samples}")
    return seconds


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = models[0].split(":", 1)[1].strip() if models else cpu
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 1e9, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system() + " " + platform.release(),
    }


def main() -> None:
    """Run the comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--mean-length", type=int, default=300)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2, help="threads and processes alike")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codec", default="standard")
    parser.add_argument("--npz", help="hidden_states uint16 [token, stream, width]")
    parser.add_argument("--dir", help="where to put the data (default: a temporary folder)")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/loader.json"))
    args = parser.parse_args()
    found = machine()
    folder = Path(tempfile.mkdtemp(prefix="hslake-bench-", dir=args.dir))
    try:
        results = compare(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {"machine": found, "settings": settings_of(args), **results}
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    show(report)


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """The options, without paths of this machine."""
    kept = {k: v for k, v in vars(args).items() if k not in ("npz", "dir", "out")}
    return {**kept, "states": "real" if args.npz else "made up"}


def compare(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Make the data, run every contender `repeats` times in turn, keep the best of each."""
    rng = np.random.default_rng(0)
    lengths = np.clip(
        rng.lognormal(np.log(args.mean_length) - 0.18, 0.6, args.samples), 20, args.tokens_per_batch
    )
    made = make_lake(
        folder / "lake",
        lengths=lengths.astype(int).tolist(),
        hidden=args.hidden,
        streams=args.streams,
        codec=args.codec,
        states=states_source(args),
    )
    write_files(folder / "files", made)
    ds = HiddenStateDataset(made.lake)
    ids = ds.refs["sample_id"].to_pylist()
    useful = sum(s.states.nbytes for s in made.samples.values())

    def loader(layout: str = "padded") -> HiddenStateLoader:
        return HiddenStateLoader(
            ds, tokens_per_batch=args.tokens_per_batch, threads=args.workers, layout=layout
        )

    plan = loader().plan
    batches = [plan.batch(i).tolist() for i in range(len(plan))]

    def workers(data: Dataset, count: int, **more: str) -> DataLoader:
        return DataLoader(
            data,
            batch_sampler=batches,
            num_workers=count,
            collate_fn=collate_batch,
            persistent_workers=count > 0,
            **more,
        )

    pt, safe = (Files(folder / "files", ids, kind) for kind in ("pt", "safetensors"))
    contenders: dict[str, Iterable[dict]] = {
        "hslake loader, padded": loader(),
        "hslake loader, packed": loader("packed"),
        "torch .pt, DataLoader workers": workers(pt, args.workers),
        "torch .pt, in process": workers(pt, 0),
        "safetensors, DataLoader workers": workers(safe, args.workers),
        "safetensors, in process": workers(safe, 0),
        "hslake dataset, spawned workers": workers(
            ds, args.workers, multiprocessing_context="spawn"
        ),
    }
    best = dict.fromkeys(contenders, float("inf"))
    for repeat in range(args.repeats + 1):
        for name, contender in contenders.items():
            seconds = epoch_seconds(contender, len(ids))
            if repeat:  # the first epoch starts workers and fills caches
                best[name] = min(best[name], seconds)
    base = best["torch .pt, DataLoader workers"]
    stored = folder_bytes(Path(made.lake.url) / "segments", "*")
    return {
        "samples": len(ids),
        "tokens": int(ds.lengths.sum()),
        "batches": len(batches),
        "useful_bytes": useful,
        "padded_fraction": round(1 - float(ds.lengths.sum()) / slots_of(ds, batches), 4),
        "stored_ratio": {
            "hslake": round(stored / useful, 4),
            "pt": round(folder_bytes(folder / "files", "*.pt") / useful, 4),
            "safetensors": round(folder_bytes(folder / "files", "*.safetensors") / useful, 4),
        },
        "contenders": {
            name: {
                "seconds": round(seconds, 4),
                "gb_per_s": round(useful / seconds / 1e9, 3),
                "times_pt_workers": round(base / seconds, 2),
            }
            for name, seconds in best.items()
        },
    }


def slots_of(ds: HiddenStateDataset, batches: list[list[int]]) -> int:
    """Token slots of all padded batches."""
    return sum(len(b) * int(ds.lengths[b].max()) for b in batches)


def show(report: dict) -> None:
    """Print the result as a table."""
    ratio = report["stored_ratio"]
    table = Table(title=f"{report['samples']} samples, {report['useful_bytes'] / 1e9:.2f} GB")
    for column in ("contender", "GB/s", "x .pt with workers", "seconds"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, row in report["contenders"].items():
        values = (row["gb_per_s"], row["times_pt_workers"], row["seconds"])
        table.add_row(name, *(f"{v:.2f}" for v in values))
    console = Console()
    console.print(table)
    console.print(f"stored / raw: hslake {ratio['hslake']}, .pt {ratio['pt']}; from the page cache")


if __name__ == "__main__":
    main()
