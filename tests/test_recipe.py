"""Recipes: the shipped ones, what is refused, and which tensor gets which scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from quantkit.archs import Key, architecture_for
from quantkit.calibrate.weights import expected_gemms
from quantkit.checkpoint.reader import Source
from quantkit.errors import UsageError
from quantkit.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes

MINIMAX = architecture_for({"model_type": "minimax_m2"})
NAMES = {
    name: MINIMAX.parse(name)
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.block_sparse_moe.experts.3.w2.weight",
        "model.embed_tokens.weight",
    )
}


def scheme(recipe: Recipe, name: str) -> str:
    key = NAMES[name]
    assert key is not None
    return recipe.scheme_for(MINIMAX, key, name).name


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_is_named_after_its_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")


def test_recipes_of_the_first_release_are_shipped() -> None:
    assert {"w8a8", "w8a8-group128", "bf16"} <= set(shipped_recipes())


def test_default_recipe_quantizes_gemms_and_nothing_else() -> None:
    recipe = load_recipe("w8a8")
    assert [scheme(recipe, name) for name in NAMES] == ["w8a8", "keep", "w8a8", "keep"]


def test_rules_match_roles_and_names_and_the_first_counts() -> None:
    recipe = parse_recipe(
        """
        name: mine
        description: A test.
        rules:
          - {match: "*.experts.3.*", scheme: keep, reason: by name}
          - {match: "expert.*", scheme: w8a8-group128, reason: by role}
        """,
        "mine.yaml",
    )
    assert scheme(recipe, "model.layers.0.block_sparse_moe.experts.3.w2.weight") == "keep"
    assert recipe.unused_rules({name: key for name, key in NAMES.items() if key}) == []


def test_a_rule_that_matches_nothing_is_reported() -> None:
    recipe = parse_recipe("{name: a, description: b, rules: [{match: 'mla.*', scheme: keep, reason: c}]}", "mine.yaml")
    assert recipe.unused_rules({name: key for name, key in NAMES.items() if key}) == ["mla.*"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{name: a, description: b, sheme: w8a8}", "sheme"),
        ("{name: a, description: b, calibration: {sample: 3}}", "calibration.sample"),
        ("{name: a, description: b, scheme: w4a16}", "w8a8-group128"),
        ("{name: a, description: b, calibration: {samples: 0}}", "calibration.samples"),
        ("{name: a}", "description"),
        ("[1, 2]", "mapping"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.system [true]", "not YAML"),
        ("name: a\ndescription: b\nrules: []\n'rules': []", "'rules' stands twice, in lines 3 and 4"),
        ("{name: a, description: b, calibration: {samples: 1, seed: 2, samples: 3}}", "'samples' stands twice"),
        ("{name: a, description: b, rules: [{match: a, scheme: keep, reason: c, match: b}]}", "'match' stands twice"),
    ],
)
def test_bad_recipes_are_refused_with_the_offender(text: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe(text, "mine.yaml")
    assert wanted in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_what_is_merged_in_may_be_written_over() -> None:
    """YAML's `<<` repeats keys on purpose, also through an alias that is used more than once."""
    rules = "[&one {match: a, scheme: keep, reason: c}, &two {<<: *one, match: b}, {<<: *two, match: d}, *two]"
    recipe = parse_recipe(f"{{name: a, description: b, rules: {rules}}}", "mine.yaml")
    assert [rule.match for rule in recipe.rules] == ["a", "b", "d", "b"]
    assert {rule.reason for rule in recipe.rules} == {"c"}


def test_every_problem_of_a_recipe_is_listed_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe("{name: a, description: b, one: 1, two: 2}", "mine.yaml")
    assert {"one", "two"} <= {item.split(":")[0] for item in caught.value.items}


def test_unknown_name_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(str(tmp_path / "none.yaml"))
    assert "w8a8" in caught.value.choices


def test_a_recipe_may_start_from_a_shipped_one() -> None:
    """Its rules come first, sections are joined, name and description are its own."""
    recipe = parse_recipe(
        """
        extends: w8a8-best
        name: mine
        description: A test.
        rules: [{match: "attn.o", scheme: keep, reason: mine}]
        auto_keep: {kl: 0.1}
        """,
        "mine.yaml",
    )
    base = load_recipe("w8a8-best")
    assert recipe.methods == base.methods
    assert recipe.auto_keep is not None
    assert base.auto_keep is not None
    assert (recipe.auto_keep.kl, recipe.auto_keep.max_share) == (0.1, base.auto_keep.max_share)
    assert "extends" not in recipe.model_dump()
    over = {"extends": "w8a8-experts", "name": "n", "description": "d", "rules": [{**_FIRST, "scheme": "w8a8"}]}
    mine, theirs = parse_recipe(yaml.safe_dump(over), "mine.yaml"), load_recipe("w8a8-experts")
    assert [rule.scheme for rule in mine.rules] == ["w8a8", *(rule.scheme for rule in theirs.rules)]
    assert scheme(mine, "model.layers.0.self_attn.q_proj.weight") == "w8a8"
    assert scheme(theirs, "model.layers.0.self_attn.q_proj.weight") == "keep"


_FIRST = {"match": "attn.*", "reason": "mine"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{extends: none, name: a, description: b}", "'none'"),
        ("{extends: ../w8a8, name: a, description: b}", "'../w8a8'"),
        ("{extends: [w8a8], name: a, description: b}", "w8a8"),
        ("{extends: , name: a, description: b}", "None"),
        ("{extends: w8a8, name: a}", "description"),
        ("{extends: w8a8, description: a}", "name"),
        ("{extends: w8a8-experts, name: a, description: b, rules: 3}", "rules"),
        ("{extends: w8a8-best, name: a, description: b, auto_keep: 3}", "auto_keep"),
    ],
)
def test_a_bad_start_is_refused(text: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe(text, "mine.yaml")
    assert wanted in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_recipe_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "我的 [recipe].yaml"
    path.write_text("name: x\ndescription: y\nscheme: keep\n", encoding="utf-8")
    assert load_recipe(str(path)).scheme == "keep"


def test_recipes_and_texts_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installation `quantkit.recipes` is no package: the folders of the checkout serve."""
    from quantkit.calibrate.sources import builtin_kinds

    installed = shipped_recipes(), builtin_kinds()

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("quantkit.shipped.resources.files", missing)
    assert (shipped_recipes(), builtin_kinds()) == installed
    assert load_recipe("w8a8").name == "w8a8"


@pytest.mark.parametrize(
    ("match", "name"),
    [
        ("layers.0.attn.q", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.0.attn.qkv", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.*.expert.down", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("layers.0.experts", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    ],
)
def test_a_rule_may_use_the_names_of_reports(match: str, name: str) -> None:
    rule = {"match": match, "scheme": "keep", "reason": "as the report names it"}
    recipe = Recipe.model_validate({"name": "n", "description": "d", "rules": [rule]})
    names = {each: key for each, key in NAMES.items() if key}
    assert recipe.unused_rules(names) == []
    assert [each for each, key in names.items() if recipe.rule_for(key, each)] == [name]
    with pytest.raises(UsageError, match="match nothing"):
        recipe.check_rules({"model.embed_tokens.weight": names["model.embed_tokens.weight"]}, Path("there"))


EXPERTS = {"expert.gate", "expert.up", "expert.down"}
SHARED = {"shared.gate", "shared.up", "shared.down"}


@pytest.mark.parametrize(
    ("recipe", "family", "quantized"),
    [
        ("w8a8-experts", "mixtral", EXPERTS),
        ("w8a8-experts", "deepseek_v3", EXPERTS),
        ("deepseek-v3", "deepseek_v3", EXPERTS | SHARED | {"mla.q_b", "mla.kv_b", "attn.o"}),
    ],
)
def test_recipes_of_families_convert_what_they_say(
    recipe: str, family: str, quantized: set[str], tiny: Callable[[str], Path]
) -> None:
    gemms = expected_gemms(Source(tiny(family)), load_recipe(recipe))
    assert {key.role for key, gemm in gemms.items() if gemm.quantized} == quantized


def test_a_rule_may_be_for_some_layers_and_for_some_families(tiny: Callable[[str], Path]) -> None:
    source = Source(tiny("llama"))
    rules = [
        {"match": "attn.v", "layers": [1], "scheme": "keep", "reason": "a test"},
        {"match": "mla.*", "scheme": "keep", "reason": "a test", "optional": True},
    ]
    values = {**load_recipe("w8a8").model_dump(), "rules": rules}
    gemms = expected_gemms(source, Recipe.model_validate(values))
    assert [key for key, gemm in gemms.items() if not gemm.quantized] == [Key(1, "attn.v")]
    values["rules"] = [{**rules[0], "layers": [9]}, {**rules[1], "optional": False}]
    with pytest.raises(UsageError, match=r"match nothing|matches no tensor") as caught:
        expected_gemms(source, Recipe.model_validate(values))
    assert len(caught.value.items) == 2
