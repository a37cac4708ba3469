"""Small baselines, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.baseline.plan import Options, make_plan
from quantkit.baseline.run import run_plan
from quantkit.baseline.texts import TextOptions

SMALL = Options(TextOptions(texts=1, tokens=48, long_tokens=150, probe_tokens=48), new_tokens=6, top_k=16)


@pytest.fixture(scope="session")
def baseline(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the trained mixture; do not change it."""
    out = tmp_path_factory.mktemp("baseline") / "out"
    run_plan(make_plan(minimax, SMALL), out)
    return out
