"""The report: one self-contained page, readable without network, in light and dark, on a phone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from uuid import uuid4

from plotly.offline import get_plotlyjs

from replay.analysis import Analysis
from replay.errors import ReplayError
from replay.plots import report_views, views_to_json
from replay.summary import DomainRow, DrafterRow, OffPolicyRow, RegretRow, ReplaySummary, StreamRow

MAX_TABLE_ROWS = 200
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def write_report(analysis: Analysis, out: Path) -> None:
    """Write the page; an existing file is replaced in one step.

    Raises:
        ReplayError: If ``out`` cannot be written.
    """
    text = report_html(analysis)
    unfinished = out.with_name(f"_{out.name}.{uuid4().hex}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise ReplayError(
            f"cannot write the report to {out} ({error.strerror}); choose another place"
        ) from error


def report_html(analysis: Analysis) -> str:
    """Return the page."""
    summary = analysis.summary
    page = files("replay") / "page"
    return Template((page / "page.html").read_text("utf-8")).substitute(
        name=escape(analysis.name),
        headline=escape(_headline(summary)),
        subtitle=escape(_subtitle(analysis.name, summary)),
        tiles="".join(_tiles(summary)),
        notes=_notes(summary),
        tables=_tables(summary),
        footer=_footer(),
        css=(page / "page.css").read_text("utf-8"),
        data=_script_json({"views": views_to_json(report_views(analysis))}),
        plotly=get_plotlyjs(),
        script=(page / "page.js").read_text("utf-8"),
    )


def _script_json(value: object) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _headline(summary: ReplaySummary) -> str:
    length = summary.total.mean_acceptance_length
    if length is None:
        return "The log holds no rounds"
    best = next((row for row in summary.regrets if row.stream is None), None)
    if best is None:
        return f"{length:.2f} tokens per verification"
    gain = -best.tokens / best.num_rounds
    if abs(gain) < 0.005:
        return f"{length:.2f} tokens per verification, level with the best single drafter"
    word = "more" if gain > 0 else "fewer"
    return (
        f"{length:.2f} tokens per verification, {abs(gain):.2f} {word} than the best single drafter"
    )


def _subtitle(name: str, summary: ReplaySummary) -> str:
    first, last = summary.log.first_produced_at, summary.log.last_produced_at
    span = f", {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC" if first and last else ""
    policies = ", ".join(summary.policy_names) or "no policy"
    return f"{name}{span}, selection by {policies}"


def _tiles(summary: ReplaySummary) -> Iterable[str]:
    total, check = summary.total, summary.check
    yield _tile(
        "Mean acceptance length",
        _number(total.mean_acceptance_length),
        "tokens per round, bonus in",
    )
    yield _tile("Emitted tokens", f"{total.num_tokens:,}", f"in {total.num_rounds:,} rounds")
    incomplete = summary.num_incomplete_requests
    yield _tile(
        "Requests",
        f"{total.num_requests:,}",
        f"{incomplete:,} incomplete" if incomplete else f"{len(summary.streams)} streams",
    )
    yield _tile(
        "Tokens per second", _number(total.tokens_per_second, ".1f"), "draft, verify and score time"
    )
    share = (
        f"{check.num_checked:,} of {check.num_rounds:,} rounds, "
        f"{check.num_selections_checked:,} of {check.num_selections:,} selections"
    )
    verdict = "agrees" if not check.num_disagreements else f"{check.num_disagreements:,} differ"
    kind = "good" if not check.num_disagreements else "bad"
    if not check.num_checked:
        verdict, kind = DASH, ""
    yield _tile("Log re-run on itself", verdict, share, kind)


def _tile(label: str, value: str, detail: str, kind: str = "") -> str:
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="value {kind}">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )


def _notes(summary: ReplaySummary) -> str:
    sentences = [*summary.notes, *(f"Re-run: {text}." for text in summary.check.examples)]
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>'


def _tables(summary: ReplaySummary) -> str:
    parts = [_regret_table(summary.regrets), _drafter_table(summary.drafters)]
    if summary.policies:
        parts.append(_policy_table(summary))
    if summary.off_policy:
        parts.append(_off_policy_table(summary.off_policy))
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


def _footer() -> str:
    return escape(
        "Rounds are compared on the window that starts where they start, so all drafters are "
        "judged on the same verified text; rounds without a complete window are left out for all "
        "alike. A drafter that was not scored in a round counts as no drafter: one token. "
        "A dash means that there is no value; point at it for the reason."
    )


def _stream_name(stream: str | None) -> str:
    return "all" if stream is None else escape(stream)


def _number(value: float | None, form: str = ".2f") -> str:
    return DASH if value is None else format(value, form).replace("-", MINUS)


def _cell(value: float | None, reason: str = "", form: str = ".3f") -> str:
    if value is None:
        return f'<abbr title="{escape(reason)}">{DASH}</abbr>'
    return _number(value, form)


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
        interval = f"[{_number(low, form)}, {_number(high, form)}]"
    return f'{_number(value, form)} <span class="range">{interval}</span>'
