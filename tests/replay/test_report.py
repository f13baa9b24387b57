"""The page is complete in itself, and a real browser draws it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from replay.analysis import Analysis, analyse
from replay.errors import ReplayError
from replay.report import report_html, write_report
from replay.summary import ReleaseRow
from tests.replay.logs import write_rich_log
from tests.replay.synthetic import log, make_request, window_rows, write_log

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    data = tmp_path_factory.mktemp("data")
    write_rich_log(data)
    return analyse(data, np.random.default_rng(0), policies=["normal_hedge", "fixed:suffix"])


@pytest.fixture(scope="module")
def report(analysis: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "new" / "report.html"
    write_report(analysis, out)
    return out


def text_of(html: str) -> str:
    """Return the page without scripts and styles."""
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)


def test_the_page_is_one_small_file_that_names_no_address(report: Path) -> None:
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]
    assert report.stat().st_size < 5_000_000
    html = report.read_text("utf-8")
    assert not re.search(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"'](?!data:)", html)
    assert "://" not in text_of(html)


def test_tables_show_what_the_summary_holds(analysis: Analysis, report: Path) -> None:
    text = text_of(report.read_text("utf-8"))
    summary = analysis.summary
    for row in summary.drafters:
        assert f"<td>{row.drafter_id}</td>" in text
        assert f"{row.exact_length:.3f}" in text
    for regret in summary.regrets:
        assert f"<td>{regret.comparator}</td>" in text
    for policy in summary.policies:
        assert f"<td>{policy.policy}</td>" in text
    assert summary.log.problems[0].name in text
    assert "1 duplicate rows" in text
    assert "NaN" not in text and "None" not in text


def test_decisions_of_the_gate_stand_in_a_table_stream_by_stream(analysis: Analysis) -> None:
    assert "<h2>Releases</h2>" not in report_html(analysis)
    row = ReleaseRow(
        drafter_id="head",
        version=7,
        state="retired",
        produced_at="2026-11-29T00:00:00.000000+00:00",
        stream=None,
        num_streams=None,
        num_requests=None,
        num_windows=1200,
        new_acceptance_length=2.5,
        old_acceptance_length=2.25,
        difference_low=0.125,
        difference_high=0.375,
    )
    one = replace(row, stream="law", new_acceptance_length=1.5, difference_high=-0.5)
    rest = replace(row, stream="", num_streams=12, difference_low=None, difference_high=None)
    summary = replace(analysis.summary, releases=(row, one, rest))
    text = text_of(report_html(replace(analysis, summary=summary)))
    table = text.split("<h2>Releases</h2>")[1].split("</table>")[0]
    assert [part.split("</td>")[0] for part in table.split("<td>retired</td><td>")[1:]] == [
        "12 others",
        "law",
        "all",
    ]
    assert "+0.250" in table and "[+0.125, +0.375]" in table
    assert "\N{MINUS SIGN}0.750" in table


def test_a_missing_value_is_a_dash_with_its_reason(tmp_path: Path) -> None:
    event = make_request(hit_rates=[0.5, 0.5])
    write_log(tmp_path, log([replace(event, windows=window_rows(event.windows, 0, 0))]))
    text = text_of(report_html(analyse(tmp_path, np.random.default_rng(0))))
    assert '<abbr title="never scored">\N{EN DASH}</abbr>' in text
    assert "No scoring" in text


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "</script><b>&amp"
    write_log(folder, log([make_request()]))
    (folder / "events" / "<i>x.parquet").write_bytes(b"x")
    html = report_html(analyse(folder, np.random.default_rng(0)))
    assert "<b>" not in html.replace("<b>Click", "").split('<script type="application/json"')[0]
    assert "&lt;i&gt;x.parquet" in html
    assert "&lt;/script&gt;" not in html.split('id="data">')[1].split("</script>")[0]
    assert html.count("</script>") == 3


def test_a_log_without_rounds_still_gives_a_page(tmp_path: Path) -> None:
    one = make_request(num_tokens=3)
    rounds = replace(
        one.rounds, **{name: getattr(one.rounds, name)[:0] for name in one.rounds.__slots__}
    )
    windows = window_rows(one.windows, 0, 0)
    write_log(tmp_path, log([replace(one, rounds=rounds, num_positions=0, windows=windows)]))
    text = text_of(report_html(analyse(tmp_path, np.random.default_rng(0))))
    assert "The log holds no rounds" in text


def test_an_existing_report_is_replaced_and_nothing_else_is_left(
    analysis: Analysis, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    write_report(analysis, out)
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [out]


def test_invalid_place_for_the_report_is_refused_with_the_cure(
    analysis: Analysis, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "report.html", tmp_path):
        with pytest.raises(ReplayError, match=r"cannot write the report.*choose another place"):
            write_report(analysis, out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@dataclass
class Visit:
    """A page in a browser, and what it complained about or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


def visit(browser: Browser, report: Path, *, scheme: str = "light", width: int = 1280) -> Visit:
    dark = scheme == "dark"
    context = browser.new_context(
        color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900}
    )
    visited = Visit(context.new_page())
    page = visited.page
    page.on("console", lambda message: visited.complaints.append(message.text))
    page.on("pageerror", lambda error: visited.complaints.append(str(error)))
    page.on("request", lambda request: visited.requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]")
    return visited


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_every_plot_is_drawn_without_errors_and_without_network(
    browser: Browser, report: Path, scheme: str, width: int
) -> None:
    visited = visit(browser, report, scheme=scheme, width=width)
    page = visited.page
    assert page.locator(".plot .main-svg").first.is_visible()
    drawn = page.eval_on_selector_all(
        ".plot",
        "all => all.map(one => one.querySelectorAll('.plot .trace').length)",
    )
    assert len(drawn) == 6 and min(drawn) >= 1
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert visited.complaints == []
    assert [url for url in visited.requests if not url.startswith(("file:", "data:"))] == []
    page.context.close()


@pytest.mark.browser
def test_a_click_on_the_legend_hides_a_line(browser: Browser, report: Path) -> None:
    visited = visit(browser, report)
    page = visited.page
    host = page.locator('[data-plot="length"] .plot')
    count = "host => host.querySelectorAll('.scatterlayer .trace').length"
    before = host.evaluate(count)
    host.locator(".legendtoggle").first.click()
    page.wait_for_function(
        "before => document.querySelectorAll('[data-plot=length] .scatterlayer .trace').length"
        " === before - 1",
        arg=before,
    )
    assert visited.complaints == []
    page.context.close()


@pytest.mark.browser
def test_switches_and_streams_change_what_is_drawn(browser: Browser, report: Path) -> None:
    visited = visit(browser, report)
    page = visited.page
    title = page.locator('[data-plot="regret"] .ytitle')
    expect(title).to_have_text("regret (tokens)")
    page.locator('[data-plot="regret"]').get_by_role("button", name="Loss").click()
    expect(title).to_have_text("regret (loss)")
    widest = "Math.max(...document.querySelector('[data-plot=length] .plot').data[0].x)"
    before = page.evaluate(widest)
    page.get_by_label("Stream").select_option(label="tenant-b.maths")
    page.wait_for_function(f"before => {widest} < before", arg=before)
    expect(title).to_have_text("regret (loss)")
    assert visited.complaints == []
    page.context.close()


@pytest.mark.browser
def test_colours_follow_the_scheme_while_the_page_is_open(browser: Browser, report: Path) -> None:
    visited = visit(browser, report)
    page = visited.page
    color = "document.querySelector('[data-plot=length] .plot').data[0].line.color"
    light = page.evaluate(color)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"before => {color} !== before", arg=light)
    assert visited.complaints == []
    page.context.close()
