"""Level 1 ahead of its window: learned at once, and told just so when the window is complete."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import Drafter, Predictions, WindowBatch
from inference.recording import Round
from inference.sampling import SamplingParams
from inference.scoring import ScoredBatch
from inference.trajectory import Trajectory
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.test_drafters_hydra import head
from tests.inference.test_scoring import LEVELS, Batches, drafters_of
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_llama

GREEDY = SamplingParams(max_tokens=30)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.97, max_tokens=30)


class Learned:
    """Collects what the selector of a request is taught."""

    def __init__(self, run: RequestRun) -> None:
        self.starts: list[int] = []
        self.first: list[NDArray[np.float16]] = []
        learn = run.selector.learn

        def remember(
            probability: NDArray[np.float16],
            realised: NDArray[np.float16],
            num_levels: NDArray[np.int16],
            starts: NDArray[np.int32],
        ) -> None:
            self.starts.extend(starts.tolist())
            self.first.extend(probability[:, 0])
            learn(probability, realised, num_levels, starts)

        run.selector.learn = remember  # type: ignore[assignment, method-assign]


def started(
    drafters: list[Drafter],
    params: SamplingParams = GREEDY,
    *,
    policy: str = "fixed_share",
    first_level_block: int = 1,
    draws_drafts: bool = False,
) -> tuple[RequestRun, Batches, Learned]:
    """Return a request that has not begun, with what it will score and learn."""
    options = EngineOptions(
        num_speculative_tokens=LEVELS,
        score_block=5,
        first_level_block=first_level_block,
        draws_drafts=draws_drafts,
    )
    prompt = random_prompts(3, count=1, length=12)[0]
    run = fakes.start_run(
        tiny_llama(1), DrafterPool(drafters), prompt, params, options=options, policy=policy
    )
    return run, Batches(run), Learned(run)


def check_told_as_learned(rounds: list[Round], scored: ScoredBatch, learned: Learned) -> None:
    """Check that windows are told in order, once, with the level 1 that was learned of them."""
    assert learned.starts == scored.starts.tolist()
    assert sum(one.num_scored_windows for one in rounds) == len(learned.starts)
    told = scored.acceptance_probability[:, 0]
    assert np.array(learned.first).tobytes() == told.tobytes()


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(("params", "draws"), [(GREEDY, False), (SAMPLED, False), (SAMPLED, True)])
def test_windows_are_the_same_and_learned_as_soon_as_they_have_begun(
    params: SamplingParams, draws: bool, block: int
) -> None:
    target = tiny_llama(1)
    found = {}
    for ahead in (0, block):
        run, batches, learned = started(
            drafters_of(target),
            params,
            first_level_block=ahead,
            draws_drafts=draws,
            policy="fixed_share:learning_rate=1e-9,choice=sample",
        )
        rounds = fakes.finish(run)
        scored = batches.joined()
        check_told_as_learned(rounds, scored, learned)
        found[ahead] = scored
        if not ahead:
            continue
        num_learned = np.cumsum([one.num_scored_windows for one in rounds])
        num_begun = np.cumsum([one.num_emitted_tokens for one in rounds]) - 1
        assert (num_begun[:-1] - num_learned[:-1] < block).all()
    for name in ("starts", "num_levels", "acceptance_probability", "realised_acceptance"):
        one, other = (getattr(scored, name) for scored in found.values())
        np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.parametrize("policy", ["normal_hedge", "fixed_share:loss=hybrid", "fixed:0"])
def test_policies_that_learn_whole_windows_wait_for_them(policy: str) -> None:
    target = tiny_llama(1)
    run, batches, learned = started(drafters_of(target), policy=policy)
    rounds = fakes.finish(run)
    check_told_as_learned(rounds, batches.joined(), learned)
    lag = (
        np.cumsum([one.num_emitted_tokens for one in rounds])
        - 1
        - np.cumsum([one.num_scored_windows for one in rounds])
    )
    assert lag[:-1].max() > LEVELS


def forgetful() -> fakes.FakeDrafter:
    """Return a drafter that never predicts the same twice."""
    rng = np.random.default_rng(7)

    def predict(trajectory: Trajectory, windows: WindowBatch) -> Predictions:
        tokens = np.array(trajectory.token_ids)
        levels = np.arange(windows.num_speculative_tokens)
        positions = np.minimum(windows.starts[:, None] + levels, len(tokens) - 1)
        right = rng.random(positions.shape) < 0.5
        return Predictions(
            proposals=np.where(right, tokens[positions], (tokens[positions] + 1) % 9)
        )

    drafter = fakes.random_tokens(VOCAB_SIZE, drafter_id="forgetful")
    drafter.prediction = predict
    return drafter


def test_what_was_learned_is_told_even_if_it_would_be_predicted_otherwise_now() -> None:
    run, batches, learned = started([forgetful(), forgetful_named("other")])
    rounds = fakes.finish(run)
    check_told_as_learned(rounds, batches.joined(), learned)


def forgetful_named(drafter_id: str) -> fakes.FakeDrafter:
    """Return another one."""
    drafter = forgetful()
    drafter.drafter_id = drafter_id
    return drafter


def test_after_new_weights_windows_that_had_begun_tell_level_1_and_nothing_else() -> None:
    target = tiny_llama(1)
    first = head(target, 1, size=VOCAB_SIZE)
    pool: list[Drafter] = [first, *drafters_of(target)[:2]]
    run, batches, learned = started(pool)
    rounds: list[Round] = []
    borders = []
    while run.finish_reason is FinishReason.UNFINISHED:
        rounds.append(run.step())
        if len(rounds) in (4, 9):
            # Any change renews; the scorer alone decides what that leaves out.
            run.scorer.skip_incomplete()
            borders.append(len(run.trajectory))
    scored = batches.joined()
    check_told_as_learned(rounds, scored, learned)
    assert scored.starts.tolist() == list(range(13, 12 + len(run.output_token_ids) - 1))
    deeper = np.asarray(~np.isnan(scored.acceptance_probability[:, 1:]).all(axis=(1, 2)))
    last_whole = scored.num_levels > 1
    for start, has_deeper, could in zip(scored.starts, deeper, last_whole, strict=True):
        crosses = any(start < border <= start + LEVELS for border in borders)
        assert has_deeper == (could and not crosses), start


def test_with_one_level_there_is_nothing_left_to_predict() -> None:
    target = tiny_llama(1)
    options = EngineOptions(num_speculative_tokens=1, score_block=5, first_level_block=1)
    run = fakes.start_run(
        target, drafters_of(target), [1, 2, 3], GREEDY, options=options, policy="fixed_share"
    )
    batches, learned = Batches(run), Learned(run)
    rounds = fakes.finish(run)
    scored = batches.joined()
    check_told_as_learned(rounds, scored, learned)
    assert not np.isnan(scored.acceptance_probability).any()


def test_a_block_larger_than_a_window_still_comes_before_the_window() -> None:
    target = tiny_llama(1)
    run, batches, learned = started(drafters_of(target), first_level_block=9)
    rounds = fakes.finish(run)
    check_told_as_learned(rounds, batches.joined(), learned)


def test_positions_that_are_left_out_are_neither_learned_nor_told() -> None:
    target = tiny_llama(1)
    run, batches, learned = started(drafters_of(target))
    run.scorer.leave_out(range(15, 18))
    rounds = fakes.finish(run)
    scored = batches.joined()
    check_told_as_learned(rounds, scored, learned)
    assert set(range(13, 25)) - set(scored.starts.tolist()) == {15, 16, 17}
