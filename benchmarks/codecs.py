"""The lake's codecs on real hidden states: ratio, and GB/s to encode and decode on one core.

    python benchmarks/codecs.py --model DIR TEXT...      # capture with transformers, then measure

Captures boundaries 2, L//2, L-3 and the final norm's output of a Hugging Face model in bfloat16
over the text files, and lays real vectors of one stream side by side to `--hidden`. Chunks are what
a lake stores: 256 tokens of one stream. Everything runs in one thread; GB/s counts raw bytes.
Writes benchmarks/results/codecs.json.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.loader import machine  # noqa: E402
from hslake.segment.codec import decode_chunk, encode_chunk  # noqa: E402
from hslake.spec import LakeSpec, ModelInfo, make_spec  # noqa: E402
from hslake.streams import eagle3_boundaries  # noqa: E402

CODECS = ("standard", "bf16plane", "none")
STREAMS = ("low", "middle", "high", "final")
CHUNK = 256
WINDOW = 512  # tokens of text a forward pass sees


@torch.inference_mode()
def capture(model_dir: str, texts: list[str], tokens: int) -> np.ndarray:
    """Bit patterns uint16 [stream, token, width] of at least `tokens` tokens of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    boundaries = eagle3_boundaries(model.config.num_hidden_layers)
    ids = tokenizer("\n\n".join(Path(t).read_text("utf-8") for t in texts))["input_ids"]
    if len(ids) < tokens:
        raise SystemExit(f"the texts have {len(ids)} tokens, expected {tokens}: name more files")
    found: list[np.ndarray] = []
    for at in range(0, tokens, WINDOW):
        window = torch.tensor([ids[at : at + WINDOW]])
        states = model(window, output_hidden_states=True).hidden_states
        # The last entry is what the LM head reads: after the final norm.
        rows = torch.stack([states[b][0] for b in (*boundaries, -1)])
        found.append(rows.view(torch.int16).numpy().view(np.uint16))
    return np.concatenate(found, axis=1)


def chunks_of(states: np.ndarray, hidden: int, count: int) -> list[np.ndarray]:
    """`count` chunks [CHUNK, hidden] of one stream [token, width]: real vectors side by side.

    No vector is in a chunk twice: a compressor would find it, and look better than it is.
    """
    rng = np.random.default_rng(0)
    copies = -(-hidden // states.shape[1])
    if CHUNK * copies > len(states):
        raise SystemExit(f"--tokens {len(states)}: a chunk needs {CHUNK * copies} vectors")
    wide = (
        states[rng.permutation(len(states))[: CHUNK * copies]].reshape(CHUNK, -1)
        for _ in range(count)
    )
    return [w[:, :hidden].copy() for w in wide]


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The least time that `work` took, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(spec: LakeSpec, chunks: list[np.ndarray], repeats: int) -> dict[str, float]:
    """Ratio, encode and decode GB/s of one codec on the chunks."""
    raw = sum(c.nbytes for c in chunks)
    encoded = [encode_chunk(spec, c) for c in chunks]
    out = np.empty_like(chunks[0])
    for chunk, data in zip(chunks, encoded, strict=True):
        if not np.array_equal(decode_chunk(spec, data, "chunk", out), chunk):
            raise SystemExit(f"{spec.codec} does not give back what it got")
    encode = best_seconds(lambda: [encode_chunk(spec, c) for c in chunks], repeats)
    decode = best_seconds(lambda: [decode_chunk(spec, d, "chunk", out) for d in encoded], repeats)
    return {
        "ratio": round(sum(map(len, encoded)) / raw, 4),
        "encode_gb_per_s": round(raw / encode / 1e9, 3),
        "decode_gb_per_s": round(raw / decode / 1e9, 3),
    }


def compare(args: argparse.Namespace) -> dict[str, object]:
    """Every codec on every stream; `all` is the chunks of all streams together."""
    states = capture(args.model, args.texts, args.tokens)
    model = ModelInfo("m", "", 8, args.hidden, None, {"config": None, "weights": None})
    chunks = {
        name: chunks_of(states[k], args.hidden, args.chunks) for k, name in enumerate(STREAMS)
    }
    chunks["all"] = [c for part in chunks.values() for c in part]
    return {
        "tokens_captured": states.shape[1],
        "codecs": {
            codec: {
                name: measure(make_spec(model, ("final",), codec=codec), part, args.repeats)
                for name, part in chunks.items()
            }
            for codec in CODECS
        },
    }


def main() -> None:
    """Run the comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="files of text")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--chunks", type=int, default=4, help="chunks of each stream")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/codecs.json"))
    args = parser.parse_args()
    report: dict[str, object] = {"machine": machine()}
    report["settings"] = {
        k: v for k, v in vars(args).items() if k not in ("texts", "model", "out")
    } | {"model": Path(args.model).name}
    # In a thread of its own, as compactor and loader do it: in the main thread Blosc starts more.
    worker = threading.Thread(target=lambda: report.update(compare(args)))
    worker.start()
    worker.join()
    if "codecs" not in report:
        raise SystemExit("nothing was measured; the error is above")
    Path(args.out).write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    show(report)


def show(report: dict) -> None:
    """Print the result as a table."""
    table = Table(title=f"chunks of {CHUNK} tokens, {report['settings']['hidden']} wide")
    for column in ("codec", "streams", "stored / raw", "encode GB/s", "decode GB/s"):
        table.add_column(column)
    for codec, parts in report["codecs"].items():
        for name, row in parts.items():
            table.add_row(codec, name, *(str(v) for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
