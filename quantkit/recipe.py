"""Recipes: every choice of a conversion, in one YAML file. An unknown key is an error.

A recipe is found by name among those that are shipped, or given as a path. It may start from a shipped one: `extends`
names it, and what the file says comes on top.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from quantkit.archs import ROLES, Architecture, Key
from quantkit.errors import InputError, UsageError
from quantkit.shipped import shipped_folder
from quantkit.spec.document import Strict, parse_yaml, problems_of
from quantkit.spec.files import MAX_SETTINGS_BYTES, read_whole
from quantkit.spec.scheme import SCHEMES, Scheme
from quantkit.spec.transform import MethodOptions

RULE_FORMS = (
    "a rule matches a whole name on disk ('model.layers.0.mlp.*'), a role ('mlp.down', '*.down') or a name of the "
    "reports ('layers.0.mlp.down')"
)
"""What `match` of a rule may be, for messages."""

MAX_SAMPLES = 10_000_000
"""Bound on samples: all of them are drawn before the first layer runs."""

GROUPED = "w8a8-group128"
"""What `auto_group` makes of a GEMM."""


def _known_scheme(name: str) -> str:
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}; choices: {', '.join(SCHEMES)}")
    return name


class Rule(Strict):
    """One exception from the recipe's scheme.

    Attributes:
        match: glob on the tensor's name on disk, on its role ("mla.*"), or on the name that reports give it
            ("layers.0.mlp.down", "layers.*.attn.qkv", "layers.3.experts"); it must match something.
        scheme: what these tensors get.
        reason: why, for the report.
        layers: decoder layers that it is for; empty: all, and what is outside the layers.
        optional: it may match nothing, in a recipe for several families.
    """

    match: str
    scheme: str
    reason: str
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    optional: bool = False

    _scheme = field_validator("scheme")(_known_scheme)

    def matches(self, key: Key, name: str) -> bool:
        """Whether it is for the tensor `name` (on disk) with `key`."""
        if self.layers and key.layer not in self.layers:
            return False
        names = (name, key.role, *(_reported_names(key) if self.match.startswith("layers.") else ()))
        return any(fnmatch.fnmatchcase(each, self.match) for each in names)


def _reported_names(key: Key) -> Iterator[str]:
    """Names of a layer's tensor in reports: its own, that of the fused GEMM it is in, all experts' together."""
    role = ROLES.get(key.role)
    if key.layer is not None and role is not None:
        yield f"layers.{key.layer}.{key.role}"
        if role.fuse:
            yield f"layers.{key.layer}.{role.fuse}"
        if role.per_expert:
            yield f"layers.{key.layer}.experts"


class AutoGroup(Strict):
    """GEMMs get activation scales per group of 128 inputs where that pays most: shards only.

    Attributes:
        kl: budget of the predicted KL divergence from the source, nats per token, for every kind of text.
        never: names on disk or roles, as in rules, that are left as they are.
    """

    kl: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    never: tuple[str, ...] = ()


class AutoKeep(AutoGroup):
    """GEMMs stay in the source's dtype where that pays most.

    Attributes:
        max_share: most of the weights that would be quantized, as a share of their number.
    """

    max_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class KvCache(Strict):
    """How keys and values are kept.

    Attributes:
        keys, values: "int8": with one scale for each token and head, computed at run time; "float": as they are.
            Values are averaged, so their rounding reaches the output undamped: keep them unless memory decides.
        checkpoint: what the checkpoint form says, since engines cannot be told of the above there: "fp8" writes a
            static scale for the keys and one for the values of each layer, which vLLM reads; "none" refuses that form.
    """

    keys: Literal["int8", "float"] = "int8"
    values: Literal["int8", "float"] = "float"
    checkpoint: Literal["fp8", "none"] = "fp8"


class Mix(Strict):
    """A source of calibration text and its share of the samples.

    Attributes:
        data: `builtin:KIND` for a kind of the shipped text, a path (JSONL, JSON, Parquet, text), or the name of a
            Hugging Face data set.
        weight: share, relative to the other sources'.
    """

    data: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class Calibration(Strict):
    """How the calibration text is drawn.

    Attributes:
        samples: number of samples.
        seq_len: longest sample in tokens; longer texts are split.
        packing: texts of one kind are joined, so that every sample is full.
        seed: of every random choice.
        min_sources: fewest kinds of text; statistics of one kind mislead the others.
        mix: sources; empty means the shipped text, all kinds alike.
        evaluation: files of the text that the result will be judged by; a warning tells where it was seen here.
        min_tokens_per_expert: an expert that saw fewer is starving; it is named in the report.
        starving_experts: "warn": its activation statistics are those of all experts of its layer; "all_tokens": a
            sample of the layer's tokens goes through it for statistics only; "error": refused.
        batch_tokens: most tokens that go through a layer at once.
        held_out: further samples, which no statistic sees, on which the quantized model is compared with the source
            and decisions are taken; 0: neither.
    """

    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 512
    seq_len: Annotated[int, Field(ge=2)] = 512
    packing: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    min_sources: Annotated[int, Field(ge=1)] = 3
    mix: tuple[Mix, ...] = ()
    evaluation: tuple[str, ...] = ()
    min_tokens_per_expert: Annotated[int, Field(ge=0)] = 16
    starving_experts: Literal["warn", "all_tokens", "error"] = "warn"
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    held_out: Annotated[int, Field(ge=0, le=MAX_SAMPLES)] = 12


class Recipe(Strict):
    """A whole recipe, with that resolved which it `extends`.

    Attributes:
        name: shown in reports.
        description: one sentence on when to use it.
        scheme: of every GEMM whose role is quantized by default.
        rules: exceptions, the first that matches counts.
        roles: name pattern -> role for tensors that no architecture record knows: `layers.*.NAME` below every layer,
            `NAME` outside the layers, `NAME.**` for a subtree.
        mtp: what happens to draft layers.
        methods: exact transforms of the weights, in order; each entry has a `name` and that method's options
            (`quantkit.calibrate.methods`).
        auto_group, auto_keep: budgets by which the calibration decides on exceptions; rules come first.
        kv_cache: how keys and values are kept; None leaves that to who runs the model.
        calibration: how text is drawn.
    """

    name: str
    description: str
    scheme: str = "w8a8"
    rules: tuple[Rule, ...] = ()
    roles: dict[str, str] = Field(default_factory=dict)
    mtp: Literal["keep", "drop"] = "keep"
    methods: tuple[SerializeAsAny[MethodOptions], ...] = ()
    auto_group: AutoGroup | None = None
    auto_keep: AutoKeep | None = None
    kv_cache: KvCache | None = None
    calibration: Calibration = Calibration()

    _scheme = field_validator("scheme")(_known_scheme)

    @field_validator("methods", mode="before")
    @classmethod
    def _known_methods(cls, entries: Any) -> Any:
        """Every entry as the options of its method."""
        from quantkit.calibrate.methods import METHODS, method

        if not isinstance(entries, list | tuple):
            return entries  # pydantic says what is wrong
        found = []
        for entry in entries:
            name = entry.get("name") if isinstance(entry, dict) else getattr(entry, "name", entry)
            if not isinstance(name, str) or name not in METHODS:
                raise ValueError(f"unknown method {name!r}; choices: {', '.join(sorted(METHODS))}")
            try:
                found.append(method(name).options.model_validate(entry))
            except ValidationError as error:
                raise ValueError(f"method {name}: {'; '.join(problems_of(error, whole='entry'))}") from error
        _check_order([options.name for options in found])
        return tuple(found)

    @property
    def decides(self) -> bool:
        """Whether a calibration decides on exceptions."""
        return self.auto_group is not None or self.auto_keep is not None

    def scheme_for(self, arch: Architecture, key: Key, name: str) -> Scheme:
        """Scheme of the weight `name` (on disk) with `key`; roles that are never quantized get "keep"."""
        role = arch.role(key.role)
        rule = self.rule_for(key, name)
        if rule is not None:
            return SCHEMES[rule.scheme]
        return SCHEMES[self.scheme] if role.quantize else SCHEMES["keep"]

    def rule_for(self, key: Key, name: str) -> Rule | None:
        """The first rule that matches a tensor."""
        return next((rule for rule in self.rules if rule.matches(key, name)), None)

    def check_rules(self, names: Mapping[str, Key], place: Path) -> None:
        """Refuse rules that match none of the tensors (name on disk -> key) of a model.

        Raises:
            UsageError: they are listed.
        """
        if unused := self.unused_rules(names):
            raise UsageError(
                f"rules of the recipe {self.name} match nothing in {place}",
                "correct or remove them; nothing was written",
                items=[unused_rule(pattern) for pattern in unused],
            )

    def unused_rules(self, names: Mapping[str, Key]) -> list[str]:
        """Patterns of `rules` and `never` that match nothing; each is an error of the recipe."""
        tables = [table.never for table in (self.auto_group, self.auto_keep) if table is not None]
        rules = [*self.rules, *(keep_rule(pattern) for table in tables for pattern in table)]
        roles = {(key.layer, key.role) for key in names.values()} if rules else set()
        return [
            rule.match
            for rule in rules
            if not rule.optional
            and not any(rule.matches(Key(layer, role), role) for layer, role in roles)
            and not any(rule.matches(key, name) for name, key in names.items())
        ]


def unused_rule(pattern: str) -> str:
    """The sentence on a rule that matches nothing."""
    return f"recipe rule {pattern!r} matches no tensor and no role of this model; {RULE_FORMS}"


def _check_order(names: list[str]) -> None:
    """First methods that transform, then one at most that rounds, then one that makes up for it; none comes twice."""
    from quantkit.calibrate.methods import method

    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there twice")
    places = [2 if row.corrects else 1 if row.rounds else 0 for row in map(method, names)]
    if places != sorted(places) or places.count(1) > 1:
        raise ValueError(
            "the order of methods is: those that transform, one at most that rounds weights, one that corrects biases"
        )


def keep_rule(pattern: str) -> Rule:
    """A rule that keeps what matches a pattern."""
    return Rule(match=pattern, scheme="keep", reason="")


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with quantkit."""
    folder = shipped_folder("recipes")
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe by shipped name or from a file.

    Raises:
        UsageError: no such recipe, not YAML, or keys and values that the model refuses (all listed).
    """
    if name_or_path in shipped_recipes():
        return parse_recipe(_shipped_text(name_or_path), name_or_path)
    try:
        text = read_whole(Path(name_or_path), MAX_SETTINGS_BYTES, pipes=True).decode()
    except OSError as error:
        raise UsageError(
            f"no recipe {name_or_path!r}: neither a shipped name nor a readable file ({error.strerror})",
            "give a shipped name or the path of a YAML file",
            choices=shipped_recipes(),
        ) from error
    except ValueError as error:
        raise UsageError(f"recipe {name_or_path} is no text in UTF-8: {error}", "give a YAML file") from error
    return parse_recipe(text, name_or_path)


def _shipped_text(name: str) -> str:
    return (shipped_folder("recipes") / f"{name}.yaml").read_text(encoding="utf-8")


_RECIPE_HELP = "correct it; every key is described in quantkit/recipe.py"


def parse_recipe(text: str, origin: str) -> Recipe:
    """Recipe from YAML text; `origin` names it in errors."""
    return validated(_with_base(_mapping(text, origin), origin), origin)


def _mapping(text: str, origin: str) -> dict[str, Any]:
    try:
        raw = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"recipe {origin} is not YAML: {error}", _RECIPE_HELP) from error
    if not isinstance(raw, dict):
        raise UsageError(f"recipe {origin} is not a mapping of keys", _RECIPE_HELP)
    return raw


def _with_base(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """Keys and values of a recipe over those of the shipped one that it `extends`.

    Its rules come before that one's, so they win; sections are joined key by key; a list of methods replaces the other.
    Name and description are never inherited.
    """
    if "extends" not in raw:
        return raw
    name = raw["extends"]
    if name not in shipped_recipes():
        raise UsageError(
            f"recipe {origin} extends {name!r}, which is not shipped", "name one that is", choices=shipped_recipes()
        )
    base = _with_base(_mapping(_shipped_text(name), name), name)
    found = {key: value for key, value in {**base, **raw}.items() if key != "extends"}
    for key in ("name", "description"):
        if key not in raw:
            found.pop(key)
    for key in raw.keys() & base.keys():
        ours, theirs = raw[key], base[key]
        if key == "rules" and isinstance(ours, list):
            found[key] = [*ours, *theirs]
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            found[key] = {**theirs, **ours}
    return found


def recorded(raw: Mapping[str, Any]) -> Recipe:
    """Recipe that a manifest holds.

    Raises:
        InputError: keys and values that the model refuses (all listed).
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise InputError(
            "the recipe in the manifest is none",
            "use the version of quantkit that wrote it, copy the manifest again, or convert again",
            items=problems_of(error, whole="recipe"),
        ) from error


def validated(raw: Mapping[str, Any], origin: str) -> Recipe:
    """Recipe from its keys and values; `origin` names it in errors.

    Raises:
        UsageError: keys and values that the model refuses (all listed).
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise UsageError(
            f"recipe {origin} has {error.error_count()} problems",
            _RECIPE_HELP,
            items=problems_of(error, whole="recipe"),
            choices=sorted([*Recipe.model_fields, "extends"]),
        ) from error
