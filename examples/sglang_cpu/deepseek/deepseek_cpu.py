"""An SGLang plugin that lets DeepSeek-V3 shaped models run on the CPU's `torch_native` attention.

Put this file's folder on PYTHONPATH of the server: the `.dist-info` beside it is the entry point.
"""

from typing import Any


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(target, _after_load, HookType.AFTER)


def _after_load(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    # Absorbed attention is the one way of several that needs no kernel of its own.
    method = handler.AttnForwardMethod.MLA
    handler.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method)
    # The padding of DP attention asks for it, though no graph is ever captured here.
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        if name not in vars(TorchNativeAttnBackend):
            setattr(TorchNativeAttnBackend, name, lambda self: 1)
