"""Drafters from settings and artifacts: the pool of a worker, and what a learner trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.convex_training import TrainableConvex
from inference.drafters.eagle_training import TrainableEagle
from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.hydra_training import TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.drafters.token_lm_training import TrainableTokenLm
from inference.ports import Drafter
from inference.target import Target, load_target
from learner.training import TrainableDrafter
from learner.updates.losses import LossSettings
from pipeline.configuration.pool_settings import DrafterSettings


def pool_drafters(
    settings: Sequence[DrafterSettings],
    target: Target,
    *,
    resolve: Callable[[str], Path],
    dtype: torch.dtype,
) -> list[Drafter]:
    """Build the pool in the order of the settings.

    A head stands as a drafter that proposes nothing until its first release arrives.

    Args:
        settings: One per drafter.
        target: The verifying model.
        resolve: Turns the path of a model into a checked folder.
        dtype: Number format of causal language models.
    """
    return [_drafter(one, target, resolve, dtype) for one in settings]


def _drafter(
    one: DrafterSettings, target: Target, resolve: Callable[[str], Path], dtype: torch.dtype
) -> Drafter:
    match one.kind:
        case "prompt_lookup":
            return PromptLookupDrafter(one.drafter_id, longest=one.longest, shortest=one.shortest)
        case "suffix":
            return SuffixDrafter(one.drafter_id, longest=one.longest, shortest=one.shortest)
        case "causal_lm":
            model = load_target(resolve(one.path), dtype=dtype, device=target.device)
            return CausalLmDrafter(model, target, drafter_id=one.drafter_id)
        case "hydra" | "convex" | "eagle" | "token_lm" | "none":
            return NothingDrafter(one.drafter_id)


def draft_vocabulary(target: Target, texts: Sequence[str], *, size: int) -> DraftVocabulary:
    """Choose a draft vocabulary by the frequency of the target's tokens in ``texts``."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(target.tokenizer(text)["input_ids"])
    return frequent_tokens(counts, size=min(size, target.vocab_size), vocab_size=target.vocab_size)


def trainable(one: DrafterSettings, rows: FrozenRows, *, num_levels: int = 4) -> TrainableDrafter:
    """Return the head of ``one`` as something to train.

    Args:
        one: The drafter; its kind is one that ``is_trained``.
        rows: What the target lends.
        num_levels: K, for heads that keep something per level.
    """
    terms = LossSettings(
        counts_tail=one.counts_tail,
        acceptance_weight=one.acceptance_weight,
        negative_weight=one.negative_weight,
    )
    build: Callable[..., TrainableDrafter]
    match one.kind:
        case "convex":
            build = partial(TrainableConvex, num_levels=num_levels, rank=one.rank)
        case "eagle":
            build = partial(
                TrainableEagle,
                inner_size=one.inner_size,
                num_heads=one.num_heads,
                num_context=one.num_context,
            )
        case "token_lm":
            num_read = one.num_context + 1
            build = partial(
                TrainableTokenLm, inner_size=one.inner_size, rank=one.rank, num_read=num_read
            )
        case _:
            build = partial(TrainableHydra, inner_size=one.inner_size)
    return build(one.drafter_id, rows, loss_settings=terms, seed=one.seed)
