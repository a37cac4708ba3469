"""What stands beside the weights: each fault planted, and named with its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.companions import check_positions, parse_tokenizer
from quantkit.crosscheck import Problem
from quantkit.inspect import inspect

MODEL = Path(__file__).parents[1] / "models" / "tiny-minimax-m2"


def edit(root: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = root / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def update(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda root: edit(root, name, lambda raw: raw.update(values))


def remove(*names: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    return change


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(text)


def add_token(content: str, number: int) -> Callable[[Path], None]:
    return lambda root: edit(
        root, "tokenizer.json", lambda raw: raw["added_tokens"].append({"id": number, "content": content})
    )


def template(text: str) -> Callable[[Path], None]:
    return update("tokenizer_config.json", chat_template=text)


GOOD = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"

FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "token beyond the embedding": (
        add_token("<|new|>", 4096),
        "error",
        "the tokenizer has ids up to 4096, the embedding has 4096 rows: 1 tokens",
    ),
    "two tokens, one id": (add_token("<|new|>", 7), "error", "ids of the tokenizer are not unique"),
    "one token, two ids": (add_token("<|eos|>", 9), "error", "ids of the tokenizer are not unique"),
    "special token unknown": (
        update("tokenizer_config.json", pad_token="<|gone|>"),
        "error",
        "names special tokens that the tokenizer lacks",
    ),
    "added tokens moved": (
        update("tokenizer_config.json", added_tokens_decoder={"5": {"content": "<|eos|>"}}),
        "error",
        "disagree about added tokens",
    ),
    "bos differs": (update("config.json", bos_token_id=0), "note", "bos_token '<|bos|>' has id 1 in the tokenizer"),
    "id outside": (update("generation_config.json", pad_token_id=5000), "error", "ids outside the embedding of 4096"),
    "negative id": (update("config.json", pad_token_id=-1), "error", "ids outside the embedding of 4096"),
    "eos of the configs differ": (
        update("generation_config.json", eos_token_id=[7, 9]),
        "error",
        "generation_config.json stops at 7, 9, config.json at 2",
    ),
    "eos of the tokenizer differs": (
        update("tokenizer_config.json", eos_token="<|pad|>"),
        "error",
        "the tokenizer ends a text with '<|pad|>' (id 0), the configs stop at 2",
    ),
    "no tokenizer": (
        remove("tokenizer.json", "tokenizer_config.json"),
        "note",
        "there is no tokenizer",
    ),
    "tokenizer is no JSON": (write("tokenizer.json", "{"), "error", "tokenizer.json is not valid JSON"),
    "generation config is no JSON": (
        write("generation_config.json", "[]"),
        "error",
        "generation_config.json holds list",
    ),
    "tokenizer of another form": (
        write("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        "error",
        "tokenizer.json holds no vocabulary of ids",
    ),
    "ids that are no numbers": (
        write("tokenizer.json", '{"model": {"vocab": {"a": 1e999}}}'),
        "error",
        "tokenizer.json holds no vocabulary of ids",
    ),
    "tokenizer that cannot be read": (
        lambda root: (root / "tokenizer.json").rename(root / "tokenizer.model"),
        "note",
        "the tokenizer (tokenizer.model) has no tokenizer.json",
    ),
    "no template": (
        lambda root: edit(root, "tokenizer_config.json", lambda raw: raw.pop("chat_template")),
        "note",
        "there is no chat template",
    ),
    "template with a syntax error": (template("{% for m in %}"), "error", "cannot be rendered: TemplateSyntaxError"),
    "template that refuses": (
        template("{{ raise_exception('no') }}"),
        "error",
        "cannot be rendered: TemplateError: no",
    ),
    "template that reaches out": (
        template("{{ messages.__class__.__mro__ }}"),
        "error",
        "cannot be rendered: SecurityError",
    ),
    "template that loses the message": (template("{{ 'Hello' }}"), "error", "loses what the user says"),
    "template without a prompt for the answer": (
        template("{% for m in messages %}{{ m.content }}{% endfor %}"),
        "note",
        "pays no heed to add_generation_prompt",
    ),
    "template for one turn": (
        template(GOOD + "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}"),
        "error",
        "fails at a second turn",
    ),
    "template that forgets": (
        template("{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}"),
        "error",
        "loses the second turn",
    ),
    "template of no kind": (update("tokenizer_config.json", chat_template=3), "error", "neither a text nor a list"),
    "template file first": (write("chat_template.jinja", "{{ oops("), "error", "the chat template cannot be rendered"),
    "one of several templates": (
        update(
            "tokenizer_config.json",
            chat_template=[{"name": "default", "template": GOOD}, {"name": "tools", "template": "{% if %}"}],
        ),
        "error",
        "the chat template 'tools' cannot be rendered",
    ),
    "remote code is missing": (
        update("config.json", auto_map={"AutoModel": "modeling_tiny.Tiny"}),
        "error",
        "auto_map names code that is not here",
    ),
    "remote code elsewhere": (
        update("config.json", auto_map={"AutoModel": "someone/other--modeling_tiny.Tiny"}),
        "error",
        "code of another repository",
    ),
    "tokenizer too long": (
        update("tokenizer_config.json", model_max_length=4096),
        "note",
        "lets 4,096 tokens through, config.json has 2,048 positions",
    ),
    "positions beyond the scaling": (
        update(
            "config.json",
            max_position_embeddings=8192,
            rope_scaling=None,
            rope_parameters={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
        ),
        "error",
        "yarn scaling x 2 from 2,048 reaches 4,096",
    ),
    "scaling beyond the positions": (
        update(
            "config.json",
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        ),
        "note",
        "yarn scaling x 4 from 2,048 reaches 8,192",
    ),
    "no factor": (
        update("config.json", rope_parameters={"rope_type": "linear"}),
        "error",
        "rope scaling linear has no factor",
    ),
    "endless factor": (
        update("config.json", rope_parameters={"rope_type": "yarn", "factor": float("inf")}),
        "error",
        "rope scaling yarn has no factor that is a number",
    ),
}


def findings(root: Path) -> tuple[Problem, ...]:
    return inspect(root).problems


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODEL, tmp_path / "model"))
    before = {problem.what for problem in findings(root)}
    plant, level, expected = FAULTS[fault]
    plant(root)
    new = [problem for problem in findings(root) if problem.what not in before]
    assert any(problem.level == level and expected in problem.what for problem in new), new
    assert all(problem.remedy for problem in new)


def test_nothing_says_where_a_text_ends(tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODEL, tmp_path / "model"))
    for name, key in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ):
        edit(root, name, lambda raw, key=key: raw.pop(key))
    assert any("nothing says where a text ends" in problem.what for problem in findings(root))


@pytest.mark.parametrize("form", ["LICENSE", "COPYING.txt", "card"])
def test_a_licence_is_found(form: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODEL, tmp_path / "model"))
    assert any("no licence" in problem.what for problem in findings(root))
    if form == "card":
        (root / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Model\n")
    else:
        (root / form).write_text("text")
    assert not findings(root)


def test_remote_code_that_is_there_is_a_note(tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (root / "modeling_tiny.py").write_text("raise SystemExit('never run')")
    update("config.json", auto_map={"AutoModel": "modeling_tiny.Tiny"})(root)
    (found,) = (problem for problem in findings(root) if "auto_map" in problem.what)
    assert (found.level, found.items) == ("note", ("modeling_tiny.py",))


@pytest.mark.parametrize(
    "good",
    [
        GOOD,
        # a system turn refused, roles that must alternate, transformers' own tag, loop controls, parts of content
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + GOOD,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ 'A:' if add_generation_prompt }}",
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{{ m.content | tojson(indent=2) }}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ eos_token }}{{ 'A:' if add_generation_prompt }}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        "{{ 'A:' if add_generation_prompt }}",
    ],
)
def test_usual_templates_pass(good: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODEL, tmp_path / "model"))
    template(good)(root)
    assert not [problem for problem in findings(root) if "template" in problem.what]


def test_rendering_equals_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    from quantkit.chat_template import _TWO_TURNS, find_templates
    from quantkit.templates import render

    raw = json.loads((MODEL / "tokenizer_config.json").read_text())
    text = find_templates(MODEL, raw)[0]["default"]
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    expected = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
        _TWO_TURNS, tokenize=False, add_generation_prompt=True
    )
    assert render(text, _TWO_TURNS, tokens, generate=True) == expected


def test_ids_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(MODEL).get_vocab()
    assert parse_tokenizer(json.loads((MODEL / "tokenizer.json").read_text())).ids == expected


def test_unigram_ids_follow_the_order() -> None:
    found = parse_tokenizer({"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": []})
    assert found.ids == {"<unk>": 0, "a": 1}


def test_published_scalings_are_accepted() -> None:
    deepseek = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert not list(check_positions({"rope_scaling": deepseek, "max_position_embeddings": 163840}))
    assert not list(check_positions({"rope_scaling": llama, "max_position_embeddings": 131072}))
