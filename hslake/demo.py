"""`hslake demo`: the whole pipeline on this machine, each step through the command's own function.

    create, plan, serve + preflight + extract (or capture-hf), compact, verify, query, audit, load,
    train

The corpus and the draft head are the repository's examples; this module only strings them together.
"""

import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

import hslake
from hslake import query
from hslake.audit import audit
from hslake.compact import compact
from hslake.demoreport import Check, DemoReport, Show
from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.plan import plan_files
from hslake.progress import Progress
from hslake.units import format_bytes, format_count
from hslake.verify import verify

ENGINES = ("sglang", "hf")
DTYPE = "bfloat16"
CHUNK = 512  # prefill chunk of the server: long samples arrive in several forwards
CONCURRENCY = 4
TRAIN_SECONDS = 110.0
PART_TOKENS = 32_768
MAX_PARTS = 3
READY_S = 180.0


def run_demo(
    directory: str | Path = ".demo",
    *,
    engine: str = "sglang",
    model: str | Path | None = None,
    server_python: str | Path | None = None,
    train_seconds: float = TRAIN_SECONDS,
    limit: int | None = None,
    console: Console | None = None,
) -> DemoReport:
    """Run the pipeline in a fresh folder `directory`/run-NNN; nothing that exists is touched.

    `model` is the Hugging Face folder of the target (default: `directory`/model), `server_python`
    the interpreter of the environment with SGLang (engine "sglang" only), `limit` bounds the
    samples (for a quick look). Raises CheckFailed when a step's own check says no, Missing when
    examples, model or server are not there.
    """
    start = time.monotonic()
    if engine not in ENGINES:
        raise InvalidInput(f"engine: found {engine!r}, expected one of {', '.join(ENGINES)}")
    model_dir = _model_dir(Path(directory), model)
    corpus, training = _example("examples.corpus"), _example("examples.eagle3.train")
    if engine == "sglang":
        python = _server_python(server_python)
    show = Show(console or Console())
    run = _fresh_folder(Path(directory))
    lake_url, checks = str(run / "lake"), []

    with show.phase("create", "a lake for the target model"):
        lake = hslake.create(
            lake_url, model_config=model_dir / "config.json", capture="eagle3", dtype=DTYPE
        )
        show.note(f"{lake_url}: streams {', '.join(lake.spec.streams)}, {lake.spec.dtype}")

    with show.phase("plan", "real text from this Python installation, tokenised"):
        samples = corpus.build_corpus(model_dir)
        samples = samples if limit is None else _some(samples, limit)
        corpus.write_jsonl(samples, run / "corpus.jsonl")
        planned = plan_files(lake_url, [run / "corpus.jsonl"], progress=Progress)
        show.note(f"{planned.added} samples, {format_count(planned.tokens)} tokens")

    with _staging(run, lake.spec.bytes_per_token) as staging:
        if engine == "sglang":
            checks.append(_through_server(show, run, lake_url, model_dir, staging, python))
        else:
            _through_transformers(show, lake_url, model_dir, staging)
        with (
            show.phase("compact", "staging -> lake"),
            Progress(planned.tokens, "compact (tokens)") as bar,
        ):
            moved = compact(lake_url, [staging], progress=bar)
            show.note(f"{moved.samples} samples in {moved.segments} segments")

    checks += _checks(show, lake_url)
    coverage, growth = _reports(show, run, lake_url)
    _load(show, lake_url)
    with show.phase("train", "an EAGLE-3 draft head on these states"), _quiet("hslake.torch"):
        trained = training.train(
            lake_url,
            model_dir,
            training.Settings(seconds=train_seconds),
            out=run / "draft.safetensors",
            progress=Progress,
        )
        show.note(f"{trained.updates} updates, {trained.epochs:.1f} epochs, {trained.dtype}")

    report = DemoReport(
        engine=engine,
        lake=lake_url,
        samples=coverage[-1]["committed"],
        tokens=growth.committed_tokens,
        raw_bytes=growth.raw_bytes,
        stored_bytes=growth.stored_bytes,
        ratio=growth.ratio,
        coverage=coverage,
        checks=checks,
        train_loss_before=trained.mean_loss(last=False),
        train_loss_after=trained.mean_loss(last=True),
        validation_loss_before=trained.before.loss[0],
        validation_loss_after=trained.after.loss[0],
        agreement_before=trained.before.agreement,
        agreement_after=trained.after.agreement,
        updates=trained.updates,
        epochs=trained.epochs,
        draft=str(run / "draft.safetensors"),
        seconds=time.monotonic() - start,
        phases=show.phases,
    )
    show.summary(report)
    return report


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Errors only from a logger, for a while: small batches are meant, and that is no news here."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- steps ------------------------------------------------------------------------------------


def _through_server(
    show: Show, run: Path, lake_url: str, model_dir: Path, staging: Path, python: Path
) -> Check:
    """Serve, preflight, extract. The server stops before the machine's cores are needed again."""
    from hslake_sglang.process import ServerProcess

    from hslake.extract import ExtractOptions, extract
    from hslake.extract.drive import Limits
    from hslake.preflight import preflight

    cpu_server = _example("examples.sglang_cpu.cpu_server")
    server = ServerProcess.for_lake(
        lake_url,
        staging,
        cpu_server.args(model_dir, chunk=CHUNK),
        log=run / "server.log",
        python=python,
        env=cpu_server.env(os.cpu_count() or 1),
        part_tokens=PART_TOKENS,
        max_parts=MAX_PARTS,
    )
    try:
        what = f"a real SGLang server on the CPU with the dump hook, prefill chunk {CHUNK}"
        with show.phase("serve", what):
            with Progress(None, "start the server"):
                server.start().wait_ready(READY_S)
            show.note(f"{server.url}, log {server.log}")
        with show.phase("preflight", "go or no-go before a long run"):
            go = preflight(
                lake_url,
                [server.url],
                staging=[staging],
                model=model_dir,
                limits=Limits(requests=CONCURRENCY),
                progress=Progress,
            )
            for check in go.warnings:
                show.note(f"warning: {check.name}: {check.found}")
            if not go.passed:
                no = go.failures[0]
                raise CheckFailed(f"preflight says no-go: {no.name}: {no.found}; {no.todo}")
        with show.phase("extract", "the plan through the server into staging"):
            options = ExtractOptions(limits=Limits(requests=CONCURRENCY))
            done = extract(lake_url, [server.url], options, progress=Progress)
            if not done.passed:
                raise CheckFailed(done.message)
            rate = done.captured_tokens / done.seconds
            show.note(f"{done.captured} samples, {rate:.0f} tokens/s, {done.retried} retried")
    finally:
        server.stop()
    return Check("preflight", sum(c.result == "pass" for c in go.checks), len(go.checks))


def _through_transformers(show: Show, lake_url: str, model_dir: Path, staging: Path) -> None:
    from hslake.torch.capture_hf import capture_hf

    with show.phase("capture-hf", "the plan through Hugging Face transformers into staging"):
        done = capture_hf(lake_url, model_dir, staging, progress=Progress)
        show.note(f"{done.captured} samples, {done.tokens / done.seconds:.0f} tokens/s")


def _checks(show: Show, lake_url: str) -> list[Check]:
    with show.phase("verify", "decode every sample, recompute every checksum"):
        tokens = query.run(lake_url, "select sum(length)::bigint as n from samples").to_pylist()
        with Progress(tokens[0]["n"], "verify (tokens)") as bar:
            found = verify(lake_url, "full", progress=bar)
        if not found.ok:
            first = found.damage[0]
            raise CheckFailed(f"verify: segment {first.segment_id}: {first.what}")
    rows = query.run(lake_url, "integrity").to_pylist()
    failing = [r for r in rows if r["failures"]]
    if failing:
        raise CheckFailed(f"integrity: {failing[0]['check']}: {failing[0]['failures']} samples")
    return [
        Check("verify", found.samples, found.samples),
        Check("integrity", len(rows), len(rows)),
    ]


def _reports(show: Show, run: Path, lake_url: str) -> tuple[list[dict[str, Any]], Any]:
    with show.phase("query", "coverage by source and split"):
        coverage = query.run(lake_url, "coverage").to_pylist()
        for row in coverage:
            show.note(
                f"{row['source']:8} {row['split']:10} {row['committed']:4} of {row['planned']:4}"
                f" samples, {format_count(row['committed_tokens']):>7} tokens"
            )
        if coverage[-1]["missing"]:
            raise CheckFailed(f"{coverage[-1]['missing']} planned samples are not in the lake")
    with show.phase("audit", "bytes on disk against the forecast"):
        growth = audit(lake_url)
        show.note(f"{format_bytes(growth.stored_bytes)} stored, ratio {growth.ratio:.3f}")
    return coverage, growth


def _load(show: Show, lake_url: str) -> None:
    """One whole epoch through the loader: every training sample exactly once."""
    from hslake.torch import HiddenStateDataset, HiddenStateLoader

    with show.phase("load", "one epoch of padded batches from the lake"):
        dataset = HiddenStateDataset(lake_url, split="train")
        loader = HiddenStateLoader(dataset, tokens_per_batch=4096, layout="padded")
        seen: list[str] = []
        tokens, start = 0, time.monotonic()
        with Progress(len(loader), "load") as bar:
            for batch in loader:
                seen += batch["sample_ids"]
                tokens += int(batch["attention_mask"].sum())
                bar.advance(1)
        if len(seen) != len(dataset) or len(set(seen)) != len(seen):
            raise CheckFailed(f"an epoch gave {len(seen)} samples of {len(dataset)}")
        rate = tokens / (time.monotonic() - start)
        show.note(
            f"{len(seen)} samples in {len(loader)} batches, {format_count(round(rate))} tokens/s"
        )


def _some(samples: list[Any], limit: int) -> list[Any]:
    """About `limit` of the samples, at least one of each source and split."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        groups.setdefault((sample.source, sample.split), []).append(sample)
    share = min(1.0, limit / len(samples))
    return [s for group in groups.values() for s in group[: max(1, round(len(group) * share))]]


# --- surroundings -----------------------------------------------------------------------------


def _model_dir(base: Path, model: str | Path | None) -> Path:
    folder = Path(model) if model is not None else base / "model"
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise Missing(
            f"{folder} is no Hugging Face model folder (no config.json or tokenizer.json): run "
            "`make demo` in the repository, which makes one, or name yours with --model"
        )
    return folder.absolute()


def _server_python(given: str | Path | None) -> Path:
    # Not resolved: an environment's interpreter is a link, and means nothing behind it.
    path = Path(given).absolute() if given is not None else None
    if path is None or not path.is_file():
        raise Missing(
            f"engine sglang needs the interpreter of an environment with SGLang, found {path}: run "
            "`make demo`, which makes one, or name it with --server-python, or use --engine hf"
        )
    return path


def _example(name: str) -> Any:
    """A module of the repository's examples, which are not part of the installed package."""
    root = Path(hslake.__file__).resolve().parents[1]
    if not (root / "examples" / "eagle3" / "train.py").is_file():
        raise Missing(
            "the demo uses the repository's examples/, which an installed hslake does not carry: "
            "run it from a checkout (`make demo`, or `pip install -e .`)"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} cannot be imported ({error}): pip install 'hslake[hf]'") from error


def _fresh_folder(base: Path) -> Path:
    """`base`/run-NNN, made now; earlier runs stay for comparison."""
    base.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = base / f"run-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise InvalidInput(f"{base} holds 9,999 runs: remove some")


@contextmanager
def _staging(run: Path, bytes_per_token: int) -> Iterator[Path]:
    """A staging directory, in RAM where there is room (containers often have 64 MB there)."""
    need, shm = 2 * MAX_PARTS * PART_TOKENS * bytes_per_token, Path("/dev/shm")
    in_ram = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > need
    with tempfile.TemporaryDirectory(prefix="hslake-demo-", dir=shm if in_ram else run) as folder:
        yield Path(folder)
