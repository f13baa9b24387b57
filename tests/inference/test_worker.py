"""What a worker reports is what happened, under the versions that were in force."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from inference.drafters.hydra import HydraDrafter
from inference.drafters.nothing import NothingDrafter
from inference.engine import PromptTooLongError
from inference.ports import Draft
from inference.recording import Round
from inference.sampling import SamplingParams
from inference.target import Target
from learner.request_selector import RequestSelector
from schemas.arrow import LoggedEvent
from schemas.codec import decode_verification_event, encode
from schemas.equality import same_message
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    DrafterVersion,
    VerificationEvent,
)
from tests.inference import fakes
from tests.inference.segments import check_segments, drafters_of
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.test_drafters_hydra import head
from tests.inference.tiny import (
    VOCAB_SIZE,
    plain_greedy,
    random_prompts,
    start_trajectory,
    tiny_llama,
)
from tests.schemas.builders import make_policy

GREEDY = SamplingParams(max_tokens=50)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=50, seed=5)


@pytest.mark.parametrize(
    ("params", "draws_drafts", "rule"),
    [
        (GREEDY, False, AcceptanceRule.GREEDY),
        (SAMPLED, False, AcceptanceRule.ONE_HOT),
        (SAMPLED, True, AcceptanceRule.SPECULATIVE_SAMPLING),
    ],
)
def test_events_are_valid_join_and_survive_the_wire(
    params: SamplingParams, draws_drafts: bool, rule: AcceptanceRule
) -> None:
    target, outbox, states = tiny_llama(1), Outbox(), HiddenStates()
    worker = new_worker(
        target, drafters_of(target), outbox, states=states, draws_drafts=draws_drafts
    )
    prompt = random_prompts(1, count=1, length=12)[0]
    completion = worker.serve(request_of(prompt, params))
    events = outbox.events
    check_segments(events)
    assert len(events) >= 3
    assert {one.sampling.acceptance_rule for one in events} == {rule}
    contents = [one.content for one in events if one.content is not None]
    assert np.concatenate([one.token_ids for one in contents]).tolist() == list(
        completion.token_ids
    )
    assert contents[0].prompt_token_ids.tolist() == prompt
    assert all(len(one.prompt_token_ids) == 0 for one in contents[1:])
    for event in events:
        assert same_message(decode_verification_event(encode(event)), event)
    starts = np.concatenate([one.windows.start for one in events])
    assert starts.tolist() == list(range(13, 12 + len(completion.token_ids) - 1))


def test_greedy_output_of_the_worker_is_the_targets_own() -> None:
    target, outbox = tiny_llama(1), Outbox()
    prompts = random_prompts(2, count=6, length=12)
    worker = new_worker(target, drafters_of(target), outbox)
    found = [list(worker.serve(request_of(prompt, GREEDY)).token_ids) for prompt in prompts]
    assert found == plain_greedy(target, prompts, 50)


def test_recorded_states_and_distributions_are_those_of_the_bare_model() -> None:
    target, outbox, states = tiny_llama(1), Outbox(), HiddenStates()
    prompt = random_prompts(1, count=1, length=12)[0]
    worker = new_worker(target, drafters_of(target), outbox, states=states)
    completion = worker.serve(request_of(prompt, GREEDY))
    ids = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
    with torch.inference_mode():
        whole = target.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, 11:]
        log_probs = target.model.lm_head(whole).log_softmax(-1)
    for event in outbox.events:
        content = event.content
        assert content is not None
        assert content.features is not None
        first = event.first_position - 12
        rows = slice(first, first + event.num_positions)
        expected = whole[rows].numpy()
        np.testing.assert_allclose(states.read(content.features), expected, atol=1e-4)
        top = torch.from_numpy(content.target_top_token_ids.astype(np.int64))
        np.testing.assert_allclose(
            content.target_top_log_probabilities,
            log_probs[rows].gather(1, top).numpy(),
            atol=2e-2,
        )
        mass = np.exp(content.target_top_log_probabilities.astype(np.float64)).sum(-1)
        np.testing.assert_allclose(mass + content.target_tail_mass, 1.0, atol=5e-3)


def test_without_consent_no_content_leaves_the_worker() -> None:
    target, outbox, states = tiny_llama(1), Outbox(), HiddenStates()
    worker = new_worker(target, drafters_of(target), outbox, states=states)
    worker.serve(request_of([1, 2, 3], GREEDY, has_consent=False))
    check_segments(outbox.events)
    assert [one.content for one in outbox.events] == [None] * len(outbox.events)
    assert not states.uri_to_rows


def test_content_without_a_recorder_has_no_features() -> None:
    target, outbox = tiny_llama(1), Outbox()
    new_worker(target, drafters_of(target), outbox).serve(request_of([1, 2, 3], GREEDY))
    for event in outbox.events:
        assert event.content is not None
        assert event.content.features is None


def test_sequences_increase_over_requests_and_event_ids_never_repeat() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, drafters_of(target), outbox)
    for number in range(4):
        worker.serve(request_of([1, 2, 3 + number], GREEDY, request_id=f"request-{number}"))
    assert [one.sequence for one in outbox.events] == list(range(len(outbox.events)))
    assert len({one.event_id for one in outbox.events}) == len(outbox.events)


def test_new_weights_are_taken_up_between_segments_and_no_window_mixes_versions() -> None:
    """B6: a new head arrives in every round; each event names the ones that really drafted."""
    target, outbox = tiny_llama(1), Outbox()
    first = head(target, 1, size=VOCAB_SIZE)
    heads = {
        version: HydraDrafter("head", version, head(target, version).weights, first.rows)
        for version in range(1, 60)
    }
    worker = new_worker(target, [NothingDrafter(), heads[1]], outbox, policy="fixed:head")
    versions = iter(range(2, 60))
    asked: list[int] = []

    def arrive(one: Round) -> None:
        outbox.drafters = [heads[next(versions)]]
        asked.append(one.first_position)

    prompt = random_prompts(1, count=1, length=12)[0]
    completion = worker.serve(request_of(prompt, GREEDY), on_round=arrive)
    assert list(completion.token_ids) == plain_greedy(target, [prompt], 50)[0]
    events = outbox.events
    check_segments(events)
    named = [event.drafters[1].weights_version for event in events]
    assert len(set(named)) == len(named) >= 3
    assert named == sorted(named)
    tokens = [*prompt, *completion.token_ids]
    for event in events:
        # Windows lie within their segment: they began under the versions that scored them.
        assert (event.windows.start >= event.first_position).all()
        check_scored_by(heads[event.drafters[1].weights_version], target, tokens, event)


def test_a_swap_pauses_serving_for_less_than_a_round_and_changes_no_output() -> None:
    """A segment before whose first round a new version is taken up, against all other rounds."""
    target = tiny_llama(1)
    drawn = head(target, 1, size=VOCAB_SIZE)
    first = HydraDrafter("head", 1, drawn.weights, drawn.rows)
    prompt = random_prompts(1, count=1, length=12)[0]

    def played(*, swaps: bool) -> tuple[list[int], float, float]:
        outbox = Outbox()
        worker = new_worker(target, [NothingDrafter(), first], outbox, policy="fixed:head")
        work = worker.begin(request_of(prompt, SamplingParams(max_tokens=200)))
        at_swaps, others = [], []
        while not work.is_finished:
            is_swap = bool(outbox.drafters) or not swaps
            num_events = len(outbox.events)
            began = time.thread_time()
            work.step()
            seconds = time.thread_time() - began
            if len(outbox.events) > num_events and is_swap:
                at_swaps.append(seconds)
            else:
                others.append(seconds)
            if swaps:
                version = len(outbox.events) + 2
                outbox.drafters = [HydraDrafter("head", version, first.weights, first.rows)]
        work.close()
        assert len(at_swaps) >= 8
        return work.output_token_ids, float(np.median(at_swaps)), float(np.median(others))

    plain, reported, _ = played(swaps=False)
    swapped, at_swap, round_seconds = played(swaps=True)
    assert swapped == plain
    assert at_swap - reported <= round_seconds


def check_scored_by(
    one: HydraDrafter, target: Target, tokens: list[int], event: VerificationEvent
) -> None:
    """Check the first level of all windows, and the rounds, against one version of the head."""
    output = target.start().forward(tokens[:-1])
    for start, scores in zip(
        event.windows.start, event.windows.acceptance_probability[:, 0, 1], strict=True
    ):
        assert scores == (drafted(one, target, tokens, output.hidden, int(start), 1) == 1)
    rounds = event.rounds
    for position, count, accepted in zip(
        rounds.first_position, rounds.num_draft_tokens, rounds.num_accepted_tokens, strict=True
    ):
        if count:
            found = drafted(one, target, tokens, output.hidden, int(position), int(count))
            assert found == accepted


def drafted(
    one: HydraDrafter,
    target: Target,
    tokens: list[int],
    hidden: torch.Tensor,
    position: int,
    count: int,
) -> int:
    """Return how many drafts of ``one`` at ``position`` agree with the text."""
    trajectory = start_trajectory(target, tokens[: position - 1])
    trajectory.extend(tokens[position - 1 : position], hidden[position - 2 : position - 1], None)
    session = one.start(trajectory, stream="s", draws_drafts=False)
    draft = session.draft(count, np.random.default_rng(0)).token_ids
    agree = [a == b for a, b in zip(draft, tokens[position:], strict=False)]
    return int(np.cumprod(agree).sum())


def test_selection_in_the_event_can_be_played_again() -> None:
    """The prior, the windows, and when they were learned give every logged probability."""
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, drafters_of(target), outbox)
    worker.serve(request_of(random_prompts(4, count=1, length=12)[0], GREEDY))
    first = outbox.events[0]
    prior = first.prior_probabilities
    selector = RequestSelector.fresh("normal_hedge", 4, 4, prior=prior)
    awake = np.ones(4, dtype=np.bool_)
    num_checked = 0
    for event in outbox.events:
        done, windows = 0, event.windows
        for index, chosen in enumerate(event.rounds.drafter_index):
            if chosen != NO_DRAFTER:
                expected = selector.probabilities(awake)[chosen]
                assert event.rounds.selection_probability[index] == np.float32(expected)
                num_checked += 1
            count = int(event.rounds.num_scored_windows[index])
            learned = slice(done, done + count)
            if count:
                selector.learn(
                    windows.acceptance_probability[learned],
                    windows.realised_acceptance[learned],
                    windows.num_levels[learned],
                )
            done += count
    assert num_checked > 15


def test_a_published_policy_is_the_prior_of_its_stream_only() -> None:
    target, outbox = tiny_llama(1), Outbox()
    drafters = drafters_of(target)
    versions = tuple(drafter.version for drafter in drafters)
    worker = new_worker(target, drafters, outbox)
    policy = make_policy(stream="stream-a", version=3, drafters=versions)
    outbox.policies = [policy, make_policy(stream="stream-a", version=2, drafters=versions)]
    worker.serve(request_of([1, 2, 3], GREEDY))
    worker.serve(request_of([1, 2, 3], GREEDY, stream="stream-b"))
    ours = [one for one in outbox.events if one.stream == "stream-a"]
    theirs = [one for one in outbox.events if one.stream == "stream-b"]
    assert {one.policy_version for one in ours} == {3}
    np.testing.assert_allclose(ours[0].prior_probabilities, policy.selection_probabilities)
    assert {one.policy_version for one in theirs} == {0}
    assert theirs[0].prior_probabilities.tolist() == [0.25] * 4


def test_a_policy_that_arrives_in_a_request_waits_for_the_next() -> None:
    target, outbox = tiny_llama(1), Outbox()
    drafters = drafters_of(target)
    versions = tuple(drafter.version for drafter in drafters)
    worker = new_worker(target, drafters, outbox)

    def arrive(_: Round) -> None:
        outbox.policies = [make_policy(stream="stream-a", version=7, drafters=versions)]

    worker.serve(request_of([1, 2, 3], GREEDY, request_id="one"), on_round=arrive)
    worker.serve(request_of([1, 2, 3], GREEDY, request_id="two"))
    assert {one.policy_version for one in outbox.events if one.request_id == "one"} == {0}
    assert {one.policy_version for one in outbox.events if one.request_id == "two"} == {7}


def test_a_failed_drafter_is_reported_as_not_scored() -> None:
    target, outbox = tiny_llama(1), Outbox()
    broken = fakes.proposing(Draft(token_ids=(VOCAB_SIZE,)), drafter_id="broken")
    worker = new_worker(target, [broken, NothingDrafter()], outbox, policy="hedge")
    worker.serve(request_of([1, 2, 3], GREEDY))
    assert worker.pool.failures == {"broken": 1}
    check_segments(outbox.events)
    later = outbox.events[-1]
    assert np.isnan(later.windows.acceptance_probability[:, :, 0]).all()
    assert (later.rounds.drafter_index == 1).all()
    assert later.drafters[0] == DrafterVersion(drafter_id="broken", weights_version=0)


def test_seeded_requests_repeat_and_others_do_not() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, [NothingDrafter()], outbox)
    free = SamplingParams(temperature=1.0, max_tokens=20)
    seeded = [worker.serve(request_of([1, 2], SAMPLED)).token_ids for _ in range(2)]
    drawn = [worker.serve(request_of([1, 2], free)).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 7])
def test_any_k_gives_valid_events(num_speculative_tokens: int) -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(
        target,
        drafters_of(target),
        outbox,
        num_speculative_tokens=num_speculative_tokens,
        policy="hedge",
    )
    for max_tokens in (1, 2, 17):
        worker.serve(request_of([1, 2, 3], SamplingParams(max_tokens=max_tokens)))
    logged = [
        LoggedEvent(topic="t", partition=0, offset=0, appended_at=one.produced_at, event=one)
        for one in outbox.events
    ]
    assert [one.event.is_final for one in logged].count(True) == 3


def test_invalid_prompt_leaves_the_worker_able_to_serve() -> None:
    target, outbox = tiny_llama(1, context_length=32), Outbox()
    worker = new_worker(target, [NothingDrafter()], outbox)
    with pytest.raises(PromptTooLongError):
        worker.serve(request_of([1] * 40, GREEDY))
    assert not outbox.events
    assert len(worker.serve(request_of([1] * 20, GREEDY)).token_ids) == 12
