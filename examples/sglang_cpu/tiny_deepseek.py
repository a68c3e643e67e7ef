"""A DeepSeek-V3 shaped model with random weights, small enough for two CPU cores.

usage: tiny_deepseek.py OUT_DIR

Multi-head latent attention, one dense and six mixture-of-experts layers, YaRN: the shape of
DeepSeek-V3 and Kimi-K2 in float32, 21 million parameters. Needs torch and transformers.
"""

import sys
from pathlib import Path

LAYERS, HIDDEN, VOCAB = 7, 512, 2048

CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    # As in the published file; transformers knows no other values, so it would not write them.
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make(out: Path) -> Path:
    """Write the model, the same on every call, to the folder `out`; returns `out`."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**CONFIG), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                # Keeps what each layer adds about as large as what it got.
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
        for name, bias in model.named_buffers():
            if "correction_bias" in name:
                bias.uniform_(-0.1, 0.1)
    model.save_pretrained(out)
    return out


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(f"wrote {make(Path(sys.argv[1]))}")


if __name__ == "__main__":
    main()
