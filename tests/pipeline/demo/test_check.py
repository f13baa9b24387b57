"""The check of the demo finds every difference and knows how near a tie it was."""

from __future__ import annotations

import pytest

from inference.plain import plain_greedy
from inference.sampling import SamplingParams
from inference.target import Target
from pipeline.demo.check import OutputCheck, OutputsDifferError
from tests.inference.tiny import tiny_llama

PARAMS = SamplingParams(max_tokens=12)
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_llama(1)


def test_the_targets_own_output_is_equal(target: Target) -> None:
    check = OutputCheck(target)
    check.compare(PROMPT, PARAMS, plain_greedy(target, PROMPT, PARAMS).token_ids)
    assert check.results() == {
        "num_checked": 1,
        "num_equal": 1,
        "logit_gaps_at_first_difference": [],
    }
    check.refuse_differences_in_float32("float32")


@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_difference_is_kept_with_the_gap_at_its_position(target: Target, position: int) -> None:
    plain = plain_greedy(target, PROMPT, PARAMS)
    served = list(plain.token_ids)
    served[position] = (served[position] + 1) % target.vocab_size
    check = OutputCheck(target)
    check.compare(PROMPT, PARAMS, served)
    assert (check.num_equal, check.gaps) == (0, [plain.logit_gaps[position]])


def test_an_output_that_ends_too_early_is_a_difference(target: Target) -> None:
    plain = plain_greedy(target, PROMPT, PARAMS)
    check = OutputCheck(target)
    check.compare(PROMPT, PARAMS, plain.token_ids[:7])
    assert (check.num_checked, check.num_equal, len(check.gaps)) == (1, 0, 1)


def test_invalid_float32_outputs_are_refused_and_bfloat16_ones_are_only_counted(
    target: Target,
) -> None:
    check = OutputCheck(target)
    check.compare(PROMPT, PARAMS, [0] * 12)
    check.refuse_differences_in_float32("bfloat16")
    with pytest.raises(OutputsDifferError, match="1 of 1 float32 outputs differ"):
        check.refuse_differences_in_float32("float32")
