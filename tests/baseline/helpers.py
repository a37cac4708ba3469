"""Small baselines, and random models with a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quantkit.baseline.plan import Options, make_plan
from quantkit.baseline.run import run_plan
from quantkit.baseline.texts import TextOptions

KINDS = ("builtin:chinese_dialogue", "builtin:code", "builtin:math")
SMALL = Options(TextOptions(KINDS, texts=1, tokens=40, long_tokens=80, probe_tokens=48), new_tokens=4, top_k=16)


def make_baseline(model: Path, out: Path, options: Options = SMALL) -> Path:
    run_plan(make_plan(model, options), out)
    return out


def with_tokenizer(model: Path, donor: Path, out: Path) -> Path:
    """A copy of a random model with the single bytes of a tokenizer that fit its small vocabulary."""
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    raw = json.loads((donor / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {token: number for token, number in raw["model"]["vocab"].items() if number < size}
    raw["model"]["merges"] = []
    (out / "tokenizer.json").write_text(json.dumps(raw))
    shutil.copy(donor / "tokenizer_config.json", out)
    return out
