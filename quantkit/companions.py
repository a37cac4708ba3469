"""What stands beside the weights, held against the config and the embedding: tokenizer, special ids, generation
config, positions, remote code, licence.

A wrong file here breaks no tensor, so conversion does not need it; but a model that never stops or an id outside the
embedding is found on the cards otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.archs import text_config
from quantkit.archs.dims import MAX_SIZE
from quantkit.chat_template import check_chat_template
from quantkit.crosscheck import Problem
from quantkit.errors import InputError
from quantkit.rope import rope_factor, rope_parameters, rope_type
from quantkit.spec.files import exists, is_file, is_inside, read_whole
from quantkit.spec.index import read_json

_MAX_NAMED = 8
_LICENCES = ("LICENSE*", "LICENCE*", "License*", "license*", "COPYING*", "NOTICE*")
_OTHER_TOKENIZERS = ("tokenizer.model", "*.tiktoken", "tiktoken.model", "vocab.json", "spiece.model")
_SCALED_BY_FACTOR = frozenset({"yarn", "linear", "dynamic"})
"""Kinds of rope scaling whose reach is factor x original positions."""


@dataclass(frozen=True)
class Tokenizer:
    """tokenizer.json, as far as ids go.

    Attributes:
        ids: token -> id.
        special: ids of its special tokens.
        clashes: ids that two tokens share, tokens with two ids.
    """

    ids: Mapping[str, int]
    special: frozenset[int] = frozenset()
    clashes: tuple[str, ...] = ()

    @property
    def largest(self) -> int:
        return max(self.ids.values(), default=-1)


@dataclass
class Companions:
    """The files that could be read; {} for those that are absent."""

    root: Path
    config: Mapping[str, Any]
    rows: int
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    broken: list[Problem] = field(default_factory=list)


def check_companions(root: Path, config: Mapping[str, Any], rows: int) -> list[Problem]:
    """Everything that does not fit, errors first.

    Args:
        config: parsed config.json.
        rows: of the embedding table.
    """
    found = _read(root, config, rows)
    problems = [
        *found.broken,
        *_tokenizer(found),
        *_special_tokens(found),
        *_config_ids(found),
        *_stopping(found),
        *(check_chat_template(root, found.tokenizer_config) if found.tokenizer or found.tokenizer_config else ()),
        *check_positions(config),
        *_tokenizer_length(found),
        *_remote_code(root, config, found.tokenizer_config),
        *_licence(root),
    ]
    return sorted(problems, key=lambda problem: problem.level != "error")


def _error(what: str, remedy: str, items: Iterable[str] = ()) -> Problem:
    return Problem(level="error", what=what, remedy=remedy, items=tuple(items)[:_MAX_NAMED])


def _note(what: str, remedy: str, items: Iterable[str] = ()) -> Problem:
    return Problem(level="note", what=what, remedy=remedy, items=tuple(items)[:_MAX_NAMED])


def _read(root: Path, config: Mapping[str, Any], rows: int) -> Companions:
    found = Companions(root, config, rows)

    def load(name: str) -> Mapping[str, Any]:
        if not exists(root / name):
            return {}
        try:
            return read_json(root / name)
        except InputError as error:
            found.broken.append(_error(error.message, error.hint))
            return {}

    found.tokenizer_config = load("tokenizer_config.json")
    found.generation = load("generation_config.json")
    raw = load("tokenizer.json")
    if raw:
        try:
            found.tokenizer = parse_tokenizer(raw)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            found.broken.append(_error(f"tokenizer.json holds no vocabulary of ids: {error}", "copy the file again"))
    return found


def parse_tokenizer(raw: Mapping[str, Any]) -> Tokenizer:
    """Ids of a parsed tokenizer.json: its model's vocabulary and the tokens added to it."""
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, Mapping):
        ids = {str(token): int(number) for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the ids
        ids = {str(row[0]): number for number, row in enumerate(vocabulary) if isinstance(row, list) and row}
    special, clashes = set(), []
    by_id = {number: token for token, number in ids.items()}
    for row in raw.get("added_tokens") or ():
        token, number = str(row.get("content")), int(row.get("id", -1))
        if ids.get(token, number) != number:
            clashes.append(f"{token!r} has the ids {ids[token]} and {number}")
        if by_id.get(number, token) != token:
            clashes.append(f"id {number} stands for {by_id[number]!r} and {token!r}")
        ids[token], by_id[number] = number, token
        if row.get("special"):
            special.add(number)
    return Tokenizer(ids, frozenset(special), tuple(clashes))


def _tokenizer(found: Companions) -> Iterator[Problem]:
    """Ids inside the embedding, each of one token."""
    if found.tokenizer is None:
        if any("tokenizer.json" in problem.what for problem in found.broken):
            return
        other = sorted(path.name for pattern in _OTHER_TOKENIZERS for path in found.root.glob(pattern))
        if other:
            yield _note(
                f"the tokenizer ({other[0]}) has no tokenizer.json: its ids were not checked",
                "compare its size with vocab_size by hand",
            )
        else:
            yield _note("there is no tokenizer", "copy the tokenizer's files here: engines and calibration need them")
        return
    outside = sorted((number, token) for token, number in found.tokenizer.ids.items() if number >= found.rows)
    if outside and found.rows:
        yield _error(
            f"the tokenizer has ids up to {found.tokenizer.largest}, the embedding has {found.rows} rows: "
            f"{len(outside)} tokens would be read beyond its end",
            "use the tokenizer that belongs to these weights",
            [f"{number}: {token!r}" for number, token in outside],
        )
    if found.tokenizer.clashes:
        yield _error("ids of the tokenizer are not unique", "copy tokenizer.json again", found.tokenizer.clashes)


def _special_tokens(found: Companions) -> Iterator[Problem]:
    """Special tokens of tokenizer_config.json are in the tokenizer, under the ids that the config names."""
    if found.tokenizer is None:
        return
    ids, text = found.tokenizer.ids, text_config(found.config)
    unknown = []
    for name in ("bos", "eos", "pad", "unk"):
        token = _content(found.tokenizer_config.get(f"{name}_token"))
        if token is None:
            continue
        if token not in ids:
            unknown.append(f"{name}_token {token!r}")
            continue
        named = _ids(text.get(f"{name}_token_id", found.config.get(f"{name}_token_id")))
        # the end of a text has a check of its own, with the generation config
        if name in ("bos", "pad") and named and ids[token] not in named:
            yield _note(
                f"{name}_token {token!r} has id {ids[token]} in the tokenizer, config.json says {_listed(named)}",
                f"correct {name}_token_id in config.json if prompts are built from it",
            )
    if unknown:
        yield _error(
            "tokenizer_config.json names special tokens that the tokenizer lacks",
            "copy both files from the same source",
            unknown,
        )
    declared = found.tokenizer_config.get("added_tokens_decoder")
    rows = declared.items() if isinstance(declared, Mapping) else ()
    moved = [
        f"{content!r}: {number} in tokenizer_config.json, {ids.get(content, 'absent')} in tokenizer.json"
        for number, row in rows
        if (content := _content(row)) is not None and str(ids.get(content)) != str(number)
    ]
    if moved:
        yield _error(
            "tokenizer_config.json and tokenizer.json disagree about added tokens",
            "copy both files from the same source",
            moved,
        )


def _config_ids(found: Companions) -> Iterator[Problem]:
    """Every id that a config names lies in the embedding."""
    named: dict[str, list[int]] = defaultdict(list)
    for origin, part in (
        ("config.json", found.config),
        ("config.json", text_config(found.config)),
        ("generation_config.json", found.generation),
    ):
        for key, value in part.items():
            if key.endswith(("_token_id", "_token_index")):
                named[f"{origin}: {key}"] += _ids(value)
    wrong = [
        f"{key} = {number}"
        for key, numbers in named.items()
        for number in dict.fromkeys(numbers)
        if found.rows and not 0 <= number < found.rows
    ]
    if wrong:
        yield _error(
            f"ids outside the embedding of {found.rows} rows", "copy the file that belongs to these weights", wrong
        )


def _stopping(found: Companions) -> Iterator[Problem]:
    """config.json, generation_config.json and the tokenizer agree about the end of a text."""
    config = set(_ids(text_config(found.config).get("eos_token_id", found.config.get("eos_token_id"))))
    generation = set(_ids(found.generation.get("eos_token_id")))
    token = _content(found.tokenizer_config.get("eos_token"))
    own = found.tokenizer.ids.get(token) if found.tokenizer is not None and token is not None else None
    if config and generation and not config & generation:
        yield _error(
            f"generation_config.json stops at {_listed(generation)}, config.json at {_listed(config)}",
            "engines differ in which one they read: make both name the same ids",
        )
    known = config | generation
    if own is not None and known and own not in known:
        yield _error(
            f"the tokenizer ends a text with {token!r} (id {own}), the configs stop at {_listed(known)}",
            "add the id to eos_token_id of generation_config.json, or texts will not stop",
        )
    if not known and own is None and (found.tokenizer is not None or found.generation):
        yield _error(
            "nothing says where a text ends: no eos_token_id in the configs and no eos_token in the tokenizer",
            "set eos_token_id in generation_config.json",
        )


def check_positions(config: Mapping[str, Any]) -> Iterator[Problem]:
    """max_position_embeddings against the reach of the rope scaling."""
    parameters, kind = rope_parameters(config), rope_type(config)
    positions = text_config(config).get("max_position_embeddings")
    if kind not in _SCALED_BY_FACTOR:
        return
    factor, original = rope_factor(config), parameters.get("original_max_position_embeddings")
    if factor is None:
        yield _error(
            f"rope scaling {kind} has no factor that is a number above 0", "copy the config of the model's source"
        )
        return
    if not isinstance(original, int) or not isinstance(positions, int) or not 0 < original <= MAX_SIZE:
        return
    reach = int(original * factor)
    if positions > reach:
        yield _error(
            f"max_position_embeddings is {positions:,}, but {kind} scaling x {factor:g} from {original:,} reaches "
            f"{reach:,}: positions beyond were never scaled for",
            f"correct the factor, or set max_position_embeddings to {reach}",
        )
    elif positions < reach:
        yield _note(
            f"{kind} scaling x {factor:g} from {original:,} reaches {reach:,}; max_position_embeddings: {positions:,}",
            "engines stop at the smaller; the scaling changes short texts too, so remove it if they are all you have",
        )


def _tokenizer_length(found: Companions) -> Iterator[Problem]:
    longest = found.tokenizer_config.get("model_max_length")
    positions = text_config(found.config).get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(positions, int) and positions < longest < 10**12:
        yield _note(
            f"the tokenizer lets {longest:,} tokens through, config.json has {positions:,} positions",
            "limit the length where you serve it (--max-model-len)",
        )


def _remote_code(root: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Python files that a loader would run, and whether they are there."""
    here: set[str] = set()
    lost: set[str] = set()
    elsewhere: set[str] = set()
    for origin in (config, text_config(config), tokenizer_config):
        names = origin.get("auto_map")
        for value in names.values() if isinstance(names, Mapping) else ():
            for reference in value if isinstance(value, list) else [value]:
                if not isinstance(reference, str):
                    continue
                repository, _, local = reference.rpartition("--")
                file = local.rpartition(".")[0].replace(".", "/") + ".py"
                present = is_inside(file) and is_file(root / file)
                (elsewhere if repository else here if present else lost).add(
                    f"{repository}: {file}" if repository else file
                )
    if lost:
        yield _error("auto_map names code that is not here", "copy the files from the model's source", sorted(lost))
    if elsewhere:
        yield _error(
            "auto_map names code of another repository, which an offline server cannot fetch",
            "copy the files here and shorten the entries to `module.Class`",
            sorted(elsewhere),
        )
    if here:
        yield _note(
            "loading this model elsewhere may run code that comes with it (auto_map)",
            "read it before you pass --trust-remote-code; quantkit itself runs none of it",
            sorted(here),
        )


def _licence(root: Path) -> Iterator[Problem]:
    if any(is_file(path) for pattern in _LICENCES for path in root.glob(pattern)):
        return
    try:
        card = read_whole(root / "README.md").decode(errors="replace")[:20000]
    except OSError:
        card = ""
    front = card.split("---")[1] if card.startswith("---") and card.count("---") > 1 else ""
    if not any(line.startswith(("license:", "license_name:")) for line in front.splitlines()):
        yield _note("no licence stands beside the weights", "look it up at the model's source before you pass them on")


def _content(value: Any) -> str | None:
    """Text of a token: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    """Ids of a key that holds one, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
