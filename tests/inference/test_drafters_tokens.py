"""Prompt lookup and suffix counts: proposals depend on the tokens before, and on nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import LatestFollower, PromptLookupDrafter
from inference.drafters.suffix import SharedHistory, SuffixCounts, SuffixDrafter
from inference.drafters.token_model import TokenModel, TokenModelSession
from inference.ports import NO_PROPOSAL, WindowBatch
from inference.sampling import SamplingParams
from inference.trajectory import Trajectory
from tests.inference.tiny import start_trajectory, tiny_llama

SIZES = range(3, 0, -1)
TOKENS = st.lists(st.integers(0, 3), max_size=24)
RNG = np.random.default_rng(0)


def suffix_counts() -> SuffixCounts:
    """Return counts on top of a history."""
    history = SharedHistory(SIZES, 1000)
    history.add([0, 1, 2, 3, 0, 1, 3])
    return SuffixCounts(SIZES, history)


MODELS = pytest.mark.parametrize("make_model", [lambda: LatestFollower(SIZES), suffix_counts])


def told(make_model: Callable[[], TokenModel], tokens: Sequence[int]) -> TokenModel:
    """Return a model that was told the tokens."""
    model = make_model()
    for token in tokens:
        model.tell(token)
    return model


@MODELS
@given(before=TOKENS, drafted=TOKENS, after=TOKENS)
def test_take_back_is_the_exact_inverse_of_tell(
    make_model: Callable[[], TokenModel], before: list[int], drafted: list[int], after: list[int]
) -> None:
    model = told(make_model, before)
    state = {k: deepcopy(v) for k, v in vars(model).items() if k != "_history"}
    for token in drafted:
        model.tell(token)
    for _ in drafted:
        model.take_back()
    assert {k: v for k, v in vars(model).items() if k != "_history"} == state
    clean = told(make_model, before)
    for token in after:
        model.tell(token)
        clean.tell(token)
        assert model.propose() == clean.propose()


@given(tokens=TOKENS)
def test_lookup_proposes_what_last_followed_the_longest_known_gram(tokens: list[int]) -> None:
    expected = NO_PROPOSAL
    for size in SIZES:
        gram = tokens[-size:]
        places = [
            i
            for i in range(size, len(tokens))
            if tokens[i - size : i] == gram and len(gram) == size
        ]
        if places:
            expected = tokens[places[-1]]
            break
    assert told(lambda: LatestFollower(SIZES), tokens).propose() == expected


@given(tokens=TOKENS, earlier=TOKENS)
def test_suffix_proposes_the_most_frequent_follower_of_the_longest_known_suffix(
    tokens: list[int], earlier: list[int]
) -> None:
    history = SharedHistory(SIZES, 1000)
    history.add(earlier)
    expected = NO_PROPOSAL
    for size in SIZES:
        suffix = tokens[-size:]
        followers = Counter(
            text[i]
            for text in (tokens, earlier)
            for i in range(size, len(text))
            if len(suffix) == size and text[i - size : i] == suffix
        )
        if followers:
            expected = min(followers, key=lambda token: (-followers[token], token))
            break
    assert told(lambda: SuffixCounts(SIZES, history), tokens).propose() == expected


def test_a_suffix_taken_back_leaves_no_memory_behind() -> None:
    model = SuffixCounts(SIZES, SharedHistory(SIZES, 10))
    for token in (1, 2, 3):
        model.tell(token)
    size = len(model._followers)
    for _ in range(50):
        for token in (5, 6, 7):
            model.tell(token)
        for _ in range(3):
            model.take_back()
    assert len(model._followers) == size


def trajectory_of(prompt: Sequence[int], output: Sequence[int] = ()) -> Trajectory:
    """Return a request whose output is known."""
    target = tiny_llama()
    trajectory = start_trajectory(target, prompt)
    if output:
        hidden = trajectory._hidden.new_zeros((len(output), target.hidden_size))
        trajectory.extend(output, hidden, None)
    return trajectory


def extend(trajectory: Trajectory, *token_ids: int) -> None:
    """Verify more tokens."""
    hidden = trajectory._hidden.new_zeros((len(token_ids), trajectory._hidden.shape[1]))
    trajectory.extend(token_ids, hidden, None)


def test_prompt_lookup_continues_the_last_occurrence() -> None:
    trajectory = trajectory_of([1, 2, 3, 4, 9, 1, 2])
    session = PromptLookupDrafter().start(trajectory, stream="s", draws_drafts=False)
    assert session.draft(4, RNG).token_ids == (3, 4, 9, 1)
    assert session.draft(2, RNG).token_ids == (3, 4)
    extend(trajectory, 7)
    assert session.draft(4, RNG).token_ids == ()
    extend(trajectory, 1, 2)
    assert session.draft(2, RNG).token_ids == (7, 1)


@pytest.mark.parametrize("drafter", [PromptLookupDrafter(), SuffixDrafter()])
def test_predictions_are_the_drafts_of_a_fresh_session(
    drafter: PromptLookupDrafter | SuffixDrafter,
) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 60).tolist()
    prompt, levels = 8, 4
    starts = np.arange(prompt + 1, 60 - levels)
    windows = WindowBatch(
        starts=starts,
        num_levels=np.full(len(starts), levels),
        num_speculative_tokens=levels,
    )
    session = drafter.start(
        trajectory_of(tokens[:prompt], tokens[prompt:]), stream="s", draws_drafts=False
    )
    proposals = session.predict(windows).proposals
    assert proposals is not None
    for start, row in zip(starts, proposals, strict=True):
        fresh = drafter.start(
            trajectory_of(tokens[:prompt], tokens[prompt:start]), stream="s", draws_drafts=False
        )
        draft = fresh.draft(levels, RNG).token_ids
        for level in range(levels):
            # Beyond its first wrong token a draft and the verified text have parted.
            if list(draft[:level]) != tokens[start : start + level]:
                break
            assert row[level] == (draft[level] if level < len(draft) else NO_PROPOSAL)


def test_a_chain_that_ended_is_not_taken_up_again() -> None:
    trajectory = trajectory_of([1, 2, 3], [4, 5, 1, 2, 3, 4])
    session = PromptLookupDrafter().start(trajectory, stream="s", draws_drafts=False)
    windows = WindowBatch(
        starts=np.array([4, 6]), num_levels=np.array([3, 3]), num_speculative_tokens=3
    )
    proposals = session.predict(windows).proposals
    assert proposals is not None
    # Nothing is known behind 3 4 at first; at position 6 the pair (5, 1) is new as well.
    assert proposals.tolist() == [[NO_PROPOSAL] * 3, [NO_PROPOSAL] * 3]


def test_suffix_history_is_shared_inside_a_stream_only() -> None:
    drafter = SuffixDrafter(shortest=2)
    session = drafter.start(trajectory_of([1, 2, 3], [4, 5]), stream="ours", draws_drafts=False)
    session.finish()
    for stream, expected in (("ours", (3, 4, 5)), ("theirs", ())):
        found = drafter.start(trajectory_of([9, 1, 2]), stream=stream, draws_drafts=False)
        assert found.draft(8, RNG).token_ids == expected


def test_suffix_history_can_be_switched_off() -> None:
    drafter = SuffixDrafter(share_history=False)
    drafter.start(trajectory_of([1, 2, 3, 4]), stream="s", draws_drafts=False).finish()
    later = drafter.start(trajectory_of([9, 1, 2]), stream="s", draws_drafts=False)
    assert later.draft(4, RNG).token_ids == ()


def test_suffix_history_is_bounded_and_forgets_the_oldest() -> None:
    history = SharedHistory(range(2, 1, -1), 10)
    for first in range(0, 400, 4):
        history.add([first, first + 1, first + 2, first + 3])
        assert len(history._followers) <= 10
    assert history.get((0, 1)) == {}
    assert history.get((396, 397)) == {398: 1}
    history.add([396, 397, 398])
    assert history.get((396, 397)) == {398: 2}


def test_a_prompt_shorter_than_every_gram_proposes_nothing() -> None:
    for drafter in (PromptLookupDrafter(), SuffixDrafter()):
        session = drafter.start(trajectory_of([1]), stream="s", draws_drafts=False)
        assert session.draft(4, RNG).token_ids == ()


def test_nothing_proposes_nothing() -> None:
    session = NothingDrafter().start(trajectory_of([1]), stream="s", draws_drafts=False)
    windows = WindowBatch(
        starts=np.arange(2), num_levels=np.array([1, 1]), num_speculative_tokens=3
    )
    assert session.draft(4, RNG).token_ids == ()
    proposals = session.predict(windows).proposals
    assert proposals is not None
    assert proposals.tolist() == [[NO_PROPOSAL] * 3] * 2


@pytest.mark.parametrize("make_drafter", [PromptLookupDrafter, SuffixDrafter])
@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (-1, 1)])
def test_invalid_sizes_are_refused(
    make_drafter: type[PromptLookupDrafter] | type[SuffixDrafter], shortest: int, longest: int
) -> None:
    with pytest.raises(ValueError, match=f"shortest={shortest} outside 1..longest={longest}"):
        make_drafter(shortest=shortest, longest=longest)


def test_a_session_reads_every_token_once() -> None:
    class Counting(LatestFollower):
        num_told = 0

        def tell(self, token_id: int) -> None:
            self.num_told += 1
            super().tell(token_id)

        def take_back(self) -> None:
            self.num_told -= 1
            super().take_back()

    model = Counting(SIZES)
    trajectory = trajectory_of([1, 2, 1, 2])
    session = TokenModelSession(model, trajectory)
    for token in (1, 2, 3):
        session.draft(3, RNG)
        extend(trajectory, token)
        assert model.num_told == len(trajectory) - 1


def test_params_are_not_read_by_token_drafters() -> None:
    target = tiny_llama()
    sampled = start_trajectory(target, [1, 2, 3, 1, 2], SamplingParams(temperature=1.0))
    session = PromptLookupDrafter().start(sampled, stream="s", draws_drafts=True)
    draft = session.draft(1, RNG)
    assert draft.token_ids == (3,)
    assert draft.probs is None
