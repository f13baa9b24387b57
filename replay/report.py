"""The report: one self-contained page, readable without network, in light and dark, on a phone."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from uuid import uuid4

from plotly.offline import get_plotlyjs

from replay.analysis import Analysis
from replay.errors import ReplayError
from replay.plots import report_views, views_to_json
from replay.report_tables import DASH, number, tables
from replay.summary import ReplaySummary


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
        tables=tables(summary),
        footer=_footer(),
        css=(page / "page.css").read_text("utf-8"),
        data=_script_json({"views": views_to_json(report_views(analysis))}),
        plotly=_packed_plotly(),
        script=(page / "page.js").read_text("utf-8"),
    )


@cache
def _packed_plotly() -> str:
    """Return plotly.js, packed: it is most of the page, and packs to a third."""
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode()


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
        number(total.mean_acceptance_length),
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
        "Tokens per second", number(total.tokens_per_second, ".1f"), "draft, verify and score time"
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


def _footer() -> str:
    return escape(
        "Rounds are compared on the window that starts where they start, so all drafters are "
        "judged on the same verified text; rounds without a complete window are left out for all "
        "alike. A drafter that was not scored in a round counts as no drafter: one token. "
        "A dash means that there is no value; point at it for the reason."
    )
