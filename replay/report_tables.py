"""The tables of the report, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from replay.summary import (
    CalibrationRow,
    DomainRow,
    DrafterRow,
    OffPolicyRow,
    RegretRow,
    ReleaseRow,
    ReplaySummary,
    StreamRow,
)

MAX_TABLE_ROWS = 200
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def tables(summary: ReplaySummary) -> str:
    """Return all tables of a summary as HTML."""
    parts = [_regret_table(summary.regrets), _drafter_table(summary.drafters)]
    parts.append(_calibration_table(summary.calibration))
    if summary.policies:
        parts.append(_policy_table(summary))
    if summary.off_policy:
        parts.append(_off_policy_table(summary.off_policy))
    if summary.releases:
        parts.append(_release_table(summary.releases))
    parts.append(_domain_table(summary.domains))
    parts.append(_stream_table(summary.streams))
    parts.append(_problem_table(summary))
    return "".join(parts)


def _table(
    title: str,
    note: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str,
    *,
    num_text_columns: int = 1,
) -> str:
    """Return a section with a table; cells are HTML already, text columns come first."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    shown = rows[:MAX_TABLE_ROWS]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in shown)
    left = len(rows) - len(shown)
    more = f'<p class="note">{left:,} more rows are in the JSON summary.</p>' if left else ""
    content = (
        f'<div class="scroll"><table class="text-{num_text_columns}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
        if rows
        else f'<p class="empty">{escape(empty)}</p>'
    )
    return (
        f'<section><div class="card"><h2>{escape(title)}</h2>'
        f'<p class="note">{escape(note)}</p>{content}</div></section>'
    )


def _regret_table(rows: Sequence[RegretRow]) -> str:
    return _table(
        "Regret",
        "Positive: the comparator would have earned more on the same rounds. Brackets: 95 % block "
        "bootstrap, comparator held fixed.",
        ["Comparator", "Stream", "Switches", "Tokens", "Tokens per round", "Seconds", "Loss"],
        [
            [
                escape(row.comparator),
                _stream_name(row.stream),
                f"{row.path_length:,}",
                _range(row.tokens, row.tokens_low, row.tokens_high, ",.1f"),
                _range(*_per_round(row), ".3f"),
                _range(row.seconds, row.seconds_low, row.seconds_high, ",.2f"),
                _range(row.loss, row.loss_low, row.loss_high, ",.1f"),
            ]
            for row in rows
        ],
        "Nothing to compare: no scored rounds.",
        num_text_columns=2,
    )


def _per_round(row: RegretRow) -> tuple[float, float | None, float | None]:
    low, high = row.tokens_low, row.tokens_high
    if low is None or high is None:
        return row.tokens / row.num_rounds, None, None
    return row.tokens / row.num_rounds, low / row.num_rounds, high / row.num_rounds


def _drafter_table(rows: Sequence[DrafterRow]) -> str:
    return _table(
        "Drafters",
        "Acceptance length in tokens per verification, bonus included. Exact and published are "
        "the two estimators over every scored window; expected and played are the same rounds, "
        "by the windows and by what happened.",
        [
            *("Drafter", "Stream", "Windows", "Exact", "Published"),
            *("Rounds played", "Expected", "Played", "Acceptance rate"),
        ],
        [
            [
                escape(row.drafter_id),
                _stream_name(row.stream),
                f"{row.num_windows:,}",
                _cell(row.exact_length, "never scored"),
                _cell(row.published_length, "never scored"),
                f"{row.num_rounds:,}",
                _cell(row.expected_length, "no scored round in which it was played"),
                _cell(row.played_length, "never played"),
                _cell(row.acceptance_rate, "drafted nothing", ".1%"),
            ]
            for row in rows
        ],
        "The log knows no drafters.",
        num_text_columns=2,
    )


def _calibration_table(rows: Sequence[CalibrationRow]) -> str:
    return _table(
        "Calibration",
        "How often a drafter was accepted in the rounds in which it was played, over how often its "
        "scores say, by place in the draft. Brackets hold 1 if the scores are right.",
        ["Drafter", "Alarm", "Place", "Rounds", "Accepted over predicted"],
        [
            [
                escape(row.drafter_id),
                "off" if row.is_off else "",
                f"{row.level}",
                f"{row.num_rounds:,}",
                _range(row.ratio, row.ratio_low, row.ratio_high, ".3f"),
            ]
            for row in rows
        ],
        "No scored round in which a drafter was played.",
        num_text_columns=2,
    )


def _policy_table(summary: ReplaySummary) -> str:
    logged = summary.total
    rows = [
        [
            "as logged",
            _cell(logged.mean_acceptance_length, "no rounds"),
            _cell(1.0),
            _cell(logged.tokens_per_second, "no time measured", ".1f"),
            f"{logged.num_rounds:,}",
            f"{logged.num_tokens:,}",
            f"{logged.num_idle_rounds:,}",
            DASH,
            "0",
            DASH,
        ]
    ]
    rows += [
        [
            escape(row.policy),
            _cell(row.mean_acceptance_length, "no window to walk on"),
            _range(row.ratio, row.ratio_low, row.ratio_high, ".3f", "too few requests"),
            _cell(row.tokens_per_second, "a cost was never measured", ".1f"),
            f"{row.num_rounds:,}",
            f"{row.num_tokens:,}",
            f"{row.num_idle_rounds:,}",
            f"{row.num_switches:,}",
            f"{row.num_skipped_tokens:,}",
            _cell(row.estimated_share, "no tokens", ".1%"),
        ]
        for row in summary.policies
    ]
    return _table(
        "Other policies on the same text",
        "Each request decoded again on paper, from its windows, all policies with the same coins. "
        "Brackets: 95 % paired block bootstrap over requests. Tokens per second by the cost "
        "measured in the log. Estimated: tokens without window, or accepted by chance.",
        [
            "Policy",
            "Mean acceptance length",
            "Against the log",
            "Tokens per second",
            "Rounds",
            "Tokens",
            "Rounds without drafter",
            "Switches",
            "Tokens skipped",
            "Estimated",
        ],
        rows,
        "",
    )


def _off_policy_table(rows: Sequence[OffPolicyRow]) -> str:
    return _table(
        "Other policies, estimated from what was played",
        "The log scored nobody, so policies are judged by the probabilities with which drafters "
        "were selected. Means over the logged rounds, 95 % block bootstrap in brackets.",
        ["Policy", "Doubly robust", "Importance-weighted", "Rounds", "Worth rounds"],
        [
            [
                escape(row.policy),
                _estimate(
                    row.doubly_robust, row.doubly_robust_low, row.doubly_robust_high, row.refusal
                ),
                _estimate(
                    row.importance_weighted,
                    row.importance_weighted_low,
                    row.importance_weighted_high,
                    row.refusal,
                ),
                f"{row.num_rounds:,}",
                f"{row.effective_sample_size:,.0f}",
            ]
            for row in rows
        ],
        "",
    )


def _estimate(
    value: float | None, low: float | None, high: float | None, refusal: str | None
) -> str:
    return _cell(None, refusal or "") if value is None else _range(value, low, high, ".3f")


def _domain_table(rows: Sequence[DomainRow]) -> str:
    return _table(
        "Domains",
        "Streams whose ids end alike. Played and best are expected acceptance lengths over the "
        "same compared rounds; the best drafter is known only in hindsight.",
        [
            *("Domain", "Streams", "Requests", "Tokens", "Mean acceptance length"),
            *("Rounds compared", "Played", "Best", "Best drafter"),
        ],
        [
            [
                escape(row.domain),
                f"{row.num_streams:,}",
                f"{row.num_requests:,}",
                f"{row.num_tokens:,}",
                _cell(row.mean_acceptance_length, "no rounds"),
                f"{row.num_compared:,}",
                _cell(row.played_length, "nothing to compare"),
                _cell(row.best_length, "nothing to compare"),
                escape(row.best_drafter_id) if row.best_drafter_id else DASH,
            ]
            for row in rows
        ],
        "No streams.",
    )


def _stream_table(rows: Sequence[StreamRow]) -> str:
    return _table(
        "Streams",
        "Mean acceptance length: emitted tokens per round, bonus included.",
        ["Stream", "Requests", "Tokens", "Rounds", "Mean acceptance length", "Tokens per second"],
        [
            [
                _stream_name(row.stream),
                f"{row.num_requests:,}",
                f"{row.num_tokens:,}",
                f"{row.num_rounds:,}",
                _cell(row.mean_acceptance_length, "no rounds"),
                _cell(row.tokens_per_second, "no time measured", ".1f"),
            ]
            for row in rows
        ],
        "No streams.",
    )


def _release_table(rows: Sequence[ReleaseRow]) -> str:
    return _table(
        "Releases",
        "What the gate found, tokens per verification on the same windows. One stream in which a "
        "version is surely worse refuses it. Brackets: interval of the gate's look.",
        ["Drafter", "State", "Stream", "Version", "Windows", "New", "Old", "Difference"],
        [
            [
                escape(row.drafter_id),
                escape(row.state),
                f"{row.num_streams} others" if row.stream == "" else _stream_name(row.stream),
                f"{row.version:,}",
                f"{row.num_windows:,}",
                _cell(row.new_acceptance_length),
                _cell(row.old_acceptance_length),
                _range(_gain(row), row.difference_low, row.difference_high, "+.3f"),
            ]
            for row in reversed(rows)
        ],
        "Nothing was released.",
        num_text_columns=3,
    )


def _gain(row: ReleaseRow) -> float | None:
    new, old = row.new_acceptance_length, row.old_acceptance_length
    return None if new is None or old is None else new - old


def _problem_table(summary: ReplaySummary) -> str:
    log = summary.log
    return _table(
        "Log",
        f"{log.num_files:,} files read, {log.num_unreadable_files:,} unreadable; "
        f"{log.num_events:,} events, {log.num_duplicates:,} duplicate rows left out.",
        ["File", "Problem"],
        [[escape(found.name), escape(found.reason)] for found in log.problems],
        "No problems found.",
        num_text_columns=2,
    )


def _stream_name(stream: str | None) -> str:
    return "all" if stream is None else escape(stream)


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number with a true minus sign; a dash where there is none."""
    return DASH if value is None else format(value, form).replace("-", MINUS)


def _cell(value: float | None, reason: str = "", form: str = ".3f") -> str:
    if value is None:
        return f'<abbr title="{escape(reason)}">{DASH}</abbr>'
    return number(value, form)


def _range(
    value: float | None,
    low: float | None,
    high: float | None,
    form: str,
    reason: str = "too few rounds for an interval",
) -> str:
    if value is None:
        return _cell(None, "a cost was never measured")
    if low is None or high is None:
        interval = f'<abbr title="{escape(reason)}">[{DASH}]</abbr>'
    else:
        interval = f"[{number(low, form)}, {number(high, form)}]"
    return f'{number(value, form)} <span class="range">{interval}</span>'
