"""Tokens of a request that its heads may propose besides their draft vocabulary."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows
from inference.trajectory import Trajectory


class SeenTokens:
    """Tokens of one request that its heads may propose besides the draft vocabulary.

    Names and numbers of a request come back in it. Their head rows cost next to nothing, and lift
    the cap that a fixed draft vocabulary puts on acceptance.

    Args:
        rows: Of the heads.
        trajectory: The request.

    Attributes:
        token_ids: int64 (E,), in the order of their first occurrence.
        first_positions: int64 (E,), where each occurred first.
        head: (E, H), their head rows.
    """

    def __init__(self, rows: FrozenRows, trajectory: Trajectory) -> None:
        self._rows = rows
        self._trajectory = trajectory
        self._known = set(rows.vocabulary.token_ids.tolist())
        self._num_read = 0
        self.token_ids = torch.empty(0, dtype=torch.int64, device=rows.device)
        self._vocabulary = rows.vocabulary.token_ids.to(rows.device)
        self.first_positions = np.empty(0, dtype=np.int64)
        self.head = rows.full_head[:0]

    def catch_up(self) -> None:
        """Read the tokens that the request has gained."""
        found: dict[int, int] = {}
        tokens = self._trajectory.token_ids
        for position in range(self._num_read, len(tokens)):
            if tokens[position] not in self._known:
                found.setdefault(tokens[position], position)
        self._num_read = len(tokens)
        self._known.update(found)
        if found:
            ids = torch.tensor(list(found), dtype=torch.int64, device=self._rows.device)
            self.token_ids = torch.cat([self.token_ids, ids])
            self.first_positions = np.append(self.first_positions, list(found.values()))
            self.head = self._rows.full_head[self.token_ids]

    @property
    def proposable(self) -> torch.Tensor:
        """Every token that may be proposed, int64 (D + E,)."""
        return torch.cat([self._vocabulary, self.token_ids])

    def logits(self, states: torch.Tensor, before: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of the tokens seen before a position, -inf for those seen later.

        Args:
            states: (..., W, H).
            before: int64 (W,).

        Returns:
            (..., W, E).
        """
        is_unseen = torch.from_numpy(self.first_positions[None, :] >= before[:, None])
        return F.linear(states, self.head).masked_fill(is_unseen.to(states.device), -torch.inf)
