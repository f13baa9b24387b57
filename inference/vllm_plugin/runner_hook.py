"""What vLLM's model runner knows beside tokens, handed over without changing vLLM.

vLLM asks for drafts in one place, ``GPUModelRunner.propose_draft_token_ids`` (the CPU runner
inherits it). When a proposer is built, that method is wrapped once for this process: what it was
called with is shown to the proposer, then vLLM's own method runs as ever. Everything is looked up
by name and checked first: where a name is missing, the proposer works from tokens alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from inference.vllm_plugin.ports import RequestFacts, StepFacts
from schemas.checks import IDENTIFIER
from schemas.events import AcceptanceRule, SamplingRule

RUNNER_MODULE, RUNNER_CLASS = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
METHOD = "propose_draft_token_ids"
PARAMETERS = ("scheduler_output", "sample_hidden_states", "spec_decode_metadata")
STREAM_ARGUMENT = "draftloop_stream"

CONTEXT_LIMIT = "effective_drafter_max_model_len"
"""Attribute of the runner: most tokens of a row in a step that asks for drafts."""

UNLIMITED = 2**62

GREEDY_TEMPERATURE = 1e-5
"""vLLM draws nothing below it."""

_WRAPPED = "_draftloop_wrapped"


def missing(runner_class: Any) -> str:
    """Return what a runner class lacks to be listened to, in words; empty if nothing."""
    method = getattr(runner_class, METHOD, None)
    if method is None:
        return f"{RUNNER_CLASS} has no {METHOD}"
    known = inspect.signature(inspect.unwrap(method)).parameters
    lacking = [name for name in PARAMETERS if name not in known]
    return f"{METHOD} has no {lacking[0]}" if lacking else ""


def loaded_runner_class() -> Any | None:
    """Return the runner class of the vLLM in this process; None without one."""
    return getattr(sys.modules.get(RUNNER_MODULE), RUNNER_CLASS, None)


def listen(runner_class: Any) -> str:
    """Wrap the method of a runner class, once, and return what is missing for it, if anything.

    A runner whose drafter is no listener is served by vLLM's own method alone.
    """
    reason = missing(runner_class)
    method = getattr(runner_class, METHOD, None)
    if reason or getattr(method, _WRAPPED, False):
        return reason
    setattr(runner_class, METHOD, _shown(method))
    return ""


def _shown(method: Any) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def propose_draft_token_ids(runner: Any, *args: Any, **kwargs: Any) -> Any:
        show = getattr(getattr(runner, "drafter", None), "show_call", None)
        if show is not None:
            ask_always(runner)
            show(lambda: step_facts(runner, signature.bind(runner, *args, **kwargs).arguments))
        return method(runner, *args, **kwargs)

    setattr(propose_draft_token_ids, _WRAPPED, True)
    return propose_draft_token_ids


def ask_always(runner: Any) -> None:
    """Let vLLM ask for drafts near the end of the context too, where it drafts token 0 otherwise.

    It asks nobody as soon as one row is so near that a model that drafts would run out of context.
    This proposer drafts no more than fits, row by row.
    """
    if getattr(runner, CONTEXT_LIMIT, UNLIMITED) != UNLIMITED:
        setattr(runner, CONTEXT_LIMIT, UNLIMITED)


def step_facts(runner: Any, arguments: dict[str, Any]) -> StepFacts:
    """Read the facts of a step off the runner.

    Args:
        runner: vLLM's.
        arguments: Of its method, by name.
    """
    metadata, output = arguments["spec_decode_metadata"], arguments["scheduler_output"]
    requests = runner.requests
    return StepFacts(
        request_ids=list(runner.input_batch.req_ids),
        num_draft_tokens=None if metadata is None else list(metadata.num_draft_tokens),
        states=arguments["sample_hidden_states"],
        is_running=requests.__contains__,
        request=lambda request_id: request_facts(requests[request_id]),
        num_scheduled_tokens=int(output.total_num_scheduled_tokens),
        draft_token_ids=getattr(output, "scheduled_spec_decode_tokens", None),
    )


def request_facts(request: Any) -> RequestFacts:
    """Read what vLLM's runner knows of a request."""
    params = request.sampling_params
    named = (getattr(params, "extra_args", None) or {}).get(STREAM_ARGUMENT)
    lora = getattr(request, "lora_request", None)
    stream = named if named is not None else getattr(lora, "lora_name", "")
    return RequestFacts(
        stream=stream if isinstance(stream, str) and IDENTIFIER.fullmatch(stream) else "",
        sampling=sampling_rule(params.temperature, params.top_p, params.top_k),
        max_tokens=params.max_tokens,
        ignores_end=bool(params.ignore_eos),
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        is_constrained=getattr(params, "structured_outputs", None) is not None,
        num_prompt_tokens=int(request.num_prompt_tokens),
        written=getattr(request, "output_token_ids", ()),
    )


def sampling_rule(temperature: float, top_p: float, top_k: int) -> SamplingRule:
    """Return how drafts of a request are accepted: vLLM takes them for certain (one-hot)."""
    if temperature < GREEDY_TEMPERATURE:
        return SamplingRule(acceptance_rule=AcceptanceRule.GREEDY, temperature=0.0)
    return SamplingRule(
        acceptance_rule=AcceptanceRule.ONE_HOT,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=max(int(top_k), 0),
    )


def state_rows(
    num_emitted: Sequence[int], num_draft_tokens: Sequence[int] | None, num_states: int
) -> list[int] | None:
    """Return where each row's states begin among the states that were sampled from.

    A row has one state, or with drafts ``num_draft_tokens + 1``; the state behind emitted token j
    is the j-th of them.

    Returns:
        None if the states are not laid out so.
    """
    if num_states == len(num_emitted):
        return list(range(num_states))
    if num_draft_tokens is None or len(num_draft_tokens) != len(num_emitted):
        return None
    places, place = [], 0
    for count in num_draft_tokens:
        places.append(place)
        place += count + 1
    return places if place == num_states else None
