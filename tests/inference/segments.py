"""A mixed pool of drafters, and what must hold of the segments of one request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.ports import Drafter
from inference.target import Target
from schemas.events import VerificationEvent
from tests.inference.test_drafters_hydra import head
from tests.inference.tiny import VOCAB_SIZE, tiny_llama


def drafters_of(target: Target) -> list[Drafter]:
    """Return a mixed pool."""
    return [
        NothingDrafter(),
        PromptLookupDrafter(longest=2, shortest=1),
        CausalLmDrafter(tiny_llama(50), target, drafter_id="other"),
        head(target, 1, size=VOCAB_SIZE),
    ]


def check_segments(events: Sequence[VerificationEvent]) -> None:
    """Check that the segments of one request join without gap or overlap."""
    assert [one.segment_index for one in events] == list(range(len(events)))
    assert [one.is_final for one in events] == [False] * (len(events) - 1) + [True]
    assert events[0].first_position == events[0].num_prompt_tokens
    for before, after in pairwise(events):
        assert after.first_position == before.first_position + before.num_positions
        assert after.sequence == before.sequence + 1
    starts = np.concatenate([one.windows.start for one in events])
    assert (np.diff(starts) > 0).all()
    for one in events:
        assert one.rounds.num_scored_windows.sum() == len(one.windows.start)
