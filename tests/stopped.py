"""Every command that can be resumed, on a small model, stopped in the middle of its work: for tests that damage it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quantkit.baseline.plan import Options
from quantkit.baseline.texts import TextOptions
from quantkit.calibrate.run import calibrate
from quantkit.checkpoint import sealed
from quantkit.convert.run import convert
from quantkit.ladder.run import plan_ladder, run_ladder
from quantkit.ladder.rungs import load_rungs
from quantkit.outdir import WORK_NAME
from quantkit.recipe import load_recipe, validated
from quantkit.report import calibration as calibration_page
from quantkit.report import ladder as ladder_page
from tests.baseline.helpers import make_baseline, with_tokenizer
from tests.families import make_tiny

SMALL = {"samples": 6, "seq_len": 24, "min_sources": 1, "min_tokens_per_expert": 1}
DONOR = Path(__file__).parent / "models" / "tiny-minimax-m2"
KEPT = ("options.json", "lock")
"""Files of a work folder that are no notes of work."""


def small_model(folder: Path) -> Path:
    """Two layers with experts, and a tokenizer."""
    raw = make_tiny("qwen3_moe", folder / "raw-small", num_hidden_layers=2)
    return with_tokenizer(raw, DONOR, folder / "small")


def _calibrate(model: Path, out: Path, *, spooled: bool = False) -> None:
    values = load_recipe("w8a8").model_dump()
    values["methods"] = [{"name": "smooth"}, {"name": "gptq", "min_rows": 4}]
    values |= {"auto_keep": {"kl": 0.001}, "kv_cache": load_recipe("w8a8-kv8").model_dump()["kv_cache"]}
    values["calibration"] |= {**SMALL, "held_out": 2}
    calibrate(model, out, validated(values, "small"), jobs=1, **({"memory_budget": 0} if spooled else {}))


def _convert(model: Path, out: Path) -> None:
    convert(model, out, load_recipe("w8a8"), jobs=1)


def _ladder(model: Path, out: Path) -> None:
    run_ladder(plan_ladder(model, load_rungs(None, ("w8", "w8a8")), SMALL, device="cpu"), out, jobs=1)


def _baseline(model: Path, out: Path) -> None:
    texts = TextOptions(("builtin:chinese_dialogue",), texts=1, tokens=24, long_tokens=32, probe_tokens=16)
    make_baseline(model, out, Options(texts, new_tokens=2, top_k=4))


COMMANDS: Mapping[str, tuple[Callable[[Path, Path], None], int]] = {
    "calibrate": (_calibrate, 11),
    "calibrate-spooled": (lambda model, out: _calibrate(model, out, spooled=True), 8),
    "convert": (_convert, 4),
    "ladder": (_ladder, 7),
    "baseline": (_baseline, 4),
}
"""Name -> what runs the command on a model into a folder, and how many notes of work it writes until it is stopped."""


def to_the_end(name: str, model: Path, out: Path) -> None:
    """Run a command, or go on with it; reports are one word, since drawing takes longer than computing."""
    word = lambda _: "report"  # noqa: E731
    with patch.object(calibration_page, "render", word), patch.object(ladder_page, "render", word):
        COMMANDS[name][0](model, out)


class StoppedError(BaseException):
    """Not an Exception: nothing may catch it."""


@contextmanager
def _stopping(notes: int) -> Iterator[None]:
    original, written = sealed.write_atomic, 0

    def stop(*arguments: Any, **options: Any) -> Any:
        nonlocal written
        if written == notes:
            raise StoppedError
        written += 1
        return original(*arguments, **options)

    with patch.object(sealed, "write_atomic", stop):
        yield


def stopped(name: str, model: Path, out: Path) -> Path:
    """What a command leaves that is stopped."""
    try:
        with _stopping(COMMANDS[name][1]):
            to_the_end(name, model, out)
    except StoppedError:
        return out
    raise AssertionError(f"{name} ended before it was stopped")


def notes_of(name: str, out: Path) -> list[Path]:
    """Files of a stopped run that say what is done; what `convert` has written is checked by its manifest alone."""
    folder = out / WORK_NAME if name == "convert" else out
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in KEPT]
