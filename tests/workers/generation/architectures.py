"""Small decoders of transformers with random weights, one for each architecture and kind of attention.

Weights are not tied: a random tied model may repeat one token, and any engine would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM

__all__ = ["ARCHITECTURES", "REFUSED", "VOCAB", "WINDOWED", "decoder", "reference"]

VOCAB: Final = 97
_WINDOW: Final = 8
_LAYERS: Final = 3
_BASE: Final = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXED: Final = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": _LAYERS,
    "n_head": 4,
    "n_positions": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_BASE, **changes})


ARCHITECTURES: Final[dict[str, Callable[[], Any]]] = {
    "Llama": _config("Llama"),
    "Llama with one head of keys": _config("Llama", num_key_value_heads=1),
    "Qwen2": _config("Qwen2"),
    "Qwen2 with mixed windows": _config(
        "Qwen2", use_sliding_window=True, sliding_window=_WINDOW, layer_types=_MIXED, max_window_layers=0
    ),
    "Qwen3": _config("Qwen3", head_dim=16),
    "Mistral with a window": _config("Mistral", sliding_window=_WINDOW),
    "Gemma": _config("Gemma", head_dim=16),
    "Gemma2": _config("Gemma2", head_dim=16, sliding_window=_WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16),
    "Gemma3": _config("Gemma3Text", head_dim=16, sliding_window=_WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16),
    "GPT-2": lambda: transformers.GPT2Config(**_GPT2),
    "GPT-NeoX": _config("GPTNeoX"),
    "Phi": _config("Phi"),
    "Phi-3": _config("Phi3", sliding_window=_WINDOW),
    "Mixtral": _config("Mixtral", num_local_experts=4, sliding_window=None),
    "Qwen2-MoE": _config("Qwen2Moe", shared_expert_intermediate_size=32, **_EXPERTS),
    "Qwen3-MoE": _config("Qwen3Moe", head_dim=16, **_EXPERTS),
    "GPT-OSS": _config(
        "GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=_WINDOW, layer_types=_MIXED
    ),
    "OLMo2": _config("Olmo2"),
    "Cohere": _config("Cohere"),
    "Cohere2": _config("Cohere2", sliding_window=_WINDOW, layer_types=_MIXED),
    "StableLM": _config("StableLm"),
    "StarCoder2": _config("Starcoder2", sliding_window=_WINDOW),
    "Granite": _config("Granite"),
    "SmolLM3": _config("SmolLM3"),
    "GLM4": _config("Glm4", head_dim=16),
    "DeepSeek-V3": _config(
        "DeepseekV3",
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    ),
    "OPT": _config("OPT", ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True),
    "Llama 4 with chunks": _config(
        "Llama4Text",
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=_WINDOW,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        moe_layers=[1],
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.3,
    ),
    "OLMo": _config("Olmo"),
    "OLMo3": _config("Olmo3", sliding_window=_WINDOW, layer_types=_MIXED),
    "EXAONE 4": _config("Exaone4", sliding_window=_WINDOW, layer_types=_MIXED),
    "Nemotron": _config("Nemotron"),
    "Helium": _config("Helium", head_dim=16),
}
WINDOWED: Final = [
    name
    for name, config in ARCHITECTURES.items()
    if _WINDOW in (getattr(config(), "sliding_window", None), getattr(config(), "attention_chunk_size", None))
]
"""With layers of a window or of chunks."""
REFUSED: Final[dict[str, Callable[[], Any]]] = {
    "Falcon": _config("Falcon"),
    "GPT-J": lambda: transformers.GPTJConfig(**_GPT2, rotary_dim=8),
    "BLOOM": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=_LAYERS, n_head=4),
    "CodeGen": lambda: transformers.CodeGenConfig(**_GPT2, rotary_dim=8),
    "GPT-Neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "Mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=_LAYERS),
}


def decoder(name: str, seed: int = 0, config: Any = None) -> Any:
    """A model in evaluation mode, fp32, with weights large enough that it writes many different tokens.

    Norms are moved away from ones, so that a lost scale is seen.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or {**ARCHITECTURES, **REFUSED}[name](), dtype=torch.float32).eval()
    embedded = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter is embedded:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What `model.generate` writes, greedy, alone. Use it before an engine takes the model."""
    ids = torch.tensor([list(prompt)])
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, use_cache=True
    )
    return list(written[0, len(prompt) :].tolist())
