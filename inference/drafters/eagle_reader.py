"""Reads a folder in the layout of EAGLE-3 and drafts with it, from nothing but its two files.

It shares no arithmetic with ``inference.drafters.eagle``: whole sequences under a mask instead of
windows over kept keys, positions as complex numbers, separate products. What it computes is what
an engine makes of the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from inference.drafters.eagle_layout import CONFIG_FILE, WEIGHTS_FILE


class EagleFolder:
    """A head as its folder says.

    Args:
        folder: With ``config.json`` and ``model.safetensors``.

    Attributes:
        config: As it stands in the file.
        tensors: By the names of the layout, real ones in float32.
    """

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        loaded = safetensors.torch.load((folder / WEIGHTS_FILE).read_bytes())
        self.tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in loaded.items()
        }

    @property
    def draft_token_ids(self) -> torch.Tensor:
        """The target's id of every draft token, int64 (D,), as ``d2t`` says."""
        offsets = self.tensors["d2t"]
        return offsets + torch.arange(len(offsets))

    def logits(
        self, embeddings: torch.Tensor, states: torch.Tensor, num_levels: int
    ) -> torch.Tensor:
        """Return the logits of the levels behind a verified text, told the tokens that follow.

        Args:
            embeddings: float32 (T + K - 1, H), the target's, of the verified tokens and of those
                that each further level is told.
            states: float32 (T, H), the target's, that predicted the verified tokens.
            num_levels: K.

        Returns:
            (K, D).
        """
        found = []
        for level in range(num_levels):
            states_out = self._layer(embeddings[: len(states)], states)
            last = states_out[-1:]
            found.append(self._norm("norm", last) @ self.tensors["lm_head.weight"].T)
            if level + 1 < num_levels:
                states = torch.cat([states, last])
        return torch.cat(found)

    def _layer(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat(
            [
                self._norm("midlayer.input_layernorm", embeddings),
                self._norm("midlayer.hidden_norm", states),
            ],
            dim=1,
        )
        states = states + self._attention(pairs)
        inner = self._norm("midlayer.post_attention_layernorm", states)
        gate, up = (self._times(f"midlayer.mlp.{name}_proj", inner) for name in ("gate", "up"))
        opened = gate * torch.sigmoid(gate)
        return states + self._times("midlayer.mlp.down_proj", opened * up)

    def _attention(self, pairs: torch.Tensor) -> torch.Tensor:
        size = self.config["head_dim"]
        query, key, value = (
            self._times(f"midlayer.self_attn.{name}_proj", pairs)
            .reshape(len(pairs), -1, size)
            .transpose(0, 1)
            for name in ("q", "k", "v")
        )
        scores = self._turned(query) @ self._turned(key).transpose(1, 2) * size**-0.5
        places = torch.arange(len(pairs))
        back = places[:, None] - places
        is_seen = (back >= 0) & (back < self.config["sliding_window"])
        shares = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        mixed = (shares @ value).transpose(0, 1).reshape(len(pairs), -1)
        return self._times("midlayer.self_attn.o_proj", mixed)

    def _turned(self, vectors: torch.Tensor) -> torch.Tensor:
        """Turn (heads, T, size) by position: component i goes with component i + size / 2."""
        half = vectors.shape[-1] // 2
        speeds = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(vectors.shape[1], dtype=torch.float64), speeds)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        turned = torch.complex(vectors[..., :half], vectors[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def _norm(self, name: str, vectors: torch.Tensor) -> torch.Tensor:
        squares = vectors.square().mean(-1, keepdim=True)
        scaled = vectors * torch.rsqrt(squares + self.config["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def _times(self, name: str, vectors: torch.Tensor) -> torch.Tensor:
        return vectors @ self.tensors[f"{name}.weight"].T
