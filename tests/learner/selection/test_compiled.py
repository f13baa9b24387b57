"""Kernels compile once and are cached by what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba

from learner.selection.compiled import SOURCES, sources_digest


def test_the_cache_is_one_folder_per_state_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("RATE = 1\n", encoding="utf-8")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / "kernel.py").write_text("RATE = 2\n", encoding="utf-8")
    assert sources_digest(tmp_path) != before


def test_numba_is_told_where() -> None:
    config: Any = numba.config
    assert Path(config.CACHE_DIR).name == sources_digest(SOURCES)
