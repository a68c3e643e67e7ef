"""What the dump hook costs a real SGLang server, beside what people do today.

    python benchmarks/hook_h200.py --model DIR                     # one GPU, all modes
    python benchmarks/hook_h200.py --model DIR --modes none,hslake,plain --prompts 1024 --repeats 8
    python benchmarks/hook_h200.py --model DIR --tp 2 --modes none,hslake --merge FILE --out FILE
    python benchmarks/hook_h200.py --model DIR --endurance 5000000 --staging-bytes 8e9
    python benchmarks/hook_h200.py --model DIR --endurance 5000000 --modes none,torch_save,http
    python benchmarks/hook_h200.py --model DIR --tp 2 --dp-attention 2 --port 20000 --after PID
    python benchmarks/hook_h200.py --merge A.json B.json --report-only --out FILE
    python benchmarks/hook_h200.py --smoke --model SMOLLM2 --sglang-python PYTHON   # no GPU

Prefill tokens a second of the same server, with the same flags and prompts, in four modes: `none`
(no capture), `hslake` (the hook into staging, `hslake compact --watch` beside it), `torch_save`
(torch.save per request to /dev/shm inside the forward) and `http` (return_hidden_states). A fifth,
`plain`, sends other people's requests to the servers of `hslake`: where the CPU is the bound, two
servers alike differ by more than the hook costs, and one server between its runs does not. All
servers run side by side on the same GPUs and take turns, so that a drifting clock or neighbour
meets all of them; of eight cores or more they get one half, and the load generator and the
compactor the other. After every hslake run everything it sent must be in the lake, once, and is
decoded and verified; then the segment's files are removed (in this benchmark only: disks are
small). Stops starting runs when --time-limit comes near, and says what is missing. Where a machine
is lent by the minute, two calls can start their servers together (--port apart) and measure one
after the other (--after), or each on its own GPU (CUDA_VISIBLE_DEVICES, taskset).
Writes benchmarks/results/hook_h200.json.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patch")]

from hslake_sglang.process import ServerProcess  # noqa: E402

import hslake  # noqa: E402
from benchmarks.hook import lakeside, machine, prompts, results, servers, settings  # noqa: E402
from benchmarks.hook.endurance import endurance  # noqa: E402
from benchmarks.hook.lakeside import LakeSide  # noqa: E402
from benchmarks.hook.measure import Clock, Measure  # noqa: E402
from benchmarks.hook.settings import DEFAULT_MODES, HSLAKE, PLAIN, Settings  # noqa: E402

RESULT = ROOT / "benchmarks/results/hook_h200.json"
FAST = 600e6  # bytes a second that a disk must write to hold the lake of `--lake-dir auto`
SMOKE: dict[str, Any] = {
    "prompts": (48, 200),
    "concurrency": (4,),
    "tokens": 400,
    "http_tokens": 96,
    "warmup": 48,
    "chunk": 128,
    "kv_tokens": 4096,
    "part_tokens": 1024,
    "staging_bytes": 3e7,
    "time_limit": 300.0,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = p.add_argument
    add("--model", type=Path, help="model folder; on a GPU its weights are made up (dummy)")
    add(
        "--modes",
        type=settings.modes,
        help="none,hslake,plain,torch_save,http [default: all but plain]",
    )
    add("--prompts", type=settings.numbers, default=(1024, 8192), help="tokens of a prompt")
    add("--concurrency", type=settings.numbers, default=(8, 32), help="requests at once")
    add("--tokens", type=float, default=400_000, help="of each run, after its warm-up")
    add("--other-tokens", type=float, help="of a torch_save run [default: as --tokens]")
    add("--http-tokens", type=float, default=16_384, help="of an http run (about 650 a second)")
    add("--warmup", type=float, default=32_768, help="tokens before each run")
    add("--repeats", type=int, default=2, help="runs of none, hslake and plain in a cell")
    add("--other-repeats", type=int, default=1, help="runs of torch_save in a cell")
    add("--instances", type=int, default=1, help="servers of none and of hslake, taking turns")
    add("--tp", type=int, default=1)
    add("--dp-attention", type=int, default=1, metavar="N", help="needs --tp N too")
    add("--capture", default="eagle3", help="streams, as of hslake create")
    add("--codec", default="standard")
    add("--attention-backend", default="fa3")
    add("--chunk", type=int, default=16_384, help="prefill chunk")
    add("--kv-tokens", type=int, default=65_536, help="KV pool of each server")
    add("--server-arg", action="append", default=[], help="one more for every server")
    add("--sglang-python", type=Path, default=Path(sys.executable))
    add("--part-tokens", type=int, default=32_768)
    add("--staging-bytes", type=float, help="quota [default: what a run needs, or 8e9]")
    add("--jitter", type=float, default=0.03, help="seconds: longest pause before a request")
    add("--port", type=int, default=18_000, help="of the first server; others up to 15,000 above")
    add("--after", type=int, nargs="+", default=[], metavar="PID", help="measure after they ended")
    add("--pause-compactor", action="store_true", help="stop it while runs are timed: its share")
    add("--lake-dir", default="auto", help="folder of the lake; auto: /tmp, or RAM if it is slow")
    add("--endurance", type=float, default=0, metavar="TOKENS", help="then cells if --modes names")
    add("--time-limit", type=float, default=570.0, help="seconds of this call")
    add("--ready", type=float, default=240.0, help="seconds that servers get to start")
    add("--out", type=Path, nargs="+", default=[RESULT])
    add("--merge", type=Path, nargs="+", default=[], help="results to add to")
    add("--report-only", action="store_true", help="merge and show, measure nothing")
    add("--smoke", action="store_true", help="small, on the CPU server of examples/sglang_cpu")
    return p


def read_settings(args: argparse.Namespace) -> Settings:
    """Settings of a call. Ends the program when they do not go together."""
    if args.model is None or not (args.model / "config.json").is_file():
        raise SystemExit(f"--model {args.model}: expected a folder with a config.json")
    if args.dp_attention > 1 and args.tp % args.dp_attention:
        raise SystemExit(f"--dp-attention {args.dp_attention} needs a --tp that it divides")
    longest, cells = max(args.prompts), args.modes or DEFAULT_MODES
    if args.endurance:
        cells = args.modes or ()
        if {HSLAKE, PLAIN} & set(cells):
            raise SystemExit(
                "--endurance takes the whole plan: measure hslake's cells in another call"
            )
        longest = max(longest, prompts.LONGEST // (16 if args.smoke else 1))
    if PLAIN in cells and HSLAKE not in cells:
        raise SystemExit("--modes plain needs hslake too: it is sent to the servers of hslake")
    part = max(args.part_tokens, -(-longest // 1024) * 1024)
    return Settings(
        model=args.model.resolve(),
        modes=tuple(m for m in DEFAULT_MODES if m in cells or (m == HSLAKE and args.endurance)),
        cells=cells,
        prompts=args.prompts,
        concurrency=args.concurrency,
        tokens=int(args.tokens),
        other_tokens=int(args.other_tokens or args.tokens),
        http_tokens=int(args.http_tokens),
        warmup=int(args.warmup),
        repeats=args.repeats,
        other_repeats=args.other_repeats,
        instances=args.instances,
        tp=args.tp,
        dp=args.dp_attention,
        capture=args.capture,
        codec=args.codec,
        attention_backend=args.attention_backend,
        chunk=args.chunk,
        kv_tokens=args.kv_tokens,
        sglang_python=args.sglang_python.absolute(),
        server_args=tuple(args.server_arg),
        part_tokens=part,
        staging_bytes=int(args.staging_bytes or (8e9 if args.endurance else 0)),
        lake_dir=args.lake_dir,
        port=args.port,
        jitter=args.jitter,
        ready=args.ready,
        smoke=args.smoke,
    )


class Bench:
    """Everything that one call makes, and its end."""

    def __init__(self, s: Settings, args: argparse.Namespace, out: dict[str, Any]) -> None:
        self.s, self.args, self.out = s, args, out
        self.clock = Clock(args.time_limit)
        user = f"hslake-bench-{os.getuid()}"
        self.left = servers.Leftovers(Path(tempfile.gettempdir()) / user)
        self.work = self._folder(None)
        self.ram = self._folder("/dev/shm")
        self.servers: dict[str, list[ServerProcess]] = {}
        self.side: LakeSide | None = None
        self.session = uuid.uuid4().hex[:8]

    def _folder(self, base: str | None) -> Path:
        made = Path(tempfile.mkdtemp(prefix="hslake-bench-", dir=base))
        self.left.add(folder=made)
        return made

    def _lake_folder(self) -> tuple[Path, float | None]:
        """(where the lake goes, bytes a second that the disk wrote)."""
        if self.s.lake_dir != "auto":
            return Path(tempfile.mkdtemp(prefix="hslake-bench-", dir=self.s.lake_dir)), None
        speed = machine.write_speed(self.work, (64 if self.s.smoke else 1024) << 20)
        return (self.work if speed >= FAST or self.s.smoke else self.ram), speed

    def run(self) -> None:
        """Start all, measure, and end all, whatever happens."""
        s, begun = self.s, time.time()
        try:
            folder, speed = self._lake_folder()
            self.left.add(folder=folder)
            lake = str(folder / "lake")
            spec = hslake.create(lake, model_config=s.model, capture=s.capture, codec=s.codec).spec
            s = self.s = self._with_staging(spec.bytes_per_token)
            staging, saved = self.ram / "staging", self.ram / "saved"
            staging.mkdir()
            theirs, ours = machine.split_cores()
            os.sched_setaffinity(0, theirs)  # what is started has the cores of who starts it
            for mode in s.modes:
                for number in range(s.instances_of(mode)):
                    one = servers.make_server(
                        s,
                        mode,
                        number,
                        self.work,
                        lake=lake,
                        staging=staging,
                        spec=spec,
                        saved=saved,
                    ).start()
                    self.servers.setdefault(mode, []).append(one)
                    self.left.add(group=servers.group_of(one))
            os.sched_setaffinity(0, ours)
            planned = prompts.plan_runs(lake, s, self.work) if HSLAKE in s.cells else 0
            if self.args.endurance:
                planned = prompts.plan_lengths(lake, s, int(self.args.endurance), self.work)
            self.out["sessions"].append(
                {
                    "id": self.session,
                    "config": s.config,
                    "started": begun,
                    # A path tells whoever reads it no more than its name.
                    "command": shlex.join(
                        Path(a).name if Path(a).is_absolute() else a for a in sys.argv
                    ),
                    "server_args": servers.common_args(s),
                    "instances": s.instances,
                    "server_cores": sorted(theirs),
                    "other_cores": sorted(ours),
                    "machine": machine.facts(s.sglang_python),
                    "streams": list(spec.streams),
                    "bytes_per_token": spec.bytes_per_token,
                    "codec": spec.codec,
                    "part_tokens": s.part_tokens,
                    "staging_bytes": s.staging_bytes,
                    "lake_on": "/dev/shm" if folder == self.ram else str(folder.parent),
                    "disk_bytes_per_second": speed,
                    "jitter": s.jitter,
                    "parser": _parser_name(),
                }
            )
            print(f"planned {planned:,} tokens, lake in {folder}, disk {speed}", flush=True)
            self._ready()
            for _, one in self._everyone():
                machine.pin(servers.processes_of(one), theirs)
            if HSLAKE in self.servers:
                log = self.work / "compact.log"
                self.side = LakeSide(lake, staging, log, pausing=self.args.pause_compactor)
                self.side.start_compactor()
                self._parts_made()
            self._await()
            self._measure(spec, saved)
        finally:
            self._end()

    def _with_staging(self, bytes_per_token: int) -> Settings:
        """The settings with a staging quota: a run and its warm-up fit, so that room is never what
        limits a cell, as far as /dev/shm allows."""
        s = self.s
        if s.staging_bytes:
            return s
        part = s.part_tokens * (bytes_per_token + 4)
        need = (s.tokens + s.warmup) // s.part_tokens + 2 * s.dp + 1
        room = int(shutil.disk_usage("/dev/shm").free * 0.5) // part
        return Settings(**{**s.__dict__, "staging_bytes": min(need, room) * part})

    def _everyone(self) -> list[tuple[str, ServerProcess]]:
        """(mode, server) of all that were started."""
        return [(mode, one) for mode, members in self.servers.items() for one in members]

    def _ready(self) -> None:
        """Wait for all servers; one that does not come up is started once more, then costs its own
        cells only."""
        failed = self._wait([one for _, one in self._everyone()])
        for one in failed if self.clock.left() > 150 else ():
            one.stop(5.0)
            one.start()
            self.left.add(group=servers.group_of(one))
        failed = self._wait(list(failed)) if self.clock.left() > 100 else failed
        for mode, members in list(self.servers.items()):
            for one in [m for m in members if m in failed]:
                why = failed[one]
                print(f"SERVER {mode} DID NOT START: {why}", file=sys.stderr, flush=True)
                what = f"{self.s.config} {mode}"
                missing = {"session": self.session, "what": what, "why": why[-1500:]}
                self.out["missing"].append(missing)
                members.remove(one)
                one.stop(5.0)
            if not members:
                del self.servers[mode]
        print(f"servers ready after {time.monotonic() - self.clock.start:.0f} s", flush=True)

    def _wait(self, members: list[ServerProcess]) -> dict[ServerProcess, str]:
        """Servers that did not get ready, and why."""
        end, failed = time.monotonic() + self.s.ready, {}
        for one in members:
            try:
                one.wait_ready(max(1.0, end - time.monotonic()))
            except Exception as error:
                failed[one] = str(error)
        return failed

    def _parts_made(self) -> None:
        """Say what staging the servers have: they made all of it before they were up."""
        for one in self.servers[HSLAKE]:
            now = lakeside.totals(lakeside.status(one.url))
            print(f"staging: {now['parts']} parts, {now['capacity_rows']:,} rows", flush=True)

    def _await(self) -> None:
        """Wait for the processes of --after: calls that measure at once would disturb each
        other."""
        for process in self.args.after:
            while Path(f"/proc/{process}").exists():
                if self.clock.left() <= 0:
                    raise SystemExit(f"--after {process}: it still runs, and time is over")
                time.sleep(0.2)

    def _measure(self, spec: Any, saved: Path) -> None:
        if self.args.endurance and HSLAKE in self.servers and self.side is not None:
            log = self.work / "extract.log"
            row = endurance(
                self.s, self.servers[HSLAKE][0], self.side, self.clock, self.session, log
            )
            self.out["endurance"].append(row)
            results.save(self.out, self.args.out)
        members = {mode: one for mode, one in self.servers.items() if mode in self.s.cells}
        if PLAIN in self.s.cells and HSLAKE in self.servers:
            members[PLAIN] = self.servers[HSLAKE]
        Measure(
            self.s,
            spec,
            members,
            self.side,
            saved,
            self.out,
            self.session,
            self.clock,
            self.args.out,
        ).all()

    def _end(self) -> None:
        everyone = self._everyone()
        for mode, one in everyone:
            if not one.alive() and not self.args.endurance:  # which ends it
                print(f"server {mode} had ended:\n{one.log_tail(30)}", file=sys.stderr)
        if self.side is not None:
            self.side.stop()
        if self.out["sessions"]:
            results.save(self.out, self.args.out)
            self._keep_logs()
        with ThreadPoolExecutor(max(1, len(everyone))) as pool:
            list(pool.map(lambda pair: pair[1].stop(5.0), everyone))
        self.left.clear()

    def _keep_logs(self) -> None:
        """The ends of all logs beside the first result file, for whoever has to find out why."""
        with (self.args.out[0].with_suffix(".log")).open("a", encoding="utf-8") as f:
            for log in sorted(self.work.glob("*.log")):
                lines = log.read_text("utf-8", "replace").splitlines()
                kept = [x for x in lines if "hslake" in x or "rror" in x][:60] + lines[-60:]
                f.write(f"==== {self.session} {log.name}\n" + "\n".join(kept) + "\n")


def _parser_name() -> str:
    from benchmarks.hook.load import PARSER

    return PARSER


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Returns 1 when something that was sent is not in the lake once and intact."""
    args = parser().parse_args()
    if args.smoke:
        given = parser().parse_args([])
        for name, value in SMOKE.items():
            if getattr(args, name) == getattr(given, name):
                setattr(args, name, value)
    out = results.load(args.merge)
    if not args.report_only:
        signal.signal(signal.SIGTERM, _interrupt)
        Bench(read_settings(args), args, out).run()
    results.save(out, args.out)
    results.show(out)
    total = results.summary(out)
    wrong = total["lost"] + total["duplicated"] + total["damage"] + total["failed_runs"]
    return 1 if wrong or not out["sessions"] else 0


if __name__ == "__main__":
    sys.exit(main())
