"""The pool of the settings, and heads loaded from releases: what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from inference.drafters.convex import ConvexDrafter
from inference.drafters.eagle import SIZES, EagleDrafter
from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary
from inference.drafters.hydra import ARCHITECTURE, HydraDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.drafters.token_lm import TokenLmDrafter
from inference.target import Target
from learner.examples import TrainingBatch
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.releases.drafters import draft_vocabulary, pool_drafters, trainable
from pipeline.releases.heads import Head, HeadLoader
from pipeline.releases.registry import ArtifactError, DrafterRegistry
from schemas.events import DrafterReleased, ReleaseState
from tests.inference.tiny import VOCAB_SIZE, tiny_llama
from tests.schemas.builders import make_release

HEAD = DrafterSettings(drafter_id="head-a", kind="hydra", inner_size=8, seed=3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_llama(1)


@pytest.fixture
def registry(tmp_path: Path) -> DrafterRegistry:
    return DrafterRegistry(str(tmp_path), now=lambda: datetime(2026, 1, 1, tzinfo=UTC))


def released(
    target: Target,
    registry: DrafterRegistry,
    *,
    version: int = 0,
    tensors: dict[str, torch.Tensor] | None = None,
) -> DrafterReleased:
    """Store the untrained head, or given tensors, and return the release that would announce it."""
    vocabulary = draft_vocabulary(target, ["aab"], size=10)
    rows = HeadLoader(target, registry).rows_of(vocabulary)
    head = trainable(HEAD, rows)
    stored = registry.write(
        HEAD.drafter_id, version, tensors or head.artifact(head.initial_weights()), {}
    )
    return replace(
        make_release(drafter_id=HEAD.drafter_id, version=version, state=ReleaseState.LIVE),
        artifact_uri=stored.uri,
        manifest_sha256=stored.manifest_sha256,
        architecture=ARCHITECTURE,
        target_fingerprint=target.fingerprint,
        tokenizer_hash=target.tokenizer_hash,
        draft_vocabulary_hash=vocabulary.sha256,
    )


def tensors_of(target: Target, registry: DrafterRegistry) -> dict[str, torch.Tensor]:
    rows = HeadLoader(target, registry).rows_of(draft_vocabulary(target, ["aab"], size=10))
    head = trainable(HEAD, rows)
    return head.artifact(head.initial_weights())


def test_the_pool_follows_the_settings_and_a_head_waits_for_its_first_release(
    target: Target,
) -> None:
    settings = [
        DrafterSettings(drafter_id="suffix", kind="suffix"),
        HEAD,
        DrafterSettings(drafter_id="nobody", kind="none"),
        DrafterSettings(drafter_id="lookup", kind="prompt_lookup"),
    ]
    pool = pool_drafters(settings, target, resolve=Path, dtype=target.dtype)
    assert [one.version.drafter_id for one in pool] == ["suffix", "head-a", "nobody", "lookup"]
    kinds = [SuffixDrafter, NothingDrafter, NothingDrafter, PromptLookupDrafter]
    assert [type(one) for one in pool] == kinds


def test_a_released_head_has_its_version_and_the_weights_that_were_stored(
    target: Target, registry: DrafterRegistry
) -> None:
    release = released(target, registry, version=4)
    head = HeadLoader(target, registry)(release)
    assert isinstance(head, HydraDrafter)
    assert (head.version.drafter_id, head.version.weights_version) == ("head-a", 4)
    assert head.version.draft_vocabulary_hash == release.draft_vocabulary_hash
    stored = tensors_of(target, registry)
    del stored[VOCABULARY]
    assert head.weights.keys() == stored.keys()
    assert all(torch.equal(head.weights[name], stored[name]) for name in stored)


def test_heads_of_one_draft_vocabulary_share_the_targets_rows(
    target: Target, registry: DrafterRegistry
) -> None:
    load = HeadLoader(target, registry)
    first, second = (load(released(target, registry, version=version)) for version in (0, 1))
    assert isinstance(first, HydraDrafter)
    assert isinstance(second, HydraDrafter)
    assert first.rows is second.rows
    assert first.group_key == second.group_key


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_never_beyond_the_target(
    target: Target,
) -> None:
    counted = draft_vocabulary(target, ["zz", "zy", "zx"], size=3)
    assert counted.token_ids.tolist() == [24, 25, 26]  # x, y, z
    assert len(draft_vocabulary(target, [], size=10_000).token_ids) == VOCAB_SIZE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "hydra-0"),
        ("target_fingerprint", "another"),
        ("tokenizer_hash", "another"),
        ("draft_vocabulary_hash", "another"),
    ],
)
def test_invalid_releases_for_something_else_are_refused_by_name(
    target: Target, registry: DrafterRegistry, name: str, value: str
) -> None:
    release = released(target, registry)
    wrong = replace(release, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=r"drafter head-a version 0: ") as refused:
        HeadLoader(target, registry)(wrong)
    assert value in str(refused.value)
    assert str(getattr(release, name)) in str(refused.value)


def test_invalid_artifact_without_draft_vocabulary_is_refused(
    target: Target, registry: DrafterRegistry
) -> None:
    tensors = tensors_of(target, registry)
    del tensors[VOCABULARY]
    with pytest.raises(ArtifactError, match="found no draft vocabulary"):
        HeadLoader(target, registry)(released(target, registry, tensors=tensors))


def test_invalid_draft_tokens_beyond_the_target_are_refused(
    target: Target, registry: DrafterRegistry
) -> None:
    tensors = tensors_of(target, registry)
    vocabulary = DraftVocabulary.of([*range(9), VOCAB_SIZE])
    tensors[VOCABULARY] = vocabulary.token_ids
    release = replace(
        released(target, registry, tensors=tensors), draft_vocabulary_hash=vocabulary.sha256
    )
    with pytest.raises(ArtifactError, match="found token 40, expected tokens below 40"):
        HeadLoader(target, registry)(release)


@pytest.mark.parametrize("spoil", ["missing", "shape", "unknown"])
def test_invalid_parameters_are_refused(
    target: Target, registry: DrafterRegistry, spoil: str
) -> None:
    tensors = tensors_of(target, registry)
    if spoil == "missing":
        del tensors["mix"]
    elif spoil == "shape":
        tensors["gain"] = torch.ones(target.hidden_size + 1)
    else:
        tensors["more"] = torch.ones(1)
    with pytest.raises(ArtifactError, match=r"drafter head-a version 0: found .*, expected "):
        HeadLoader(target, registry)(released(target, registry, tensors=tensors))


@pytest.mark.parametrize(
    ("one", "kind", "spoiled"),
    [
        (DrafterSettings(drafter_id="head-a", kind="convex", rank=5), ConvexDrafter, "maps"),
        (
            DrafterSettings(drafter_id="head-a", kind="eagle", inner_size=8, num_heads=4),
            EagleDrafter,
            "qkv",
        ),
        (
            DrafterSettings(drafter_id="head-a", kind="token_lm", inner_size=8, rank=3),
            TokenLmDrafter,
            "reduce",
        ),
    ],
)
def test_heads_of_every_kind_are_trained_stored_and_loaded_by_their_architecture(
    target: Target,
    registry: DrafterRegistry,
    one: DrafterSettings,
    kind: type[Head],
    spoiled: str,
) -> None:
    assert one.is_trained
    rows = HeadLoader(target, registry).rows_of(draft_vocabulary(target, ["aab"], size=10))
    head = trainable(one, rows, num_levels=3)
    tensors = head.artifact(head.initial_weights())
    release = released(target, registry, tensors=tensors)
    loaded = HeadLoader(target, registry)(replace(release, architecture=head.architecture))
    assert isinstance(loaded, kind)
    assert {VOCABULARY, *loaded.weights} == tensors.keys()
    assert all(torch.equal(loaded.weights[name], tensors[name]) for name in loaded.weights)
    wrong = {**tensors, spoiled: tensors[spoiled][..., 1:].clone()}
    release = released(target, registry, version=1, tensors=wrong)
    with pytest.raises(ArtifactError, match=r"drafter head-a version 1: found .*, expected "):
        HeadLoader(target, registry)(replace(release, architecture=head.architecture))


def test_a_head_with_attention_of_an_older_draftloop_is_refused_in_one_line(
    target: Target, registry: DrafterRegistry
) -> None:
    release = replace(released(target, registry), architecture="eagle-layer-1")
    with pytest.raises(ArtifactError, match="architecture: found eagle-layer-1, expected") as found:
        HeadLoader(target, registry)(release)
    assert "\n" not in str(found.value)


def test_invalid_sizes_of_attention_are_refused(target: Target, registry: DrafterRegistry) -> None:
    one = DrafterSettings(drafter_id="head-a", kind="eagle", inner_size=8, num_heads=4)
    rows = HeadLoader(target, registry).rows_of(draft_vocabulary(target, ["aab"], size=10))
    head = trainable(one, rows)
    tensors = head.artifact(head.initial_weights()) | {SIZES: torch.tensor([3, 16])}
    release = released(target, registry, tensors=tensors)
    with pytest.raises(ArtifactError, match="head-a version 0: found num_heads=3 does not divide"):
        HeadLoader(target, registry)(replace(release, architecture=head.architecture))


def test_the_terms_of_the_loss_are_those_of_the_settings(
    target: Target, registry: DrafterRegistry
) -> None:
    rows = HeadLoader(target, registry).rows_of(draft_vocabulary(target, ["aab"], size=10))
    batch = TrainingBatch(
        hidden=torch.randn((1, target.hidden_size), generator=torch.Generator().manual_seed(0)),
        fed_token_ids=torch.tensor([[1]]),
        label_token_ids=torch.tensor([[1]]),
        top_token_ids=torch.tensor([[[1, 2]]]),
        top_probabilities=torch.tensor([[[0.5, 0.2]]]),
    )
    losses = []
    for options in ({}, {"counts_tail": True}, {"acceptance_weight": 2.0}, {"negative_weight": 3}):
        one = DrafterSettings(drafter_id="head-a", kind="hydra", inner_size=8, **options)
        head = trainable(one, rows)
        losses.append(float(head.loss(head.initial_weights(), batch)))
    assert all(loss > losses[0] for loss in losses[1:])
    assert len(set(losses)) == 4
