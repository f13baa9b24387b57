"""The engine: one request, round by round, from prompt to end.

A round is the algorithm of the loop: select a drafter, let it draft, verify in one target pass,
emit, score every drafter on what was verified, learn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.pool import DrafterPool
from inference.ports import Draft, Selector
from inference.recording import Round, SegmentRecorder
from inference.sampling import PositionDice, SamplingParams, draw, processed_probs
from inference.scoring import ScoredBatch, WindowScorer
from inference.stopping import Stopping
from inference.target import Target
from inference.trajectory import Trajectory
from inference.verification import Verification, verify_sampling, verify_tokens
from learner.request_selector import Decision
from schemas.errors import KnownError
from schemas.events import NO_DRAFTER, FinishReason


class PromptTooLongError(KnownError, ValueError):
    """The prompt leaves no room in the target's context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engine speculates.

    Attributes:
        num_speculative_tokens: K, most tokens of a draft; 0 for plain decoding.
        score_block: Complete windows that are scored at once; 0 scores nothing.
        first_level_block: Begun windows of which level 1 is scored at once, ahead of the rest,
            for a policy that learns nothing else; 0 = with the window.
        draws_drafts: Whether drafters draw (speculative sampling) or propose their most probable
            token. Without draws, seeded outputs do not depend on the drafter.
    """

    num_speculative_tokens: int = 4
    score_block: int = 8
    first_level_block: int = 0
    draws_drafts: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one target pass gave: rows of logits in force, and the states behind them."""

    logits: torch.Tensor
    hidden: torch.Tensor
    probs: torch.Tensor | None


class RequestRun:
    """One request at work. Call ``step`` until ``finish_reason`` is a reason.

    Args:
        target: The verifying model.
        pool: The drafters.
        prompt_token_ids: The prompt, at least one token.
        params: What is asked for.
        options: How to speculate.
        selector: Who drafts.
        stream: The request's stream, for drafters that share history.
        seed: Entropy of the request's draws.

    Raises:
        PromptTooLongError: If the context has no room for one more token.
    """

    def __init__(
        self,
        target: Target,
        pool: DrafterPool,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: EngineOptions,
        selector: Selector,
        *,
        stream: str,
        seed: np.random.SeedSequence,
    ) -> None:
        room = target.context_length - len(prompt_token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"{len(prompt_token_ids)} prompt tokens, context {target.context_length}: "
                "shorten the prompt"
            )
        self._options = options
        self._session = target.start()
        self.trajectory = Trajectory(
            prompt_token_ids,
            params,
            max_output_tokens=min(params.max_tokens, room),
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            device=target.device,
        )
        self.drafters = pool.start(
            self.trajectory,
            stream=stream,
            vocab_size=target.vocab_size,
            draws_drafts=options.draws_drafts and not params.is_greedy,
        )
        self.scorer = WindowScorer(
            self.trajectory,
            options.num_speculative_tokens,
            block=options.score_block,
            first_level_block=options.first_level_block if selector.learns_first_level else 0,
        )
        self.selector = selector
        self._stopping = Stopping(params, target.eos_token_ids, room=room, decode=target.decode)
        dice, drafting, selecting = (np.random.default_rng(s) for s in seed.spawn(3))
        self._dice = PositionDice(dice)
        self._draft_rng, self._selection_rng = drafting, selecting
        self.finish_reason = FinishReason.UNFINISHED

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.trajectory.token_ids[self.trajectory.num_prompt_tokens :]

    @property
    def text(self) -> str:
        """Text emitted so far, without a stop string."""
        return self._stopping.text(self.output_token_ids)

    def step(self, recorder: SegmentRecorder | None = None) -> Round:
        """Play one round; the first reads the prompt and emits one token."""
        if recorder is not None:
            recorder.note_awake(self.drafters.is_awake)
        if self.trajectory.num_output_tokens == 0 or not self.drafters.is_awake.any():
            return self._round(None, Draft(), 0.0, recorder)
        decision = self.selector.decide(self.drafters.is_awake, self._selection_rng)
        if decision.drafter_index == NO_DRAFTER:
            return self._round(decision, Draft(), 0.0, recorder)
        room = self._stopping.num_speculative_tokens(
            self.trajectory.num_output_tokens, decision.num_speculative_tokens
        )
        began = time.perf_counter()
        draft = self.drafters.draft(decision.drafter_index, room, self._draft_rng)
        return self._round(decision, draft, time.perf_counter() - began, recorder)

    def end(self, reason: FinishReason) -> None:
        """End the request where it is, for a reason that is not its own."""
        self.finish_reason = reason
        self.drafters.finish()

    def _round(
        self,
        decision: Decision | None,
        draft: Draft,
        draft_seconds: float,
        recorder: SegmentRecorder | None,
    ) -> Round:
        first_position = len(self.trajectory)
        began = time.perf_counter()
        target_pass = self._verify_pass(draft)
        verification = self._verify(draft, target_pass)
        num_emitted, self.finish_reason = self._stopping.cut(
            self.output_token_ids, verification.token_ids
        )
        self._emit(verification.token_ids[:num_emitted], target_pass)
        num_accepted = min(verification.num_accepted_tokens, num_emitted)
        verified = time.perf_counter()
        if decision is not None:
            self.selector.end_round(decision, len(draft.token_ids), num_accepted, num_emitted)
            if not decision.is_scored:
                self.scorer.leave_out(range(first_position, first_position + num_emitted))
        num_learned, scored = self._score()
        done = Round(
            first_position=first_position,
            drafter_index=NO_DRAFTER if decision is None else decision.drafter_index,
            num_draft_tokens=len(draft.token_ids),
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=num_emitted,
            num_scored_windows=num_learned,
            selection_probability=1.0 if decision is None else decision.probability,
            draft_seconds=draft_seconds,
            verify_seconds=verified - began,
            score_seconds=time.perf_counter() - verified,
            score_probability=1.0 if decision is None else decision.score_probability,
        )
        if recorder is not None:
            recorder.add_round(done, target_pass.logits[:num_emitted], scored)
        if self.finish_reason is not FinishReason.UNFINISHED:
            self.drafters.finish()
        return done

    def _verify_pass(self, draft: Draft) -> _Pass:
        """Feed what the target has not seen: the prompt, or the last token, and the draft."""
        unseen = self.trajectory.token_ids[self._session.length :]
        num_rows = len(draft.token_ids) + 1
        output = self._session.forward([*unseen, *draft.token_ids], num_rows=num_rows)
        if torch.isnan(output.logits.sum()):
            raise FloatingPointError("the target's logits are not numbers: its weights are broken")
        logits = self._stopping.mask_early_end(output.logits, self.trajectory.num_output_tokens)
        params = self.trajectory.params
        probs = None if params.is_greedy else processed_probs(logits, params)
        return _Pass(logits, output.hidden, probs)

    def _verify(self, draft: Draft, target_pass: _Pass) -> Verification:
        if target_pass.probs is None:
            # Widening first is exact, and several times faster than arg-max over bfloat16.
            chosen = target_pass.logits.float().argmax(-1).tolist()
            return verify_tokens(chosen, draft.token_ids)
        uniforms = self._dice.at(self.trajectory.num_output_tokens, len(draft.token_ids) + 1)
        if draft.probs is not None:
            return verify_sampling(target_pass.probs, draft.probs, draft.token_ids, uniforms)
        return verify_tokens(draw(target_pass.probs, uniforms[:, 1]), draft.token_ids)

    def _emit(self, token_ids: Sequence[int], target_pass: _Pass) -> None:
        count = len(token_ids)
        is_scored = min(self._options.score_block, self._options.num_speculative_tokens) > 0
        probs = target_pass.probs[:count] if target_pass.probs is not None and is_scored else None
        self.trajectory.extend(token_ids, target_pass.hidden[:count], probs)
        # The last emitted token has not been fed: the next pass begins with it.
        self._session.keep(len(self.trajectory) - 1)

    def _score(self) -> tuple[int, ScoredBatch | None]:
        """Score and learn; return (number of windows learned, complete windows)."""
        if self._options.score_block == 0:
            return 0, None
        is_final = self.finish_reason is not FinishReason.UNFINISHED
        learned = None
        if self.scorer.scores_first_levels:
            learned = self.scorer.score_first_levels(self.drafters, is_final=is_final)
        scored = self.scorer.score(self.drafters, is_final=is_final)
        if not self.scorer.scores_first_levels:
            learned = scored
        if learned is None:
            return 0, scored
        self.selector.learn(
            learned.acceptance_probability,
            learned.realised_acceptance,
            learned.num_levels,
            learned.starts,
        )
        return len(learned.starts), scored
