"""What is drawn: shares, seeds, duplicates, formats, refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.modeling import load_tokenizer
from quantkit.calibrate import json_rows
from quantkit.calibrate.data import Samples, draw_samples, encode
from quantkit.calibrate.data import draw as draw_both
from quantkit.calibrate.sources import builtin_kinds, parse_spec, read_rows
from quantkit.errors import InputError, UsageError
from quantkit.recipe import Calibration, Mix

LONG = "the quick brown fox jumps over the lazy dog and runs away "


@pytest.fixture(scope="module")
def tokenizer(minimax: Path) -> Any:
    return load_tokenizer(minimax)


def draw(tokenizer: Any, *mix: Mix, **options: Any) -> Samples:
    return draw_samples(tokenizer, Calibration(mix=mix, **{"samples": 24, "seq_len": 40, "held_out": 0, **options}))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_shipped_text_all_kinds_alike(tokenizer: Any) -> None:
    samples = draw(tokenizer)
    counts = Counter(sample.kind for sample in samples.samples)
    assert set(counts) == set(builtin_kinds())
    assert set(counts.values()) == {4}
    assert max(len(sample.ids) for sample in samples.samples) <= 40


def test_weights_decide_the_shares(tokenizer: Any) -> None:
    mix = [Mix(data="builtin:code", weight=3), Mix(data="builtin:math"), Mix(data="builtin:english_prose", weight=2)]
    counts = Counter(sample.kind for sample in draw(tokenizer, *mix).samples)
    assert counts == {"code": 12, "math": 4, "english_prose": 8}


def test_seed_decides_the_draw(tokenizer: Any) -> None:
    assert draw(tokenizer, seed=5).digest == draw(tokenizer, seed=5).digest
    assert draw(tokenizer, seed=5).digest != draw(tokenizer, seed=6).digest


def test_batches_hold_every_sample_once_without_padding(tokenizer: Any) -> None:
    samples = draw(tokenizer, seq_len=300)
    batches = samples.batches(batch_tokens=600)
    assert sorted(index for batch in batches for index in batch.samples) == list(range(24))
    for batch in batches:
        assert batch.ids.numel() <= 600 or len(batch.samples) == 1
        for row, index in enumerate(batch.samples):
            assert batch.ids[row].equal(samples.samples[index].ids)
            assert samples.kinds[batch.kind] == samples.samples[index].kind
            assert batch.describe(row * batch.ids.shape[1]).startswith(f"sample {index} (")


def test_duplicates_are_drawn_once_and_a_dry_source_passes_its_share_on(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": f"{LONG}{number % 3}"} for number in range(50)]
    path = write_jsonl(tmp_path / "few.jsonl", rows)
    samples = draw(tokenizer, Mix(data=str(path)), Mix(data="builtin:code"), Mix(data="builtin:math"), seq_len=200)
    assert Counter(sample.kind for sample in samples.samples)["few"] == 3
    assert len(samples.samples) == 24
    assert any(str(path) in warning for warning in samples.warnings)
    alone = draw(tokenizer, Mix(data=str(path)), min_sources=1, seq_len=200)
    assert len(alone.samples) == 3
    assert alone.warnings == ("24 samples were asked for, the sources hold 3",)


def test_texts_most_of_which_was_drawn_before_are_passed_over(tokenizer: Any, tmp_path: Path) -> None:
    """One with a word changed here and there goes; one that shares its beginning alone stays."""
    words = [str(number * 37) for number in range(80)]
    changed = ["other" if number % 30 == 7 else word for number, word in enumerate(words)]
    shares = [*words[:20], *(str(number * 41 + 10**6) for number in range(60))]
    texts = [{"text": " ".join(each)} for each in (words, changed, shares)]
    mix = Mix(data=str(write_jsonl(tmp_path / "texts.jsonl", texts)))
    samples = draw(tokenizer, mix, min_sources=1, seq_len=2000)
    assert len(samples.samples) == 2
    assert "1 texts were passed over because most of each was drawn before" in samples.warnings


def numbers(tokenizer: Any, tmp_path: Path, *counts: int) -> tuple[Mix, list[list[int]]]:
    """A file of texts of about so many tokens, and their token ids."""
    texts = [" ".join(str(7 * number + text * 10**5) for number in range(count)) for text, count in enumerate(counts)]
    path = write_jsonl(tmp_path / "numbers.jsonl", [{"text": text} for text in texts])
    return Mix(data=str(path)), [tokenizer(text)["input_ids"] for text in texts]


def test_long_texts_are_split_first_windows_first(tokenizer: Any, tmp_path: Path) -> None:
    mix, ids = numbers(tokenizer, tmp_path, 60, 60, 3)
    samples = draw(tokenizer, mix, min_sources=1).samples
    found = [sample.ids.tolist() for sample in samples]
    assert sorted(map(tuple, found)) == sorted(
        tuple(text[start : start + 40]) for text in ids for start in range(0, len(text), 40) if len(text) - start >= 8
    )
    assert {tuple(text[:40]) for text in ids} == set(map(tuple, found[:3]))


def test_long_samples_have_few_lengths(tokenizer: Any, tmp_path: Path) -> None:
    """Those that are shorter than `seq_len` lose their last tokens, and no other ones."""
    mix, ids = numbers(tokenizer, tmp_path, 12, 50, 52, 120)
    samples = draw(tokenizer, mix, min_sources=1, seq_len=300).samples
    assert sum(map(len, ids)) > sum(len(sample.ids) for sample in samples)
    starts = [text[start : start + 300] for text in ids for start in range(0, len(text), 300)]
    for sample in samples:
        (whole,) = [text for text in starts if text[: len(sample.ids)] == sample.ids.tolist()]
        rest = len(whole) % 64 if 128 <= len(whole) < 300 else 0
        assert len(sample.ids) == len(whole) - rest


def test_packing_fills_every_sample(tokenizer: Any, tmp_path: Path) -> None:
    mix, ids = numbers(tokenizer, tmp_path, 9, 20, 33, 5)
    samples = draw(tokenizer, mix, min_sources=1, packing=True).samples
    lengths = [len(sample.ids) for sample in samples]
    total = sum(map(len, ids))
    assert lengths[:-1] == [40] * (total // 40)
    joined = [token for sample in samples for token in sample.ids.tolist()]
    assert len(joined) == total
    assert all(any(joined[i : i + len(text)] == text for i in range(total)) for text in ids)


def test_held_out_text_is_other_text(tokenizer: Any) -> None:
    options = Calibration(samples=24, seq_len=40, held_out=6)
    drawn, held_out = draw_both(tokenizer, options)
    assert (len(drawn.samples), len(held_out.samples)) == (24, 6)
    assert held_out.kinds == drawn.kinds
    assert not {each.sha256 for each in drawn.samples} & {each.sha256 for each in held_out.samples}
    assert held_out.digest == draw_both(tokenizer, options)[1].digest


def test_scarce_text_is_held_out_sparingly(tokenizer: Any, tmp_path: Path) -> None:
    mix, _ = numbers(tokenizer, tmp_path, *[20] * 15)
    drawn, held_out = draw_both(tokenizer, Calibration(mix=(mix,), min_sources=1, seq_len=2000, held_out=12))
    assert (len(drawn.samples), len(held_out.samples)) == (12, 3)
    assert "12 samples were to be held out, there is text for 3" in drawn.warnings


def test_evaluation_text_that_was_calibrated_on_is_told(tokenizer: Any, tmp_path: Path) -> None:
    """Whole and as a part of a longer text; what only shares a few words is not."""
    mix, _ = numbers(tokenizer, tmp_path, 90, 90)
    seen = json.loads((tmp_path / "numbers.jsonl").read_text().splitlines()[1])["text"]
    parts = [seen, f"Before. {seen[100:330]} After.", f"{seen[:14]} and then {LONG}", LONG]
    file = write_jsonl(tmp_path / "judge.jsonl", [{"text": text} for text in parts])
    found = draw(tokenizer, mix, min_sources=1, seq_len=400, samples=2, evaluation=(str(file),))
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith(f"2 of 4 texts of {file} are also calibration text")
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": LONG}])
    assert draw(tokenizer, mix, min_sources=1, samples=2, evaluation=(str(other),)).warnings == ()
    with pytest.raises(UsageError, match="does not exist"):
        draw(tokenizer, mix, min_sources=1, evaluation=("none.jsonl",))


def test_dialogues_go_through_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages, "kind": "chat"}])
    (sample,) = draw(tokenizer, Mix(data=str(path)), min_sources=1, samples=1, seq_len=200).samples
    wanted = tokenizer.apply_chat_template(messages, tokenize=False)
    assert sample.ids.tolist() == tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert sample.kind == "chat"


def test_local_formats(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": [LONG, "b"], "kind": ["x", "y"]})
    table.to_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps([{"text": LONG, "kind": "x"}, {"text": "b", "kind": "y"}]))
    (tmp_path / "t.txt").write_text(f"{LONG}\n\nb\n")
    for name, kinds in (("t.parquet", ["x", "y"]), ("t.json", ["x", "y"]), ("t.txt", ["t", "t"])):
        rows = read_rows(Mix(data=str(tmp_path / name)))
        assert [row.text.strip() for row in rows] == [LONG.strip(), "b"]
        assert [row.kind for row in rows] == kinds


def test_code_alone_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"1 kind \(code\)") as caught:
        draw(tokenizer, Mix(data="builtin:code"))
    assert "--force-sources" in caught.value.hint
    assert draw(tokenizer, Mix(data="builtin:code"), min_sources=1).kinds == ("code",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("builtin:poems", "no shipped text of kind 'poems'"),
        ("missing/text.jsonl", "does not exist"),
        ("FOLDER", "is a folder"),
        ("FOLDER/odd.xyz", "unknown suffix"),
    ],
)
def test_unknown_sources_are_refused(data: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.xyz").write_text("a")
    with pytest.raises(UsageError, match=message):
        read_rows(Mix(data=data.replace("FOLDER", str(tmp_path))))


def test_unreadable_and_shapeless_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(InputError, match=r"broken\.jsonl, line 2: it cannot be read as JSON: Expecting value"):
        read_rows(Mix(data=str(broken)))
    with pytest.raises(InputError, match="neither `text`") as caught:
        read_rows(Mix(data=str(write_jsonl(tmp_path / "columns.jsonl", [{"body": "a"}]))))
    assert "body" in caught.value.choices
    with pytest.raises(InputError, match=r"row 0 of .* its `kind` is no text"):
        read_rows(Mix(data=str(write_jsonl(tmp_path / "kinds.jsonl", [{"text": "a", "kind": [["x"]]}]))))


@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
@pytest.mark.parametrize("levels", [100, 900, 100_000])
@pytest.mark.parametrize("piece", ['{"a":', "["])
def test_text_that_nests_without_end_is_refused(name: str, levels: int, piece: str, tmp_path: Path) -> None:
    closing = {"[": "]", '{"a":': "}"}[piece]
    deep = piece * levels + "1" + closing * levels
    (tmp_path / name).write_text(json.dumps({"text": LONG}) + f'\n{{"messages": {deep}}}\n')
    with pytest.raises(InputError, match="line 2: it nests deeper than 100 levels"):
        read_rows(Mix(data=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("null", "line 2: the row is no object"),
        ('"a"', "line 2: the row is no object"),
        ("[]", "line 2: the row is no object"),
        (r'{"text": "\ud83d"}', "line 2: a text has half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 2: a text has half of a surrogate pair"),
        ('{"text": ' + "9" * 5000 + "}", "line 2: it cannot be read as JSON"),
        ('{"text": "a"', "line 2: it cannot be read as JSON"),
    ],
)
def test_rows_that_are_no_objects_of_text_are_refused(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": LONG}) + f"\n{row}\n")
    with pytest.raises(InputError, match=message):
        read_rows(Mix(data=str(path)))


def test_a_row_may_begin_with_null(tmp_path: Path) -> None:
    """The reader of the `datasets` library ends the process with this file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("null\n" + json.dumps({"text": LONG}) + "\n")
    with pytest.raises(InputError, match="line 1: the row is no object"):
        read_rows(Mix(data=str(path)))


def test_json_is_lines_or_one_list(tmp_path: Path) -> None:
    rows = [
        {"text": text} for text in ("[" * 300, '"{' * 300, "\\" * 7 + '"[' * 300, "\\", "]}" * 9, "海", "\U0001f30a")
    ]
    lines = write_jsonl(tmp_path / "lines.json", rows)
    (tmp_path / "list.json").write_text("\n \n" + json.dumps(rows, indent=1))
    (tmp_path / "blank.jsonl").write_text("\n" + lines.read_text("utf-8").replace("\n", "\r\n\r\n"), "utf-8")
    for name in ("lines.json", "list.json", "blank.jsonl"):
        assert [row.text for row in read_rows(Mix(data=str(tmp_path / name)))] == [row["text"] for row in rows]
    (tmp_path / "list.json").write_text(json.dumps([*rows, None]))
    with pytest.raises(InputError, match="row 7: the row is no object"):
        read_rows(Mix(data=str(tmp_path / "list.json")))


def test_rows_and_lists_beyond_bounds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_LINE", 1 << 10)
    monkeypatch.setattr(json_rows, "MAX_LIST", 1 << 10)
    path = write_jsonl(tmp_path / "long.jsonl", [{"text": "a"}, {"text": "b" * 2000}])
    with pytest.raises(InputError, match="line 2: it is longer than"):
        read_rows(Mix(data=str(path)))
    (tmp_path / "list.json").write_text("[\n" + json.dumps({"text": "b" * 2000}) + "]")
    with pytest.raises(InputError, match="is a list of more than"):
        read_rows(Mix(data=str(tmp_path / "list.json")))


def test_ids_beyond_every_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="gives the id 2,147,483,648, which no vocabulary has"):
        encode(lambda _text, **_: {"input_ids": [1, 2**31]}, "a")


def test_specs() -> None:
    assert parse_spec("builtin:code") == Mix(data="builtin:code")
    assert parse_spec("a=b.jsonl=2.5") == Mix(data="a=b.jsonl", weight=2.5)
    for wrong in ("x=much", "x=0", "x=-1", "x=nan"):
        with pytest.raises(UsageError, match="not a positive weight"):
            parse_spec(wrong)


def test_hashes_are_of_little_endian_int32(tokenizer: Any) -> None:
    import hashlib

    sample = draw(tokenizer).samples[0]
    assert sample.record.sha256 == hashlib.sha256(np.array(sample.ids.tolist(), "<i4").tobytes()).hexdigest()
