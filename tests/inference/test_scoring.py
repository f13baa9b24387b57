"""A window's numbers are those of a draft that was really made there and really verified."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import Draft, Drafter, Predictions, WindowBatch
from inference.sampling import SamplingParams
from inference.scoring import ScoredBatch, WindowScorer
from inference.target import Target
from inference.trajectory import Trajectory
from inference.verification import verify_tokens
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.test_drafters_hydra import head
from tests.inference.tiny import VOCAB_SIZE, random_prompts, start_trajectory, tiny_llama

LEVELS = 4
GREEDY = SamplingParams(max_tokens=30)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.97, max_tokens=30)
NUM_PROMPT_TOKENS = 12


def drafters_of(target: Target) -> list[Drafter]:
    """Return a pool where every kind is right now and then."""
    first = head(target, 1, size=VOCAB_SIZE)
    return [
        PromptLookupDrafter(longest=2, shortest=1),
        SuffixDrafter(shortest=1, share_history=False),
        CausalLmDrafter(target, target, drafter_id="copy"),
        CausalLmDrafter(tiny_llama(50), target, drafter_id="other"),
        first,
        head(target, 2, rows=first.rows),
    ]


class Batches:
    """Collects what the scorer of a request gives."""

    def __init__(self, run: RequestRun) -> None:
        self.found: list[ScoredBatch] = []
        score = run.scorer.score

        def remember(session: object, *, is_final: bool) -> ScoredBatch | None:
            batch = score(session, is_final=is_final)  # type: ignore[arg-type]
            if batch is not None:
                self.found.append(batch)
            return batch

        run.scorer.score = remember  # type: ignore[method-assign]

    def joined(self) -> ScoredBatch:
        """Return all windows as one batch."""
        return ScoredBatch(
            starts=np.concatenate([one.starts for one in self.found]),
            num_levels=np.concatenate([one.num_levels for one in self.found]),
            acceptance_probability=np.concatenate([b.acceptance_probability for b in self.found]),
            realised_acceptance=np.concatenate([b.realised_acceptance for b in self.found]),
        )


def played(
    target: Target,
    drafters: list[Drafter],
    params: SamplingParams,
    *,
    draws_drafts: bool = False,
    block: int = 5,
    policy: str = "fixed:3",
) -> tuple[RequestRun, ScoredBatch]:
    """Play one request that keeps all its distributions, and return its windows."""
    prompt = random_prompts(3, count=1, length=NUM_PROMPT_TOKENS)[0]
    options = EngineOptions(
        num_speculative_tokens=LEVELS, score_block=block, draws_drafts=draws_drafts
    )
    run = fakes.start_run(target, drafters, prompt, params, options=options, policy=policy)
    run.trajectory.forget_probs = lambda before: None  # type: ignore[method-assign]
    batches = Batches(run)
    fakes.finish(run)
    return run, batches.joined()


def cut(trajectory: Trajectory, target: Target, length: int) -> Trajectory:
    """Return the request as it was when it had ``length`` tokens."""
    prompt = trajectory.num_prompt_tokens
    shorter = start_trajectory(target, trajectory.token_ids[:prompt], trajectory.params)
    hidden = trajectory.hidden(prompt, length).clone()
    shorter.extend(trajectory.token_ids[prompt:length], hidden, None)
    return shorter


def fresh_draft(
    drafter: Drafter, trajectory: Trajectory, target: Target, start: int, *, draws_drafts: bool
) -> Draft:
    """Let a session that knows nothing else draft from position ``start``."""
    session = drafter.start(
        cut(trajectory, target, start), stream="fresh", draws_drafts=draws_drafts
    )
    return session.draft(LEVELS, np.random.default_rng(start))


def test_greedy_windows_have_the_length_of_a_real_draft() -> None:
    target = tiny_llama(1)
    drafters = drafters_of(target)
    run, scored = played(target, drafters, GREEDY)
    tokens = run.trajectory.token_ids
    lengths = set()
    for window, (start, levels) in enumerate(zip(scored.starts, scored.num_levels, strict=True)):
        for index, drafter in enumerate(drafters):
            draft = fresh_draft(drafter, run.trajectory, target, int(start), draws_drafts=False)
            verified = verify_tokens(
                tokens[start : start + levels + 1], draft.token_ids[: int(levels)]
            )
            column = scored.realised_acceptance[window, :levels, index]
            assert np.cumprod(column).sum() == verified.num_accepted_tokens
            assert np.array_equal(column, scored.acceptance_probability[window, :levels, index])
            lengths.add((index, verified.num_accepted_tokens))
    # The comparison compared something: four of the six are right now and then.
    assert {index for index, accepted in lengths if accepted > 0} >= {0, 1, 2, 5}


def test_one_hot_windows_carry_p_of_the_draft_and_whether_it_was_emitted() -> None:
    target = tiny_llama(1)
    drafters = drafters_of(target)
    run, scored = played(target, drafters, SAMPLED)
    tokens = run.trajectory.token_ids
    for window, (start, levels) in enumerate(zip(scored.starts, scored.num_levels, strict=True)):
        for index, drafter in enumerate(drafters):
            draft = fresh_draft(drafter, run.trajectory, target, int(start), draws_drafts=False)
            for level in range(int(levels)):
                if list(draft.token_ids[:level]) != tokens[start : start + level]:
                    break
                is_drafted = level < len(draft.token_ids)
                token = draft.token_ids[level] if is_drafted else -1
                p = float(run.trajectory.probs(int(start) + level)[token]) if is_drafted else 0.0
                found = scored.acceptance_probability[window, level, index]
                assert found == pytest.approx(p, abs=1e-3)
                realised = scored.realised_acceptance[window, level, index]
                assert realised == (token == tokens[start + level])


def test_drawn_windows_carry_the_overlap_and_the_ratio_of_the_emitted_token() -> None:
    """γ = Σ min(p, q) and a = min(1, q / p), q from a real draft along the verified tokens."""
    target = tiny_llama(1)
    drafters = drafters_of(target)[2:]
    run, scored = played(target, drafters, SAMPLED, draws_drafts=True, policy="fixed:1")
    tokens = run.trajectory.token_ids
    for window, (start, levels) in enumerate(zip(scored.starts, scored.num_levels, strict=True)):
        for index, drafter in enumerate(drafters):
            rows = forced_rows(drafter, run.trajectory, target, int(start), int(levels))
            for level, q in enumerate(rows):
                p, token = run.trajectory.probs(int(start) + level), tokens[start + level]
                overlap = float(torch.minimum(p, q).sum())
                ratio = min(1.0, float(q[token] / p[token]))
                found = scored.acceptance_probability[window, level, index]
                assert found == pytest.approx(overlap, abs=2e-3)
                realised = scored.realised_acceptance[window, level, index]
                assert realised == pytest.approx(ratio, abs=2e-3)
    assert np.nanmin(scored.acceptance_probability[..., 0]) > 0.99


def forced_rows(
    drafter: Drafter, trajectory: Trajectory, target: Target, start: int, levels: int
) -> list[torch.Tensor]:
    """Draft from ``start`` and make every drawn token the verified one, by choosing the dice."""
    session = drafter.start(cut(trajectory, target, start), stream="fresh", draws_drafts=True)
    rows: list[torch.Tensor] = []
    dice = Dice([])
    for level in range(levels):
        probs = session.draft(level + 1, dice.rewound()).probs
        assert probs is not None
        rows.append(probs[level])
        ladder = torch.cat([torch.zeros(1).double(), probs[level].double().cumsum(-1)])
        low, high = ladder[trajectory.token_ids[start + level] :][:2].tolist()
        if high <= low:
            break
        dice.numbers.append((low + high) / 2.0 / float(ladder[-1]))
    return rows


class Dice:
    """A generator that says what it was told to, then 0.5."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers
        self._next = 0

    def rewound(self) -> np.random.Generator:
        """Begin again."""
        self._next = 0
        return self  # type: ignore[return-value]

    def random(self, size: int) -> np.ndarray:
        """Return the next numbers."""
        known = self.numbers[self._next : self._next + size]
        self._next += size
        return np.array([*known, *[0.5] * (size - len(known))])


@pytest.mark.parametrize("block", [1, 3, 16, 100])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_every_start_is_scored_once_however_the_windows_are_cut_into_blocks(
    params: SamplingParams, block: int
) -> None:
    target = tiny_llama(1)
    drafters = drafters_of(target)
    run, scored = played(target, drafters, params, block=block)
    end = len(run.trajectory)
    assert scored.starts.tolist() == list(range(NUM_PROMPT_TOKENS + 1, end - 1))
    assert scored.num_levels.tolist() == [
        min(LEVELS, end - 1 - start) for start in range(NUM_PROMPT_TOKENS + 1, end - 1)
    ]
    exists = np.arange(LEVELS) < scored.num_levels[:, None]
    for values in (scored.acceptance_probability, scored.realised_acceptance):
        assert not np.isnan(values[exists]).any()
        assert np.isnan(values[~exists]).all()
    _, whole = played(target, drafters, params, block=100)
    np.testing.assert_allclose(
        scored.acceptance_probability, whole.acceptance_probability, atol=1e-3
    )


def test_no_window_reads_a_position_that_is_not_verified() -> None:
    target = tiny_llama(1)
    longest: list[int] = []

    def look(trajectory: Trajectory, windows: WindowBatch) -> Predictions:
        ends = windows.starts + windows.num_levels
        # The position behind the last level is verified too, or the request has ended.
        assert (ends < len(trajectory)).all()
        longest.append(int(ends.max()))
        proposals = np.full((len(windows.starts), LEVELS), 7)
        return Predictions(proposals=proposals)

    spy = fakes.random_tokens(VOCAB_SIZE, drafter_id="spy")
    spy.prediction = look
    run, _ = played(target, [spy], GREEDY, block=2, policy="fixed:0")
    assert longest[-1] == len(run.trajectory) - 1
    assert all(a < b for a, b in pairwise(longest))


def test_a_request_of_one_token_has_no_window() -> None:
    target = tiny_llama(1)
    for max_tokens in (1, 2):
        params = SamplingParams(max_tokens=max_tokens)
        run = fakes.start_run(target, drafters_of(target), [1, 2, 3], params)
        rounds = fakes.finish(run)
        assert [one.num_scored_windows for one in rounds] == [0] * len(rounds)


def test_skip_incomplete_leaves_out_windows_that_began_before() -> None:
    target = tiny_llama(1)
    prompt = random_prompts(3, count=1, length=NUM_PROMPT_TOKENS)[0]
    options = EngineOptions(num_speculative_tokens=LEVELS, score_block=1)
    run = fakes.start_run(target, drafters_of(target), prompt, GREEDY, options=options)
    batches, skipped_at = Batches(run), 0
    while run.finish_reason is FinishReason.UNFINISHED:
        run.step()
        if not skipped_at and run.trajectory.num_output_tokens >= 12:
            skipped_at = len(run.trajectory)
            run.scorer.skip_incomplete()
    starts = batches.joined().starts.tolist()
    left_out = range(skipped_at - LEVELS, skipped_at)
    everything = range(NUM_PROMPT_TOKENS + 1, len(run.trajectory) - 1)
    assert starts == [start for start in everything if start not in left_out]


def broken(error: Exception) -> fakes.FakeDrafter:
    """Return a drafter that cannot be scored."""

    def fail(trajectory: Trajectory, windows: WindowBatch) -> Predictions:
        raise error

    drafter = fakes.random_tokens(VOCAB_SIZE, drafter_id="broken")
    drafter.prediction = fail
    return drafter


@pytest.mark.parametrize(
    "prediction",
    [
        Predictions(proposals=np.full((5, LEVELS), VOCAB_SIZE)),
        Predictions(proposals=np.zeros((5, LEVELS + 1), dtype=np.int64)),
        Predictions(probs=torch.full((5, LEVELS, VOCAB_SIZE), float("nan"))),
        Predictions(probs=torch.ones((5, LEVELS, VOCAB_SIZE - 1)) / VOCAB_SIZE),
    ],
)
def test_a_prediction_that_cannot_be_read_costs_its_drafter_the_request(
    prediction: Predictions,
) -> None:
    target = tiny_llama(1)
    drafter = broken(RuntimeError())
    drafter.prediction = lambda trajectory, windows: prediction
    run, scored = played(target, [*drafters_of(target), drafter], SAMPLED)
    assert run.drafters.is_awake.tolist() == [True] * 6 + [False]
    assert np.isnan(scored.acceptance_probability[..., 6]).all()


@pytest.mark.parametrize("error", [RuntimeError("broken"), FloatingPointError("NaN"), KeyError(3)])
def test_a_drafter_that_fails_is_not_scored_and_the_others_are(error: Exception) -> None:
    target = tiny_llama(1)
    drafters = [broken(error), *drafters_of(target)]
    run, scored = played(target, drafters, GREEDY)
    _, alone = played(target, drafters[1:], GREEDY)
    assert np.isnan(scored.acceptance_probability[..., 0]).all()
    np.testing.assert_array_equal(
        scored.acceptance_probability[..., 1:], alone.acceptance_probability
    )
    assert run.drafters.is_awake.tolist() == [False] + [True] * 6


def test_a_head_that_fails_inside_a_group_takes_no_other_head_with_it() -> None:
    target = tiny_llama(1)
    heads: list[HydraDrafter] = [head(target, 1, size=VOCAB_SIZE)]
    heads += [head(target, seed, rows=heads[0].rows) for seed in (2, 3)]
    drafters: list[Drafter] = [*heads, CausalLmDrafter(target, target, drafter_id="copy")]
    _, healthy = played(target, drafters, GREEDY)
    heads[1].weights["mix"].fill_(float("nan"))
    pool = DrafterPool(drafters)
    prompt = random_prompts(3, count=1, length=NUM_PROMPT_TOKENS)[0]
    options = EngineOptions(num_speculative_tokens=LEVELS, score_block=5)
    run = fakes.start_run(target, pool, prompt, GREEDY, options=options, policy="fixed:3")
    batches = Batches(run)
    fakes.finish(run)
    scored = batches.joined()
    assert pool.failures == {"head-2": 1}
    assert np.isnan(scored.acceptance_probability[..., 1]).all()
    np.testing.assert_array_equal(
        scored.acceptance_probability[..., [0, 2, 3]],
        healthy.acceptance_probability[..., [0, 2, 3]],
    )


def test_no_level_means_no_window() -> None:
    target = tiny_llama(1)
    trajectory = start_trajectory(target, [1, 2])
    trajectory.extend([3, 4, 5], torch.zeros((3, target.hidden_size)), None)
    session = DrafterPool(drafters_of(target)).start(
        trajectory, stream="s", vocab_size=VOCAB_SIZE, draws_drafts=False
    )
    assert WindowScorer(trajectory, 0, block=1).score(session, is_final=True) is None
