"""A folder that looks like an installed SGLang to whoever reads it, and that cannot be imported."""

from collections.abc import Mapping
from pathlib import Path

SERVER_ARGS = """
import dataclasses

@dataclasses.dataclass
class ServerArgs:
    model_path: A[str, Arg(help="Weights.", aliases=["--model"])]
    pp_size: A[int, Arg(help="Stages.", aliases=["--pipeline-parallel-size"])] = 1
    tp_size: A[int, Arg(cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    dtype: A[str, "Data type."] = "auto"
    chunked_prefill_size: A[int, "Tokens of a forward."] = None
    disable_radix_cache: A[bool, "No prefix cache."] = False
    cuda_graph_backend_prefill: A[str, "Graphs."] = None
    mem_fraction_static: A[float, "Memory."] = None
    enable_lora: A[bool, "Adapters."] = False
    inner_state: A[int, Arg(help="Not for people.", no_cli=True)] = 0
    untold: int = 0

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--config", type=str)
        parser.add_argument("--disable-piecewise-cuda-graph", action="store_true")
        parser.add_argument("--stages", dest="pp_size", type=int)
"""

MODELS = {
    "llama.py": '''
class LlamaModel(nn.Module):
    def __init__(self, config):
        self.layers_to_capture = []

    def forward(
        self,
        hidden,
    ):
        return hidden


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = LlamaModel(config)
        self.capture_aux_hidden_states = False


EntryClass = LlamaForCausalLM
''',
    "plain.py": '''
class PlainModel(nn.Module):
    pass

class PlainForCausalLM(nn.Module):
    """Unlike Llama it cannot capture."""
    def __init__(self, config):
        self.model = PlainModel(config)

class HalfForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = LlamaModel(config)

EntryClass = [PlainForCausalLM, HalfForCausalLM]
''',
    "wrappers.py": '''
class PictureForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.language_model = LlamaForCausalLM(config)

class AnyForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.language_model = language_model_class(config)

class DeafForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.language_model = PlainForCausalLM(config)

class ChildForCausalLM(
    Mixin,
):
# commented out
    Parent = LlamaForCausalLM

EntryClass = [
    PictureForConditionalGeneration, AnyForConditionalGeneration, DeafForConditionalGeneration,
    ChildForCausalLM,
]
''',
    "transformers.py": '''
class TransformersForCausalLM(nn.Module):
    pass

EntryClass = [TransformersForCausalLM]
''',
}  # fmt: skip


def make(folder: Path, version: str = "0.5.23", models: Mapping[str, str] = MODELS) -> Path:
    """Write it into `folder`; returns the package's root, of which the parent goes on a path."""
    root = folder / "sglang"
    (root / "srt/models").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported, which takes half a minute')")
    (root / "srt/server_args.py").write_text(SERVER_ARGS)
    for name, text in models.items():
        (root / "srt/models" / name).write_text(text)
    facts = folder / f"sglang-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return root
