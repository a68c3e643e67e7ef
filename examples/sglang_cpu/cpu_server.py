"""Environment and arguments of an SGLang server on a CPU, for the demo and the tests."""

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent

ARGS = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--disable-cuda-graph",
    "--mem-fraction-static",
    "0.5",
    "--sleep-on-idle",
]


def env(threads: int = 2, *, deepseek: bool = False, ranks: int = 1) -> dict[str, str]:
    """What to add to the server's environment: the shims, and a CPU engine without compilation.

    `deepseek`: also what DeepSeek-V3 shaped models need; `ranks`: processes of tensor parallelism,
    each on a core of its own.
    """
    folders = ["shims", *(["deepseek"] if deepseek else [])]
    path = [*(str(HERE / name) for name in folders), os.environ.get("PYTHONPATH", "")]
    bind = {}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bind["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[i % len(cores)]) for i in range(ranks)
        )
    return {
        **bind,
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
    }


def args(model: Path | str, *, chunk: int, max_total_tokens: int = 8192) -> list[str]:
    """Arguments for a model folder; `chunk` is the prefill chunk in tokens."""
    return [
        "--model-path",
        str(model),
        *ARGS,
        "--chunked-prefill-size",
        str(chunk),
        "--max-total-tokens",
        str(max_total_tokens),
    ]
