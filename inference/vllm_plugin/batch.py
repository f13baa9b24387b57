"""The rows of a batch, step by step: what was verified is learned, then each row is drafted for.

A step is: take in what was emitted; see who has gone; choose (drafter, K) for every row by cost;
draft. Everything a step needs is at hand or looked up in microseconds; events leave through a
sink that returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from inference.vllm_plugin.choosing import shared_out, token_price, worthwhile
from inference.vllm_plugin.guard import Guard
from inference.vllm_plugin.head_batch import RowHeads, learn_emitted
from inference.vllm_plugin.heads_at_work import HeadsAtWork
from inference.vllm_plugin.lookup import Certainty, Histories, RequestLookup
from inference.vllm_plugin.lookup_kernels import LOOKUP, SUFFIX
from inference.vllm_plugin.ports import HEAD_KINDS, Connection, RequestFacts, StepFacts
from inference.vllm_plugin.reporting import Reporting
from inference.vllm_plugin.row_recorder import RowRecorder, RowRound
from inference.vllm_plugin.rows import RequestRow, RowBook, RowDraft, event_request_id
from inference.vllm_plugin.runner_hook import sampling_rule, state_rows
from inference.vllm_plugin.step_costs import StepCosts
from schemas.events import NO_DRAFTER

KIND_TO_LOOKUP = {"prompt_lookup": LOOKUP, "suffix": SUFFIX}

LONGEST_IDLE_STEPS = 4096
"""Steps without a token after which a request is taken for gone, where no ids are handed over."""


class BatchDrafter:
    """Drafts for the rows of one engine process.

    Args:
        connection: To the event log.
        num_levels: K, most tokens of a draft.
        max_positions: Most tokens of a request.
        seed: Of the coins that choose what heads are scored on.

    Attributes:
        guard: What failed.
        step_seconds, own_seconds: Seconds of the steps seen, and of ours between them.
        part_seconds: Ours by part: taking in, choosing and drafting.
    """

    def __init__(
        self, connection: Connection, *, num_levels: int, max_positions: int, seed: int = 0
    ) -> None:
        options = connection.options
        self._connection = connection
        self._num_levels = num_levels
        self._max_positions = max_positions
        self.guard = Guard(lambda kind: connection.counters.count("failures", drafter=kind))
        kinds = [one.kind for one in options.pool]
        self._lookup_places = tuple(
            next((i for i, kind in enumerate(kinds) if KIND_TO_LOOKUP.get(kind) == lookup), -1)
            for lookup in (LOOKUP, SUFFIX)
        )
        places = tuple(i for i, kind in enumerate(kinds) if kind in HEAD_KINDS)
        self.heads = HeadsAtWork(
            places, num_levels, options.scoring_share, self.guard, np.random.default_rng(seed)
        )
        self.reporting = Reporting(connection, num_levels, self._lookup_places, places)
        self.histories = Histories(options.history_bytes, is_shared=options.shares_streams)
        self._certainty = Certainty()
        self.costs = StepCosts(num_levels)
        self.book = RowBook()
        self._num_slots = 1 << (options.segment_tokens + 4 * (num_levels + 1) + 8).bit_length()
        self._last_end = 0.0
        self._last_own = 0.0
        self._last_rows: list[RequestRow | None] = []
        self._is_running: Callable[[str], bool] | None = None
        # Reported in part, and to be gone on with under another id.
        self._interrupted: set[str] = set()
        self.step_seconds = 0.0
        self.own_seconds = 0.0
        self.part_seconds = {"take_in": 0.0, "draft": 0.0, "score": 0.0}

    def step(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.int32],
        facts: StepFacts | None,
    ) -> list[list[int]]:
        """Take in a step and draft for the next.

        Args:
            sampled_token_ids: Tokens that each row emitted; empty while it reads its prompt.
            num_tokens: Verified tokens of each row, those emitted included.
            token_ids: (rows, positions), valid up to ``num_tokens``.
            facts: What the runner handed over beside them.

        Returns:
            Draft tokens of every row.
        """
        began = time.perf_counter()
        elapsed = began - self._last_end if self._last_end else 0.0
        self._renew()
        rows = self._rows(sampled_token_ids, num_tokens, token_ids, facts)
        self._take_in(rows, sampled_token_ids, facts, elapsed)
        self._retire(facts)
        taken_in = time.perf_counter()
        drafts = self._draft(rows, len(sampled_token_ids))
        self.book.note_rows(rows)
        self._last_rows = rows
        self._last_end = time.perf_counter()
        self._last_own = self._last_end - began
        for request in rows:
            if request is not None and request.draft.token_ids:
                request.draft.draft_seconds = self._last_end - taken_in
        self._note_times(taken_in - began, self._last_end - taken_in, elapsed)
        return drafts

    def close_idle(self) -> None:
        """Report requests that have ended since the last step: the engine stands idle.

        vLLM takes a request off its runner with the next step alone, so the tokens are asked as
        well. One that was aborted waits for that step.
        """
        self._last_end = 0.0
        for request in self.book.requests:
            is_gone = self._is_running is not None and not self._is_running(request.key)
            if is_gone or self.reporting.has_ended(request, self._max_positions):
                self._end(request)

    def close(self) -> None:
        """Report all that is at work: the engine ends."""
        for request in self.book.requests:
            self._end(request)

    def forget(self) -> None:
        """Drop all requests at work: after a failure nothing is sure of them."""
        for request in self.book.requests:
            self._interrupted.add(request.key)
            self.book.remove(request)
        self.book.note_rows([])
        self._last_rows, self._last_end = [], 0.0

    def _renew(self) -> None:
        """Take up releases; segments are cut, as an event names one version per drafter."""
        arrived = [
            one
            for one in self._connection.inbox.take_drafters()
            if self.heads.knows(one.version.drafter_id, self._connection.options.pool)
        ]
        policies = self._connection.inbox.take_policies()
        if arrived:
            for request in self.book.requests:
                self.reporting.cut(request)
                request.recorder.skip_incomplete()
                request.heads.asked.clear()
            for drafter in arrived:
                self.reporting.renew(drafter)
                self.heads.renew(drafter)
            for request in self.book.requests:
                request.recorder.is_dense = not self.heads.has_any
                self.heads.arrange(request.heads, request.recorder.request_id)
        for policy in policies:
            start = partial(self.heads.start_from, policy, self._connection.options.pool)
            self.guard.run("policy", start, None)

    def _rows(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.int32],
        facts: StepFacts | None,
    ) -> list[RequestRow | None]:
        """Return the request of every row that emitted something, begun where it is new."""
        rows: list[RequestRow | None] = [None] * len(sampled)
        emitting = [row for row, tokens in enumerate(sampled) if tokens]
        before = [int(num_tokens[row]) - len(tokens) for row, tokens in enumerate(sampled)]
        known = {} if facts else self.book.by_tokens(emitting, token_ids, before)
        for row in emitting:
            if before[row] < 1:
                continue
            key = facts.request_ids[row] if facts else ""
            request = self.book.by_id(key) if facts else known.get(row)
            if request is not None and not request.begins(token_ids[row], before[row]):
                # vLLM has rewritten it, or a row's tokens are not what they were.
                self._end(request)
                self._interrupted.add(key)
                request = None
            if request is None:
                request = self._begin(key, token_ids[row, : before[row]], facts)
            self._catch_up(request, token_ids[row, : before[row]])
            rows[row] = request
        return rows

    def _begin(self, key: str, prompt: NDArray[np.int32], facts: StepFacts | None) -> RequestRow:
        options = self._connection.options
        known = facts.request(key) if facts else RequestFacts(sampling=sampling_rule(0.0, 1.0, 0))
        stream = known.stream or options.default_stream
        is_continued = key in self._interrupted
        if not is_continued:
            prompt = prompt[: known.num_prompt_tokens]
        lookup = RequestLookup(
            np.array(prompt, dtype=np.int32),
            self._num_levels,
            self._num_slots,
            self.histories.of(stream),
            self._certainty,
        )
        recorder = RowRecorder(
            self.reporting.facts,
            request_id=self.reporting.request_id(
                event_request_id(key) if key else "", is_continued=is_continued
            ),
            stream=stream,
            request=known,
            lookup=lookup,
            has_content=stream in options.consenting_streams,
        )
        recorder.is_dense = not self.heads.has_any
        heads = RowHeads.fresh(self.heads.num_heads)
        self.heads.arrange(heads, recorder.request_id)
        request = RequestRow(key, stream, known, lookup, recorder, heads)
        self.book.add(request)
        return request

    def _catch_up(self, request: RequestRow, row: NDArray[np.int32]) -> None:
        """Take in tokens of steps that were not shown: plain steps, as far as can be known.

        Near the end of the context vLLM asks nobody for drafts.
        """
        missed = row[request.lookup.num_tokens :]
        request.draft = request.draft if not missed.size else RowDraft()
        for at in range(missed.size):
            self._verified(request, missed[at : at + 1].astype(np.int32), None, 0, 0.0, 1)

    def _catch_up_with_runner(self, request: RequestRow) -> None:
        """Take in what the runner knows of a request that has ended, maybe in steps not shown."""
        written = np.array(request.facts.written, dtype=np.int32)
        if written.size and request.facts.num_prompt_tokens is not None:
            prompt = request.lookup.tokens[: request.facts.num_prompt_tokens]
            row = np.concatenate([prompt, written])
            if request.begins(row, row.size):
                self._catch_up(request, row)

    def _take_in(
        self,
        rows: Sequence[RequestRow | None],
        sampled: Sequence[Sequence[int]],
        facts: StepFacts | None,
        elapsed: float,
    ) -> None:
        places = None
        if facts is not None and facts.states is not None:
            counts = [len(tokens) for tokens in sampled]
            places = state_rows(counts, facts.num_draft_tokens, len(facts.states))
        num_rows = sum(request is not None for request in rows)
        num_drafted = num_emitted = 0
        for row, request in enumerate(rows):
            if request is None:
                continue
            emitted = np.array(sampled[row], dtype=np.int32)
            verified = None
            if facts is not None:
                verified = facts.num_draft_tokens[row] if facts.num_draft_tokens else 0
                request.draft.keep_if_verified(facts.draft_token_ids, request.key)
            states = None
            if places is not None and facts is not None and facts.states is not None:
                states = facts.states[places[row] : places[row] + emitted.size]
            drafted = self._emitted(request, emitted, states, verified, elapsed, num_rows)
            num_drafted += drafted
            num_emitted += emitted.size
        if self._is_plain(rows, facts, num_drafted) and elapsed > 0.0:
            self.costs.observe(num_rows, num_drafted, num_emitted, elapsed, self._last_own)
        self.step_seconds += elapsed + self._last_own if elapsed else 0.0

    def _emitted(
        self,
        request: RequestRow,
        emitted: NDArray[np.int32],
        states: torch.Tensor | None,
        num_verified: int | None,
        elapsed: float,
        num_rows: int,
    ) -> int:
        """Take in one row; return how many of its drafted tokens were verified.

        Accepted tokens that this proposer did not draft count as plain steps: once a row is near
        the end of the context, vLLM drafts token 0 for all of them by itself.
        """
        if request.draft.token_ids or emitted.size <= 1:
            return self._verified(request, emitted, states, num_verified, elapsed, num_rows)
        for at in range(emitted.size):
            state = None if states is None else states[at : at + 1]
            seconds = elapsed if at == 0 else 0.0
            self._verified(request, emitted[at : at + 1], state, 0, seconds, num_rows)
        return 0

    def _verified(
        self,
        request: RequestRow,
        emitted: NDArray[np.int32],
        states: torch.Tensor | None,
        num_verified: int | None,
        elapsed: float,
        num_rows: int,
    ) -> int:
        """Take in one row; return how many of its drafted tokens were verified."""
        if self.reporting.is_full(request):
            # Not before it goes on: what stands behind the end of a request is no output.
            self.guard.run("emit", lambda: self.reporting.cut(request), None)
        draft = request.draft
        drafted = len(draft.token_ids) if num_verified is None else num_verified
        # vLLM may verify fewer than were drafted: a grammar, or the end of the context.
        drafted = max(drafted, emitted.size - 1) if draft.token_ids else 0
        request.recorder.add_round(
            RowRound(
                first_position=request.lookup.num_tokens,
                drafter_index=draft.drafter_index if draft.token_ids else NO_DRAFTER,
                num_draft_tokens=drafted,
                num_accepted_tokens=min(emitted.size - 1, drafted),
                num_emitted_tokens=emitted.size,
                draft_seconds=draft.draft_seconds,
                verify_seconds=elapsed,
                score_seconds=0.0,
                batch_size=num_rows,
                score_probability=draft.score_probability,
            ),
            # A row's states hold on to those of the whole step.
            None if self._connection.recorder is None else states,
        )
        self.reporting.count_round(request, drafted, int(emitted.size))
        learn_emitted(self.heads.records, request.heads, request.stream, emitted)
        request.lookup.advance(emitted)
        request.state = None if states is None or not len(states) else states[-1]
        request.draft = RowDraft()
        request.num_idle_steps = 0
        return drafted

    def _is_plain(
        self, rows: Sequence[RequestRow | None], facts: StepFacts | None, num_drafted: int
    ) -> bool:
        """Tell whether the step only went on with the rows of the step before."""
        if any(request is None for request in rows) or len(rows) != len(self._last_rows):
            return False
        if facts is not None and facts.num_scheduled_tokens:
            return facts.num_scheduled_tokens == len(rows) + num_drafted
        return {id(one) for one in rows} == {id(one) for one in self._last_rows}

    def _retire(self, facts: StepFacts | None) -> None:
        """Report requests that have ended."""
        self._is_running = None if facts is None else facts.is_running
        if self._interrupted:
            is_running = facts.is_running if facts else lambda _: False
            self._interrupted = {one for one in self._interrupted if is_running(one)}
        for request in self.book.requests:
            if facts is not None:
                has_ended = not facts.is_running(request.key)
            else:
                request.num_idle_steps += 1
                has_ended = request.num_idle_steps > LONGEST_IDLE_STEPS
            if has_ended:
                self._end(request)

    def _end(self, request: RequestRow) -> None:
        self.book.remove(request)
        self.guard.run("catch up", lambda: self._catch_up_with_runner(request), None)
        self.guard.run("emit", lambda: self.reporting.end(request, self._max_positions), None)
        request.lookup.share()

    def _draft(self, rows: Sequence[RequestRow | None], size: int) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(size)]
        working = [(row, request) for row, request in enumerate(rows) if request is not None]
        if not working or self._num_levels == 0 or self.costs.owes_bare_step(len(working)):
            return drafts
        requests = [request for _, request in working]
        cost, rate = self.costs.cost(len(requests)), self.costs.rate(len(requests))
        price = token_price(cost, rate)
        room = np.array([self._room(request) for request in requests])
        chances = np.stack([request.lookup.chances for request in requests])
        for lookup, place in enumerate(self._lookup_places):
            if place < 0:
                chances[:, lookup] = 0.0
        _, values = worthwhile(chances, room, price)
        best = values.argmax(axis=1)
        index = np.arange(len(requests))
        lookup_values = values[index, best]
        by_head = self.heads.draft(requests, room, lookup_values, price, cost, rate)
        reach = np.cumprod(chances, axis=2)[index, best]
        is_heads = np.array([one.value for one in by_head]) > lookup_values
        for at in np.flatnonzero(is_heads).tolist():
            reach[at] = 0.0
            reach[at, : by_head[at].reach.size] = by_head[at].reach
        reach[np.arange(self._num_levels) >= room[:, None]] = 0.0
        levels = shared_out(reach, cost, rate)
        for at, (row, request) in enumerate(working):
            count = int(levels[at])
            if not count:
                continue
            if is_heads[at]:
                place, tokens = by_head[at].place, by_head[at].token_ids[:count]
            else:
                place = self._lookup_places[int(best[at])]
                tokens = request.lookup.draft(int(best[at]), count)
            request.draft = replace(request.draft, drafter_index=place, token_ids=tokens)
            drafts[row] = list(tokens)
        return drafts

    def _room(self, request: RequestRow) -> int:
        """Return how many tokens may be drafted: the last one is always the target's own."""
        size = request.lookup.num_tokens
        room = self._max_positions - size - 1
        if request.facts.max_tokens is not None:
            written = size - (request.facts.num_prompt_tokens or request.recorder.num_prompt_tokens)
            room = min(room, request.facts.max_tokens - written - 1)
        return max(min(room, self._num_levels), 0)

    def _note_times(self, taken_in: float, drafted: float, elapsed: float) -> None:
        scored = self.heads.take_score_seconds()
        self.part_seconds["take_in"] += taken_in
        self.part_seconds["draft"] += drafted - scored
        self.part_seconds["score"] += scored
        self.own_seconds += taken_in + drafted
        count = self._connection.counters.count
        count("own_seconds", taken_in, drafter="take_in")
        count("own_seconds", drafted - scored, drafter="draft")
        count("own_seconds", scored, drafter="score")
        # What the engine waited for somebody else to ask is no step of it.
        count("step_seconds", elapsed + taken_in + drafted if elapsed else 0.0)
