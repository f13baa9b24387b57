"""Where requests start from: new tenants, new domains, and prompts that tell the domain or mislead.

The text is that of ``pipeline.bench.synthetic``, one domain per request. Tenants have streams of
their own, ``tenant.domain``; the requests of the last two settings share one stream and are short,
so that how they start is most of what they are. Their prompts are made up or, from a folder, real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from learner.request_selector import FIRST_WINDOWS
from learner.router import Router, best_drafter
from learner.selection import DEFAULT_POLICY, parse_policy
from learner.started_walks import StartedWalks, StreamEvidence
from learner.walk import Coins, PreparedTrace, Walker, prepare
from pipeline.bench.domains import read_domains
from pipeline.bench.selection import Interval, Lengths, ratio
from pipeline.bench.streams import SelectionStream, play, play_choices
from pipeline.bench.synthetic import STAY, SyntheticPool, synthetic_pool, trace_of_domains

NUM_DRAFTERS = 8
NUM_TENANTS = 3
FIRST_TOKENS = 50
"""Length of what is counted of a new stream."""

LONG, SHORT = 600, 100
NUM_SHORT_REQUESTS = 240
NUM_PROMPT_TOKENS = 64
VOCABULARY = 8000
DOMAIN_WORDS = 200
PLAIN_SHARE = 0.5
"""Of a prompt's tokens, those that any domain has."""

BOTH = f"{DEFAULT_POLICY}:scope=both"
ROUTER = "static router"

NEW_TENANTS, NEW_DOMAINS = "new tenants", "new domains"
PROMPTS, MISLEADING = "prompts tell the domain", "prompts mislead"
REAL_PROMPTS = "real prompts"

PromptOf = Callable[[int], list[int]]
"""Draws the tokens of a prompt of a domain."""


def run_starts(
    seeds: Sequence[int], console: Console, *, prompts: Path | None = None
) -> dict[str, Any]:
    """Run the four settings, and with the folder of the prompt sets a fifth.

    Returns:
        Flat keys with intervals, and rows under ``table``.
    """
    runs: dict[str, list[Lengths]] = {}
    for seed in track(seeds, "starts of requests", console=console):
        for name, found in starts_of_seed(seed, prompts).items():
            runs.setdefault(name, []).append(found)
    keys: dict[str, float] = {}
    for name, lengths in runs.items():
        keys |= ratio(lengths, BOTH, DEFAULT_POLICY).keys(
            f"both_vs_default_{name.replace(' ', '_')}"
        )
    table = [
        {
            "stream": name,
            "num_drafters": NUM_DRAFTERS,
            "policy": policy,
            **Interval.of([run[policy] for run in found]).keys("mean_acceptance_length"),
        }
        for name, found in runs.items()
        for policy in found[0]
    ]
    return {**keys, "table": table}


def starts_of_seed(seed: int, prompts: Path | None = None) -> dict[str, Lengths]:
    """Return the mean acceptance length of every policy in every setting."""
    dice = np.random.default_rng([seed, NUM_DRAFTERS]).spawn(6)
    pool = synthetic_pool(NUM_DRAFTERS, dice[0])
    num_domains = len(pool.rates)
    telling = made_prompts(num_domains, dice[3], is_misleading=False)
    misleading = made_prompts(num_domains, dice[4], is_misleading=True)
    found: dict[str, Lengths] = {
        NEW_TENANTS: new_streams(pool, dice[1], is_known=True),
        NEW_DOMAINS: new_streams(pool, dice[2], is_known=False),
        PROMPTS: prompted(pool, dice[3], telling),
        MISLEADING: prompted(pool, dice[4], misleading),
    }
    if prompts is not None:
        found[REAL_PROMPTS] = prompted(pool, dice[5], real_prompts(prompts, dice[5]))
    return found


def _request(
    pool: SyntheticPool, domain: int, num_tokens: int, generator: np.random.Generator
) -> PreparedTrace:
    domains = np.full(num_tokens, domain, dtype=np.int64)
    trace = trace_of_domains(pool, domains, generator)
    coins = Coins.toss(generator, num_tokens, trace.num_speculative_tokens)
    return prepare(trace, coins)


def _walker(pool: SyntheticPool, policy: str) -> Walker:
    return Walker(parse_policy(policy), pool.rates.shape[1])


def _ids(pool: SyntheticPool) -> tuple[str, ...]:
    return tuple(f"drafter-{index}" for index in range(pool.rates.shape[1]))


def new_streams(
    pool: SyntheticPool, generator: np.random.Generator, *, is_known: bool
) -> dict[str, float]:
    """Serve tenants of all domains, then count the first tokens of a tenant that is new.

    Args:
        pool: The drafters.
        generator: The dice.
        is_known: Whether other tenants of its domain were served; else only other domains were.
    """
    num_domains = len(pool.rates)
    rounds = {DEFAULT_POLICY: 0, BOTH: 0}
    for domain in range(num_domains):
        known = [d for d in range(num_domains) if is_known or d != domain]
        evidence = StreamEvidence()
        walks = StartedWalks(parse_policy(BOTH), evidence)
        for tenant in range(NUM_TENANTS):
            for other in known:
                request = _request(pool, other, LONG, generator)
                stream = f"tenant-{tenant}.domain-{other}"
                walks.walk(stream, _ids(pool), _walker(pool, BOTH), request)
                evidence.learn(stream, _ids(pool), request)
        new = _request(pool, domain, FIRST_TOKENS, generator)
        rounds[DEFAULT_POLICY] += len(_walker(pool, DEFAULT_POLICY).walk(new).length)
        stream = f"new.domain-{domain}"
        rounds[BOTH] += len(walks.walk(stream, _ids(pool), _walker(pool, BOTH), new).length)
    return {name: num_domains * FIRST_TOKENS / count for name, count in rounds.items()}


def prompted(
    pool: SyntheticPool, generator: np.random.Generator, prompt_of: PromptOf
) -> dict[str, float]:
    """Serve one stream of short requests; ``prompt_of`` gives the tokens of a domain's prompt."""
    requests, prompts = [], []
    for domain in _domains(len(pool.rates), generator):
        prompts.append(prompt_of(domain))
        requests.append(_request(pool, domain, SHORT, generator))
    stream = SelectionStream(
        drafter_ids=_ids(pool),
        requests=requests,
        groups=np.full(len(requests), -1, dtype=np.int64),
        parts=[np.zeros(SHORT, dtype=np.int64)] * len(requests),
    )
    walks = StartedWalks(parse_policy(BOTH), StreamEvidence())
    walker = _walker(pool, BOTH)
    num_rounds = sum(
        len(walks.walk("s", _ids(pool), walker, request, prompt_token_ids=prompt).length)
        for request, prompt in zip(requests, prompts, strict=True)
    )
    routed = play_choices(stream, _routed(requests, prompts))
    played = {
        name: play(stream, parse_policy(name)).mean_acceptance_length
        for name in (DEFAULT_POLICY, "normal_hedge")
    }
    return {
        **played,
        BOTH: stream.num_tokens / num_rounds,
        ROUTER: routed.mean_acceptance_length,
    }


def _domains(num_domains: int, generator: np.random.Generator) -> Iterator[int]:
    domain = int(generator.integers(num_domains))
    for _ in range(NUM_SHORT_REQUESTS):
        if generator.random() >= STAY:
            domain = int(generator.integers(num_domains))
        yield domain


def made_prompts(
    num_domains: int, generator: np.random.Generator, *, is_misleading: bool
) -> PromptOf:
    """Return prompts in which half of the words are of a domain: of theirs, or of any."""
    words = generator.integers(VOCABULARY, size=(num_domains, DOMAIN_WORDS))

    def prompt_of(domain: int) -> list[int]:
        said = int(generator.integers(num_domains)) if is_misleading else domain
        return _prompt(words[said], generator)

    return prompt_of


def real_prompts(folder: Path, generator: np.random.Generator) -> PromptOf:
    """Return the training prompts of seven real domains, each once before any comes again.

    A word counts as a token, by a hash of its text.
    """
    turns = [
        cycle([domain.train[int(index)] for index in generator.permutation(len(domain.train))])
        for domain in read_domains(folder)
    ]
    return lambda domain: [crc32(word.encode()) for word in next(turns[domain]).split()]


def _prompt(words: NDArray[np.int64], generator: np.random.Generator) -> list[int]:
    plain = generator.integers(VOCABULARY, size=NUM_PROMPT_TOKENS)
    special = generator.choice(words, NUM_PROMPT_TOKENS)
    is_plain = generator.random(NUM_PROMPT_TOKENS) < PLAIN_SHARE
    return [int(token) for token in np.where(is_plain, plain, special)]


def _routed(
    requests: Sequence[PreparedTrace], prompts: Sequence[Sequence[int]]
) -> list[NDArray[np.int64]]:
    """Return what a router alone plays, (P,) per request: the likeliest drafter, to the end."""
    router = Router(requests[0].accepted.shape[1])
    choices = []
    for request, prompt in zip(requests, prompts, strict=True):
        chosen = int(router.probabilities(prompt).argmax())
        choices.append(np.full(len(request.accepted), chosen, dtype=np.int64))
        best = best_drafter(request.loss_to_losses["first"][:FIRST_WINDOWS])
        if best is not None:
            router.learn(prompt, best)
    return choices


def merged(result: Mapping[str, Any], starts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the benchmark's result with these keys and rows added."""
    return {**result, **starts, "table": [*result["table"], *starts["table"]]}
