"""What the pool of 22 is recorded on: steady streams, and three ways to change the subject.

Request ids say which set a request belongs to: ``code-017`` (steady, stream = domain),
``shift-03:2`` (second turn of a conversation that goes A, B, A over two domains), ``two-05`` (two
tasks in one prompt) and ``document-02`` (one long text about several subjects). All prompts are
test prompts, and none is used twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from inference.engine import EngineOptions
from inference.sampling import SamplingParams
from pipeline.archive.recording_log import refuse_existing
from pipeline.bench.conversations import Conversation
from pipeline.bench.domains import Domain, read_domains
from pipeline.bench.pool import MIXED_DRAFTER, bench_pool
from pipeline.configuration.settings import Settings
from pipeline.recording import Recorded, RecordingOptions, record
from pipeline.wiring import open_target

SHIFT, TWO, DOCUMENT = "shift", "two", "document"
NUM_SPECULATIVE_TOKENS = 4

GREEDY_BLOCK = 32_000
"""Windows scored at once: all of a request, at its end; the policy is fixed and waits for none."""

SAMPLED_BLOCK = 8
"""Scoring drawn drafts holds a distribution per level, window and head, so fewer at once."""

WHOLE_REQUEST = 32_000
"""Tokens of a segment: a request is one event."""

MAX_PART_CHARACTERS = 320
"""Longest part of a document, so that repeating three parts fits its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficSize:
    """How much is recorded: requests and tokens of each set."""

    num_per_domain: int = 20
    num_shifts: int = 18
    num_twos: int = 12
    num_documents: int = 6
    steady_tokens: int = 96
    shift_tokens: int = 80
    two_tokens: int = 160
    document_tokens: int = 256


class _Prompts:
    """Hands out the test prompts of each domain, none twice."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._name_to_prompts = {domain.name: iter(domain.test) for domain in domains}

    def take(self, name: str) -> str:
        prompt = next(self._name_to_prompts[name], None)
        if prompt is None:
            raise ValueError(f"{name} has too few test prompts: record fewer requests")
        return prompt


def bench_conversations(domains: Sequence[Domain], size: TrafficSize) -> list[Conversation]:
    """Return the conversations of all sets; steady ones take turns over the domains.

    Raises:
        ValueError: If a domain has too few test prompts.
    """
    names, prompts = [domain.name for domain in domains], _Prompts(domains)
    return [
        *(
            Conversation(
                conversation_id=f"{name}-{index:03}",
                stream=name,
                turns=(prompts.take(name),),
                max_tokens=size.steady_tokens,
            )
            for index in range(size.num_per_domain)
            for name in names
        ),
        *_shifts(names, prompts, size),
        *_twos(names, prompts, size),
        *_documents(names, prompts, size),
    ]


def _pairs(names: Sequence[str], num_pairs: int) -> list[tuple[str, str]]:
    """Return ordered pairs of different domains, each domain about as often as the others."""
    count = len(names)
    pairs = [
        (names[first], names[(first + distance) % count])
        for distance in range(1, count)
        for first in range(count)
    ]
    return [pairs[index % len(pairs)] for index in range(num_pairs)]


def _shifts(names: Sequence[str], prompts: _Prompts, size: TrafficSize) -> Iterator[Conversation]:
    for index, (first, second) in enumerate(_pairs(names, size.num_shifts)):
        yield Conversation(
            conversation_id=f"{SHIFT}-{index:02}",
            stream=SHIFT,
            turns=tuple(prompts.take(name) for name in (first, second, first)),
            max_tokens=size.shift_tokens,
        )


def _twos(names: Sequence[str], prompts: _Prompts, size: TrafficSize) -> Iterator[Conversation]:
    for index, (first, second) in enumerate(_pairs(names, size.num_twos)):
        yield Conversation(
            conversation_id=f"{TWO}-{index:02}",
            stream=TWO,
            turns=(
                "Do two tasks, one after the other.\n\n"
                f"Task 1: {prompts.take(first)}\n\nTask 2: {prompts.take(second)}",
            ),
            max_tokens=size.two_tokens,
        )


def _documents(
    names: Sequence[str], prompts: _Prompts, size: TrafficSize
) -> Iterator[Conversation]:
    """Yield texts of three subjects, to be written and to be repeated in turn."""
    for index in range(size.num_documents):
        subjects = [names[(index + offset) % len(names)] for offset in (0, 1, 2)]
        parts = [_beginning(prompts.take(name)) for name in subjects]
        chapters = " ".join(f"Chapter {n}: {part}" for n, part in enumerate(parts, start=1))
        text = "\n\n".join(parts)
        yield Conversation(
            conversation_id=f"{DOCUMENT}-{index:02}",
            stream=DOCUMENT,
            turns=(
                f"Repeat this text word for word:\n\n{text}"
                if index % 2
                else f"Write a document with three chapters. {chapters}",
            ),
            max_tokens=size.document_tokens,
        )


def _beginning(prompt: str) -> str:
    """Return a part of a document: whole words, ended like a sentence."""
    if len(prompt) <= MAX_PART_CHARACTERS:
        return prompt
    return prompt[:MAX_PART_CHARACTERS].rsplit(" ", 1)[0].rstrip(",;:.") + "."


def record_bench_pool(
    settings: Settings,
    data: Path,
    out: Path,
    size: TrafficSize,
    *,
    temperature: float,
    resume: bool,
    stop: threading.Event,
    console: Console,
    json_file: Path | None = None,
) -> Recorded:
    """Record all sets with the pool of 22, which is trained first if it is not in the cache.

    Rounds are drafted by the mixed head alone, so that writing is fast; every drafter is scored.
    Above temperature 0 drafts are drawn (speculative sampling).

    Args:
        settings: Of the target and the cache.
        data: Folder of the prompt sets.
        out: Folder of the recording.
        size: How much.
        temperature: 0 is greedy.
        resume: Go on with what is in ``out``.
        stop: Ends the run early.
        console: Where progress and the result go.
        json_file: Where to write the result.

    Raises:
        PromptsError: If a prompt set is missing or broken.
        RecordingExistsError: If ``out`` holds a log, or one that was made otherwise.
    """
    domains = read_domains(data)
    conversations = bench_conversations(domains, size)
    if not resume:  # told before the model costs its time
        refuse_existing(out)
    target = open_target(settings, progress=console.log)
    drafters = bench_pool(target, domains, cache=settings.cache, console=console)
    is_greedy = temperature == 0.0
    options = RecordingOptions(
        out=out,
        sampling=SamplingParams(max_tokens=size.steady_tokens, temperature=temperature),
        policy=f"fixed:{MIXED_DRAFTER}",
        engine=EngineOptions(
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            score_block=GREEDY_BLOCK if is_greedy else SAMPLED_BLOCK,
            draws_drafts=not is_greedy,
        ),
        segment_tokens=WHOLE_REQUEST,
        resume=resume,
    )
    return record(
        target, drafters, conversations, options, stop=stop, console=console, json_file=json_file
    )
