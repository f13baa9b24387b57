"""The small language model inside vLLM: what it proposes over a batch is what it drafts alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows
from inference.drafters.token_lm import TokenLmDrafter, initial_token_lm_weights, token_lm_state
from inference.vllm_plugin.batch import BatchDrafter
from inference.vllm_plugin.head_batch import HeadRecord
from inference.vllm_plugin.lookup import Certainty, RequestLookup, SharedHistory
from inference.vllm_plugin.lookup_kernels import NO_TOKEN
from tests.inference.vllm_fakes import HIDDEN_SIZE, LOOKUPS, FakeEngine, Kept, connection, member

VOCAB = HIDDEN_SIZE
K, NUM_READ = 4, 3


def successor(tokens: Sequence[int]) -> int:
    return (tokens[-1] * 5 + 3) % VOCAB


def rows() -> FrozenRows:
    eye = torch.eye(VOCAB)
    return FrozenRows.of(eye, eye, DraftVocabulary.of(range(VOCAB)))


def random_model() -> TokenLmDrafter:
    generator = torch.Generator().manual_seed(0)
    weights = initial_token_lm_weights(VOCAB, 24, 8, NUM_READ, generator)
    return TokenLmDrafter("lm", 1, weights, rows())


def knowing_model() -> TokenLmDrafter:
    """Return a model that reads two tokens and says the successor of the newest."""
    says = torch.zeros(VOCAB, VOCAB)
    says[[successor([token]) for token in range(VOCAB)], torch.arange(VOCAB)] = 1.0
    eye = torch.eye(VOCAB)
    weights = {
        "reduce": eye,
        "mix": torch.cat([torch.zeros(VOCAB, VOCAB), eye], dim=1),
        "bias": torch.zeros(VOCAB),
        "out": 4.0 * says,
    }
    return TokenLmDrafter("lm", 1, weights, rows())


def drafted_alone(model: TokenLmDrafter, tokens: Sequence[int]) -> list[int]:
    """Return the K most probable tokens one after the other, computed without a batch."""
    text = [NO_TOKEN] * NUM_READ + list(tokens)
    for _ in range(K):
        read = torch.tensor(text[-NUM_READ:])
        state = token_lm_state(model.weights, model.rows.embeddings, read)
        text.append(int(model.rows.logits(state).argmax()))
    return text[-K:]


def test_rows_of_every_length_get_what_the_model_would_draft_alone() -> None:
    record = HeadRecord()
    record.renew(random_model())
    texts = [[5], [7, 9], [1, 2, 3], [4, 8, 15, 16, 23]]
    history = SharedHistory(0)
    lookups = [RequestLookup(np.array(t, np.int32), K, 32, history, Certainty()) for t in texts]
    newest = np.stack([one.newest(record.num_read) for one in lookups])
    assert newest.shape == (4, NUM_READ)
    states = torch.zeros((4, VOCAB))
    drafts = record.unroll(states, newest, K, lambda *_: False)
    assert drafts.token_ids.tolist() == [drafted_alone(random_model(), text) for text in texts]


def test_it_drafts_where_lookups_have_nothing_to_find() -> None:
    kept = Kept()
    kept.waiting = [knowing_model()]
    pool = (*LOOKUPS, member("lm", "token_lm"))
    batch = BatchDrafter(connection(kept, pool), num_levels=K, max_positions=512)
    engine = FakeEngine(batch.step, successor)
    requests = [
        engine.add(f"r-{number}", [number % VOCAB], 6, stream=f"s-{number}") for number in range(12)
    ]
    engine.run()
    batch.close()
    assert kept.counts["accepted_tokens", "lm"] > 0.9 * kept.counts["draft_tokens", "lm"] > 0
    for request in requests:
        assert sum(event.num_positions for event in kept.of_request(request.request_id)) == 6
