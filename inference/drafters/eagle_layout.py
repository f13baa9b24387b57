"""The layout in which vLLM and SGLang read EAGLE-3: names of tensors and keys of ``config.json``.

``d2t`` holds, per draft token, how far its id in the target lies above its place in the draft
vocabulary; ``t2d`` tells of every token of the target whether it can be drafted. Embeddings are
left out: engines share the target's. There is no ``fc``: with ``use_aux_hidden_state = false``
they hand over the target's last state, which is what the head was trained on.
"""

from __future__ import annotations

from typing import Any

import torch

from inference.drafters.eagle import ROPE_THETA, EagleDrafter
from inference.drafters.frozen_rows import EPSILON

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"

NORM_TO_NAME = {
    "embedding_norm": "midlayer.input_layernorm.weight",
    "state_norm": "midlayer.hidden_norm.weight",
    "inner_norm": "midlayer.post_attention_layernorm.weight",
    "final_norm": "norm.weight",
}


def layout_tensors(drafter: EagleDrafter) -> dict[str, torch.Tensor]:
    """Return the tensors of a head by the names of the layout; no two share memory."""
    weights, vocabulary = drafter.weights, drafter.rows.vocabulary.token_ids
    query, key, value = weights["qkv"].chunk(3)
    gate, up = weights["gate_up"].chunk(2)
    can_be_drafted = torch.zeros(len(drafter.rows.embeddings), dtype=torch.bool)
    can_be_drafted[vocabulary] = True
    tensors = {
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": key,
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": weights["attend"],
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": weights["down"],
        **{name: weights[norm] for norm, name in NORM_TO_NAME.items()},
        "lm_head.weight": drafter.rows.head,
        "d2t": vocabulary - torch.arange(len(vocabulary)),
        "t2d": can_be_drafted,
    }
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def layout_config(drafter: EagleDrafter, *, context_length: int) -> dict[str, Any]:
    """Return ``config.json`` of a head.

    Args:
        drafter: The head.
        context_length: Most positions of the target.
    """
    vocab_size, hidden_size = drafter.rows.embeddings.shape
    num_heads = drafter.layer.num_heads
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": drafter.weights["down"].shape[1],
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": context_length,
        # The newest pair is one of the window.
        "sliding_window": drafter.layer.num_context + 1,
        "layer_types": ["sliding_attention"],
        "vocab_size": vocab_size,
        "draft_vocab_size": len(drafter.rows.head),
        "tie_word_embeddings": False,
        "torch_dtype": str(drafter.rows.head.dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": False},
    }
