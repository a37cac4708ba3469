"""The calibration texts: their form, their number, their sources, and no overlap with held-out texts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "calibration_data"
HELD_OUT = ROOT / "tests" / "models" / "texts"
KINDS = ("code", "math", "english_dialogue", "chinese_dialogue", "english_prose", "chinese_prose")
WINDOW = 64

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def squeeze(text: str) -> str:
    return "".join(text.split())


def windows(texts: Iterable[str]) -> set[str]:
    """All runs of WINDOW characters of the texts, whitespace removed."""
    found: set[str] = set()
    for text in texts:
        bare = squeeze(text)
        found.update(bare[i : i + WINDOW] for i in range(len(bare) - WINDOW + 1))
    return found


def shared_run(text: str, held: set[str]) -> str | None:
    """The first run of WINDOW characters, whitespace removed, that stands in the held-out texts."""
    bare = squeeze(text)
    for i in range(len(bare) - WINDOW + 1):
        if bare[i : i + WINDOW] in held:
            return bare[i : i + WINDOW]
    return None


def texts(row: Row) -> list[str]:
    """The texts of a sample: the text itself, or each message and all of them joined."""
    if "text" in row:
        return [row["text"]]
    contents = [message["content"] for message in row["messages"]]
    labels = {"user": "User: ", "assistant": "Assistant: "}
    labelled = "\n".join(labels[m["role"]] + m["content"] for m in row["messages"])
    return [*contents, "\n".join(contents), labelled]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {path.stem: read(path) for path in sorted(DATA.glob("*.jsonl"))}


@pytest.fixture(scope="module")
def held_out() -> list[str]:
    found = [row["text"] for path in sorted(HELD_OUT.glob("*.jsonl")) for row in read(path)]
    assert len(found) > 100, "the held-out texts are missing"
    return found


def test_every_kind_has_its_file(rows: dict[str, list[Row]]) -> None:
    assert set(rows) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_follows_the_schema(kind: str, rows: dict[str, list[Row]]) -> None:
    for number, row in enumerate(rows[kind], start=1):
        where = f"{kind}.jsonl:{number}"
        body = "messages" if kind.endswith("dialogue") else "text"
        assert set(row) == {body, "kind", "source"}, where
        assert row["kind"] == kind, where
        assert isinstance(row["source"], str), where
        assert row["source"], where
        if body == "text":
            assert isinstance(row["text"], str), where
            assert len(row["text"].strip()) >= 100, where
            continue
        messages = row["messages"]
        assert len(messages) >= 2, where
        assert len(messages) % 2 == 0, where
        for position, message in enumerate(messages):
            assert set(message) == {"role", "content"}, where
            assert message["role"] == ("user", "assistant")[position % 2], where
            assert isinstance(message["content"], str), where
            assert message["content"].strip(), where


def test_there_are_enough_samples(rows: dict[str, list[Row]]) -> None:
    assert sum(map(len, rows.values())) >= 512
    assert all(len(rows[kind]) >= 60 for kind in KINDS), {kind: len(rows[kind]) for kind in KINDS}
    own = [row for row in rows["chinese_dialogue"] if row["source"] == "quantkit"]
    assert len(own) >= 60


def test_chinese_samples_are_chinese(rows: dict[str, list[Row]]) -> None:
    for kind in ("chinese_dialogue", "chinese_prose"):
        for row in rows[kind]:
            text = squeeze("".join(texts(row)))
            assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 0.2 * len(text), text[:80]


def test_many_samples_are_long_enough_to_fill_a_window(rows: dict[str, list[Row]]) -> None:
    for kind in ("code", "english_prose", "chinese_prose"):
        lengths = sorted(len(row["text"]) for row in rows[kind])
        assert lengths[len(lengths) // 2] >= 1000, kind
        assert lengths[-1] >= 8000, kind


def test_no_sample_stands_twice(rows: dict[str, list[Row]]) -> None:
    counts = Counter(squeeze(texts(row)[-1]) for kind in KINDS for row in rows[kind])
    assert [text[:80] for text, count in counts.items() if count > 1] == []


def test_every_source_is_documented(rows: dict[str, list[Row]]) -> None:
    documented = set(re.findall(r"^\| `([^`]+)` \|", (DATA / "SOURCES.md").read_text(encoding="utf-8"), re.MULTILINE))
    used = {row["source"] for kind in KINDS for row in rows[kind]}
    assert used == documented


def test_files_are_small(rows: dict[str, list[Row]]) -> None:
    assert sum((DATA / f"{kind}.jsonl").stat().st_size for kind in rows) < 4_000_000


def test_no_addresses_of_persons(rows: dict[str, list[Row]]) -> None:
    address = re.compile(r"[\w.+-]+@[\w-]+\.(?:com|net|org|edu|ca|de|cn)\b")
    for kind in KINDS:
        for row in rows[kind]:
            found = set(address.findall("\n".join(texts(row)))) - {"name@example.org"}
            assert found == set(), (kind, row["source"])


def test_nothing_is_shared_with_the_held_out_texts(rows: dict[str, list[Row]], held_out: list[str]) -> None:
    held = windows(held_out)
    assert len(held) > 100_000
    hits = [
        (kind, number, row["source"], run)
        for kind in KINDS
        for number, row in enumerate(rows[kind], start=1)
        for run in (shared_run(text, held) for text in texts(row))
        if run is not None
    ]
    assert hits == []


def test_no_held_out_text_stands_whole_in_a_sample(rows: dict[str, list[Row]], held_out: list[str]) -> None:
    """Texts shorter than the window: the run rule cannot see them."""
    short = [bare for bare in map(squeeze, held_out) if len(bare) < WINDOW]
    everything = "\n".join(squeeze(text) for kind in KINDS for row in rows[kind] for text in texts(row))
    assert [bare for bare in short if bare in everything] == []


def test_the_detector_finds_a_planted_overlap(rows: dict[str, list[Row]], held_out: list[str]) -> None:
    held = windows(held_out)
    long = squeeze(max(held_out, key=len))
    run = long[100 : 100 + WINDOW]
    clean = rows["english_prose"][0]["text"]
    spaced = " \n".join(run[i : i + 7] for i in range(0, WINDOW, 7))
    assert shared_run(clean, held) is None
    assert shared_run(f"{clean}\n{spaced}\n{clean}", held) == run
    assert shared_run(f"≠{run[:-1]}≠", held) is None, "one character less than the window is no hit"
    planted = {"messages": [{"role": "user", "content": "≠"}, {"role": "assistant", "content": spaced}]}
    assert any(shared_run(text, held) for text in texts(planted))
