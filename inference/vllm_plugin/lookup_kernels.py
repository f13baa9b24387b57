"""Looking up what followed the newest tokens before: one compiled pass over what a step emitted.

Ends of token pairs are chained, newest first, as match finders of compressors chain them: ``head``
(a power of two) holds the newest end of every hash, ``previous`` the end before each end. An end
``e`` matches the newest token ``n - 1`` if the tokens before both are equal, at least two of them;
what follows it is a candidate. That is a suffix tree's answer without a tree: memory is an
integer or two per token, and the work per token is bounded by ``MAX_CHAIN``. Single tokens have
chains of their own, which are asked where no pair matches: row ``PAIRS`` and row ``SINGLES``.

Two lookups share the candidates:

- ``LOOKUP``: the longest match in the request itself, the newest if there are several, followed as
  far as it goes (prompt lookup; Saxena 2023);
- ``SUFFIX``: all matches in the request and in the shared history vote, a match that is one token
  longer with twice the weight, level by level among those that agreed so far (after Oliaro et al.
  2024, "SuffixDecoding").

How sure a proposal is, is told by a *cell*: length of the best match, share of the votes, level,
and whether more than one agrees. ``counts`` says how often proposals of a cell came true; a row's
own ``bias`` (log-odds) says how much better or worse they do in this request.

Axes: D = 2 lookups, K levels, C cells, R slots of the ring of positions (position modulo R).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

LOOKUP, SUFFIX, NUM_LOOKUPS = 0, 1, 2
SINGLES, PAIRS, NUM_CHAINS = 0, 1, 2

MAX_CHAIN, MAX_CANDIDATES, MAX_MATCH = 64, 16, 16
"""Ends of a chain that are looked at, matches that are used (both per source, the newest first),
and tokens of a match that count."""

NO_TOKEN = -1
"""Ends a sequence of the history, and stands where nothing is proposed."""

NUM_LENGTHS, NUM_SHARES, NUM_LEVELS, NUM_SUPPORTS = 9, 4, 3, 2
NUM_CELLS = NUM_LENGTHS * NUM_SHARES * NUM_LEVELS * NUM_SUPPORTS

COUNT_MEMORY = 0.998  # per observation of a cell
PRIOR_OBSERVATIONS = 3.0
BIAS_STEP = 0.2
BIAS_MEMORY = 0.995
LARGEST_BIAS = 2.5


@compiled
def cell_of(length: int, share: float, level: int, support: int) -> int:
    """Return the cell of a proposal.

    ``length`` counts the tokens of the best match and those proposed before, ``share`` in (0, 1] is
    the votes' among those that agreed so far, ``level`` is 0 for the first token, and ``support``
    says how many matches propose it.
    """
    longest = length - 1
    if length >= 6:
        longest = 5 if length < 8 else (6 if length < 11 else (7 if length < 16 else 8))
    agreed = 0 if share < 0.4 else (1 if share < 0.7 else (2 if share < 0.97 else 3))
    depth = level if level < NUM_LEVELS else NUM_LEVELS - 1
    several = 1 if support > 1 else 0
    return ((longest * NUM_SHARES + agreed) * NUM_LEVELS + depth) * NUM_SUPPORTS + several


@compiled
def slot_of(chain: int, before: int, token: int, mask: int) -> int:
    """Return where a token, or the pair it ends, is chained."""
    first, second = (before if chain == PAIRS else NO_TOKEN), token
    mixed = (first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF) >> 8 & mask


@compiled
def candidates(
    chain: int,
    tokens: NDArray[np.int32],
    num_tokens: int,
    text: NDArray[np.int32],
    previous: NDArray[np.signedinteger],
    head: NDArray[np.signedinteger],
    num_text: int,
    following: NDArray[np.int64],
    lengths: NDArray[np.int64],
    first: int,
) -> int:
    """Add where matches of a request's newest tokens go on in a text, and how long they are.

    The text is the request itself, or the shared history: a ring whose places count up for ever.
    """
    size = text.size
    newest = num_tokens - 1
    count = first
    end = head[chain, slot_of(chain, tokens[newest - 1], tokens[newest], head.shape[1] - 1)]
    oldest = max(num_text - size, 0)
    steps = 0
    while end > oldest and steps < MAX_CHAIN and count < first + MAX_CANDIDATES:
        steps += 1
        place = end % size
        length = 0
        while length < MAX_MATCH and length <= newest and end - length >= oldest:
            at = place - length
            if text[at if at >= 0 else at + size] != tokens[newest - length]:
                break
            length += 1
        if length > chain:
            following[count] = end + 1
            lengths[count] = length
            count += 1
        end = previous[chain, place]
    return count


@compiled
def token_behind(
    place: int,
    level: int,
    is_own: bool,
    tokens: NDArray[np.int32],
    num_tokens: int,
    shared: NDArray[np.int32],
    num_shared: int,
    drafted: NDArray[np.int32],
) -> int:
    """Return the token that a candidate proposes at a level; what repeats goes on repeating."""
    at = place + level
    if is_own:
        return int(tokens[at]) if at < num_tokens else int(drafted[at - num_tokens])
    return int(shared[at % shared.size]) if at < num_shared else NO_TOKEN


@compiled
def vote(
    proposed: NDArray[np.int64], lengths: NDArray[np.int64], first: int, last: int
) -> tuple[int, float, int, int]:
    """Return (token, share of the votes, longest match, matches) of the best candidate token."""
    best = NO_TOKEN
    best_weight = 0.0
    total = 0.0
    best_length = 0
    best_support = 0
    for i in range(first, last):
        if proposed[i] == NO_TOKEN:
            continue
        weight = 0.0
        longest = 0
        support = 0
        for j in range(first, last):
            if proposed[j] == proposed[i]:
                weight += 2.0 ** lengths[j]
                support += 1
                longest = max(longest, lengths[j])
        total += 2.0 ** lengths[i]
        if weight > best_weight:
            best, best_weight = proposed[i], weight
            best_length, best_support = longest, support
    share = best_weight / total if total > 0.0 else 0.0
    return best, share, best_length, best_support


@compiled
def follow(
    first: int,
    last: int,
    num_own: int,
    following: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: NDArray[np.int32],
    num_tokens: int,
    shared: NDArray[np.int32],
    num_shared: int,
    drafted: NDArray[np.int32],
    cells: NDArray[np.int16],
) -> None:
    """Write the tokens that candidates ``first`` .. ``last`` - 1 propose, and their cells."""
    proposed = np.empty(last, dtype=np.int64)
    is_active = np.ones(last, dtype=np.bool_)
    for level in range(drafted.size):
        for i in range(first, last):
            proposed[i] = NO_TOKEN
            if is_active[i]:
                proposed[i] = token_behind(
                    following[i],
                    level,
                    i < num_own,
                    tokens,
                    num_tokens,
                    shared,
                    num_shared,
                    drafted,
                )
        token, share, length, support = vote(proposed, lengths, first, last)
        if token == NO_TOKEN:
            return
        drafted[level] = token
        cells[level] = cell_of(length + level, share, level, support)
        for i in range(first, last):
            is_active[i] = is_active[i] and proposed[i] == token


@compiled
def look_up(
    tokens: NDArray[np.int32],
    num_tokens: int,
    previous: NDArray[np.int32],
    head: NDArray[np.int32],
    shared: NDArray[np.int32],
    shared_previous: NDArray[np.int64],
    shared_head: NDArray[np.int64],
    num_shared: int,
    drafted: NDArray[np.int32],
    cells: NDArray[np.int16],
) -> None:
    """Write what both lookups propose to follow, (D, K); ``NO_TOKEN`` where they propose nothing.

    Args:
        tokens: Of the request.
        num_tokens: Those that are verified.
        previous: Chains of the request's ends, (2, as many as ``tokens``).
        head: Newest ends, (2, a power of two).
        shared: The shared history's ring of tokens.
        shared_previous: Its chains, likewise.
        shared_head: Its newest ends, likewise.
        num_shared: Tokens ever added to it.
        drafted: (D, K), written.
        cells: (D, K), written; -1 where nothing is proposed.
    """
    drafted[:] = NO_TOKEN
    cells[:] = -1
    if num_tokens < 2:
        return
    following = np.empty(2 * MAX_CANDIDATES, dtype=np.int64)
    lengths = np.empty(2 * MAX_CANDIDATES, dtype=np.int64)
    num_own = candidates(
        PAIRS, tokens, num_tokens, tokens, previous, head, num_tokens, following, lengths, 0
    )
    if num_own > 0:
        best = int(np.argmax(lengths[:num_own]))
        follow(
            best, best + 1, num_own, following, lengths, tokens, num_tokens, shared, num_shared,
            drafted[LOOKUP], cells[LOOKUP],
        )  # fmt: skip
    count = num_own
    for chain in (PAIRS, SINGLES):
        if chain == SINGLES:
            num_own = candidates(
                chain, tokens, num_tokens, tokens, previous, head, num_tokens, following, lengths, 0
            )
        count = candidates(
            chain, tokens, num_tokens, shared, shared_previous, shared_head, num_shared,
            following, lengths, num_own,
        )  # fmt: skip
        if count > 0:
            break
    if count > 0:
        follow(
            0, count, num_own, following, lengths, tokens, num_tokens, shared, num_shared,
            drafted[SUFFIX], cells[SUFFIX],
        )  # fmt: skip


@compiled
def chance(
    counts: NDArray[np.float64], prior: NDArray[np.float64], cell: int, bias: float
) -> float:
    """Return how probable a proposal of a cell is to come true, in (0, 1)."""
    mean = (counts[cell, 0] + PRIOR_OBSERVATIONS * prior[cell]) / (
        counts[cell, 1] + PRIOR_OBSERVATIONS
    )
    mean = min(max(mean, 0.001), 0.999)
    return float(1.0 / (1.0 + (1.0 - mean) / mean * np.exp(-bias)))


@compiled
def observe(
    counts: NDArray[np.float64],
    prior: NDArray[np.float64],
    cell: int,
    bias: NDArray[np.float64],
    lookup: int,
    came_true: bool,
) -> None:
    """Learn whether a proposal came true."""
    hit = 1.0 if came_true else 0.0
    error = hit - chance(counts, prior, cell, bias[lookup])
    moved = BIAS_MEMORY * bias[lookup] + BIAS_STEP * error
    bias[lookup] = min(max(moved, -LARGEST_BIAS), LARGEST_BIAS)
    counts[cell, 0] = COUNT_MEMORY * counts[cell, 0] + hit
    counts[cell, 1] = COUNT_MEMORY * counts[cell, 1] + 1.0


@compiled
def learn_token(
    token: int,
    position: int,
    first_window: int,
    proposals: NDArray[np.int32],
    cells: NDArray[np.int16],
    num_alive: NDArray[np.int16],
    counts: NDArray[np.float64],
    prior: NDArray[np.float64],
    bias: NDArray[np.float64],
) -> None:
    """Judge all proposals of the token at ``position`` that earlier levels led to.

    ``proposals`` and ``cells`` are rings, (R, D, K); ``num_alive`` (R, D) says how many levels came
    true so far, -1 once one did not; ``counts`` (D, C, 2) are hits and observations, ``bias`` (D,)
    is the request's own. The last three change.
    """
    num_slots, num_lookups, num_levels = proposals.shape
    for level in range(num_levels):
        start = position - level
        if start < first_window:
            return
        slot = start % num_slots
        for lookup in range(num_lookups):
            cell = cells[slot, lookup, level]
            if num_alive[slot, lookup] != level or cell < 0:
                continue
            came_true = proposals[slot, lookup, level] == token
            observe(counts[lookup], prior, cell, bias, lookup, came_true)
            num_alive[slot, lookup] = level + 1 if came_true else -1


@compiled
def chain_end(
    tokens: NDArray[np.int32], end: int, previous: NDArray[np.int32], head: NDArray[np.int32]
) -> None:
    """Chain the pair that ends at ``end``; what follows it must be known."""
    if end >= 1:
        for chain in range(NUM_CHAINS):
            slot = slot_of(chain, tokens[end - 1], tokens[end], head.shape[1] - 1)
            previous[chain, end] = head[chain, slot]
            head[chain, slot] = end


@compiled
def advance(
    emitted: NDArray[np.int32],
    tokens: NDArray[np.int32],
    num_tokens: int,
    first_window: int,
    previous: NDArray[np.int32],
    head: NDArray[np.int32],
    shared: NDArray[np.int32],
    shared_previous: NDArray[np.int64],
    shared_head: NDArray[np.int64],
    num_shared: int,
    proposals: NDArray[np.int32],
    cells: NDArray[np.int16],
    num_alive: NDArray[np.int16],
    counts: NDArray[np.float64],
    prior: NDArray[np.float64],
    bias: NDArray[np.float64],
    chances: NDArray[np.float64],
) -> int:
    """Append the tokens a step emitted, look up what may follow each, and return the new size.

    ``proposals`` (R, D, K) then holds the window of every new position, the newest being the draft
    to be, and ``chances`` (D, K) how probable each of its levels is, given those before. Windows
    before ``first_window`` count for nothing. Arrays are those of ``look_up`` and ``learn_token``.
    """
    num_slots = proposals.shape[0]
    for i in range(emitted.size):
        learn_token(
            emitted[i], num_tokens, first_window, proposals, cells, num_alive, counts, prior, bias
        )
        tokens[num_tokens] = emitted[i]
        chain_end(tokens, num_tokens - 1, previous, head)
        num_tokens += 1
        slot = num_tokens % num_slots
        num_alive[slot] = 0
        look_up(
            tokens, num_tokens, previous, head, shared, shared_previous, shared_head, num_shared,
            proposals[slot], cells[slot],
        )  # fmt: skip
    slot = num_tokens % num_slots
    chances[:] = 0.0
    for lookup in range(chances.shape[0]):
        for level in range(chances.shape[1]):
            cell = cells[slot, lookup, level]
            if cell < 0:
                break
            chances[lookup, level] = chance(counts[lookup], prior, cell, bias[lookup])
    return num_tokens


@compiled
def read_prompt(
    tokens: NDArray[np.int32],
    num_tokens: int,
    previous: NDArray[np.int32],
    head: NDArray[np.int32],
) -> None:
    """Chain all pairs of a prompt but the last, whose successor is not known yet."""
    head[:] = -1
    for end in range(1, num_tokens - 1):
        chain_end(tokens, end, previous, head)


@compiled
def add_shared(
    added: NDArray[np.int32],
    shared: NDArray[np.int32],
    shared_previous: NDArray[np.int64],
    shared_head: NDArray[np.int64],
    num_shared: int,
) -> int:
    """Append a sequence and its end mark to the shared history; return the tokens ever added."""
    size = shared.size
    for i in range(added.size + 1):
        shared[num_shared % size] = added[i] if i < added.size else NO_TOKEN
        # The pair that ends one token earlier has a successor now.
        if 2 <= i < added.size:
            end = num_shared - 1
            for chain in range(NUM_CHAINS):
                slot = slot_of(chain, added[i - 2], added[i - 1], shared_head.shape[1] - 1)
                shared_previous[chain, end % size] = shared_head[chain, slot]
                shared_head[chain, slot] = end
        num_shared += 1
    return num_shared
