"""Damage to real files that keeps enough of their structure to get past the first check of a parser.

Every function takes the generator of its case, so a case is its seed and nothing else.
"""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import yaml

BAIT = "bait"
"""Folder beside every case's own that nothing may open: what a path that leads outside would find."""

NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30)
NUMBERS += (0.5, 1e308, -0.0, 1e-320, 3.0)
RAW_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-" + "9" * 400, "1" + "0" * 350 + ".0")
TEXTS = (
    *("", "\0", "..", "../bait", "../bait/model.safetensors", "../../bait/config.json", "/etc/passwd", "/dev/zero"),
    *(
        "a/../../bait/model.safetensors",
        "./config.json",
        "\\..\\x",
        "CON",
        "x" * 3000,
        "\u202e\u0000",
        "٣",
        "é\n\t[red]",
    ),
    *(
        "{{ 7 * 7 }}",
        "{%",
        "%s%n",
        "~",
        "*",
        "[",
        "(a+)+$",
        "re:(a|a)*b",
        "F32",
        "I8",
        "keep",
        "w8a8",
        "model.",
        ".weight",
    ),
    *("model.layers.99999999999999999999.mlp.down_proj.weight", "model.layers.-1.mlp.up_proj.weight"),
    *("model.layers." + "9" * 5000 + ".self_attn.q_proj.weight", "layers.0.expert.down.99999999999"),
)
SURROGATE = "\\ud800"


def damaged(rng: Random, raw: bytes) -> bytes:
    """Bytes with one to four changes that know nothing of their form."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        raw = rng.choice(_BYTE_CHANGES)(rng, raw)
    return raw


def _flip(rng: Random, raw: bytes) -> bytes:
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def _cut(rng: Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def _drop(rng: Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw) + 1)
    return raw[:start] + raw[start + rng.choice((1, 2, 8, 64)) :]


def _insert(rng: Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    piece = rng.choice(
        (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\x1b[2J", b"\xed\xa0\x80", b"\n- &a [*a]\n")
    )
    return raw[:at] + piece + raw[at:]


def _repeat(rng: Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw) + 1)
    piece = raw[start : start + rng.choice((1, 16, 256))]
    return raw[:start] + piece * rng.choice((2, 3, 100)) + raw[start:]


def _number(rng: Random, raw: bytes) -> bytes:
    found = list(re.finditer(rb"\d+", raw[: 1 << 20]))
    if not found:
        return raw
    at = rng.choice(found)
    return raw[: at.start()] + _number_text(rng).encode() + raw[at.end() :]


_BYTE_CHANGES: tuple[Callable[[Random, bytes], bytes], ...] = (_flip, _cut, _drop, _insert, _repeat, _number)


def _number_text(rng: Random) -> str:
    return rng.choice(RAW_NUMBERS) if rng.random() < 0.3 else json.dumps(rng.choice(NUMBERS))


# ---------------------------------------------------------------------------------------------------- JSON


class _Verbatim:
    """Text that JSON's own writer would not write: put where its mark stands once the rest is written."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        self._texts.append(text)
        return f"@@{len(self._texts) - 1}@@"

    def fill(self, written: str) -> str:
        for number, text in enumerate(self._texts):
            written = written.replace(f'"@@{number}@@"', text)
        return written


def json_bytes(rng: Random, raw: bytes) -> bytes:
    """A JSON document with one to five changes of its values, sometimes of its text as well."""
    if rng.random() < 0.15:
        return damaged(rng, raw)
    verbatim = _Verbatim()
    value = changed(rng, json.loads(raw), verbatim)
    text = verbatim.fill(json.dumps(value)).encode()
    return damaged(rng, text) if rng.random() < 0.1 else text


def json_value(rng: Random, value: Any) -> Any:
    """The same with a parsed document, changed to what JSON can hold."""
    return changed(rng, value, None)


def changed(rng: Random, value: Any, verbatim: _Verbatim | None) -> Any:
    """A copy with changes; `verbatim` None: without those that only text can hold."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_places(rng, value))
        if not places or rng.random() < 0.02:
            value = _other(rng, value, verbatim)
            continue
        _change(rng, *rng.choice(places), verbatim)
    return value


def _places(rng: Random, value: Any, limit: int = 400) -> Iterator[tuple[Any, Any]]:
    """(container, key) pairs, those near the top first; of large containers a few."""
    todo, count = [value], 0
    while todo and count < limit:
        here = todo.pop(0)
        keys = list(here) if isinstance(here, dict) else list(range(len(here))) if isinstance(here, list) else []
        for key in keys if len(keys) < 40 else rng.sample(keys, 40):
            count += 1
            yield here, key
            if isinstance(here[key], dict | list):
                todo.append(here[key])


def _change(rng: Random, here: Any, key: Any, verbatim: _Verbatim | None) -> None:
    kind = rng.random()
    if kind < 0.12:
        del here[key]
    elif kind < 0.2 and isinstance(here, dict):  # another name: one that stands there, or one of the odd ones
        other = rng.choice((*here, *TEXTS))
        here[other] = here[key]
    elif kind < 0.27:  # a value of somewhere else
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        here[key] = json.loads(json.dumps(here[rng.choice(keys)]))
    elif kind < 0.32 and isinstance(here, list):
        here.insert(rng.randrange(len(here) + 1), here[key])
    elif kind < 0.38 and verbatim is not None and isinstance(here, dict):  # the key a second time
        here[verbatim.mark(json.dumps(str(key)))] = _other(rng, here[key], verbatim)
    else:
        here[key] = _other(rng, here[key], verbatim)


def _other(rng: Random, old: Any, verbatim: _Verbatim | None) -> Any:
    """Another value, of the same type or not."""
    kind = rng.random()
    if kind < 0.3:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return rng.choice((old + 1, old - 1, old * 2, -old, float(old), str(old), *NUMBERS))
        if isinstance(old, str) and old:
            at = rng.randrange(len(old))
            return rng.choice((old[:at] + old[at + 1 :], old + old, old[:at], old.upper(), f"../{old}", f"/{old}"))
        if isinstance(old, list):
            return rng.choice((old[::-1], old * 2, old[:1], [old], [*old, None]))
    if verbatim is not None and kind < 0.5:
        nested = rng.choice((20, 990, 100_000))
        spelled = (
            _number_text(rng),
            f'"{SURROGATE}"',
            "[" * nested + "]" * nested,
            '{"a":' * nested + "1" + "}" * nested,
        )
        return verbatim.mark(rng.choice(spelled))
    return rng.choice((None, True, False, [], {}, [[]], {"": None}, "text", *TEXTS, *NUMBERS))


def same_types(rng: Random, value: Any) -> Any:
    """A parsed document with one to three values changed to others of their type: what a schema lets through."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(rng, value, 2000))
        here, key = rng.choice(places)
        old = here[key]
        others = (other[name] for other, name in rng.sample(places, min(60, len(places))))
        alike = [copy.deepcopy(other) for other in others if type(other) is type(old)][:8]
        if isinstance(old, bool):
            here[key] = not old
        elif isinstance(old, int):
            here[key] = rng.choice((old + 1, old - 1, 2 * old, 0, -1, *alike, *(n for n in NUMBERS if type(n) is int)))
        elif isinstance(old, float):
            here[key] = rng.choice((old * 2, -old, 0.0, 1e308, *alike))
        elif isinstance(old, str):
            here[key] = rng.choice((*alike, *alike, old[:-1], f"{old}x", *TEXTS))
        elif isinstance(old, list):
            here[key] = rng.choice((old[::-1], old + old[:1], old[1:], old[:-1], [], *alike[:3]))
        elif alike:
            here[key] = rng.choice(alike)
    return value


# ---------------------------------------------------------------------------------------------------- YAML

_YAML_PIECES = (
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e]\n"
    "g: &g [*f, *f, *f, *f, *f, *f, *f, *f, *f]\nname: *g\n",
    "&x a: *x\n",
    "self: &s {again: *s}\n",
    "? [1, 2]\n: 3\n",
    "!!python/object/apply:os.system ['touch ../bait/ran']\n",
    "!!python/name:os.system\n",
    "!!binary '!!!'\n",
    "when: 2001-99-99\n",
    "n: 0x" + "f" * 5000 + "\n",
    "n: 1:" + ":59" * 3000 + "\n",
    "n: .nan\nm: .inf\n",
    "<<: [{a: 1}, {a: 2}]\n",
    "<<: 3\n",
    "- " * 3000 + "x\n",
    "[" * 3000,
    "key: '\n",
    "\ttab: 1\n",
    "---\na: 1\n---\nb: 2\n",
    "%YAML 9.9\n---\na: 1\n",
    "'\\ud800': 1\n",
    '"\\ud800": "\\udfff"\n',
)


def yaml_bytes(rng: Random, raw: bytes) -> bytes:
    """A YAML document with changes of its values, of its text, or with a piece that YAML itself makes odd."""
    kind = rng.random()
    if kind < 0.2:
        return damaged(rng, raw)
    if kind < 0.4:
        piece = rng.choice(_YAML_PIECES).encode()
        return rng.choice((piece, raw + b"\n" + piece, piece + raw))
    value = changed(rng, json.loads(json.dumps(yaml.safe_load(raw))), None)
    return yaml.safe_dump(value, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")


# --------------------------------------------------------------------------------------------- safetensors


def safetensors_bytes(rng: Random, raw: bytes) -> bytes:
    """A safetensors file: its header's values or text, the length that it claims, or its payload."""
    length = struct.unpack("<Q", raw[:8])[0]
    header, payload = raw[8 : 8 + length], raw[8 + length :]
    kind = rng.random()
    if kind < 0.1:
        return damaged(rng, raw)
    if kind < 0.2:
        lie = rng.choice((0, 1, 7, length - 1, length + 1, len(raw), 10**8, 10**8 + 1, 2**63 - 1, 2**64 - 1))
        return struct.pack("<Q", lie) + raw[8:]
    if kind < 0.3:
        return raw[: 8 + length] + rng.choice((payload[:-1], payload + b"\0", b"", damaged(rng, payload)))
    if kind < 0.5:
        changed_header = _consistent(rng, header)
    else:
        changed_header = json_bytes(rng, header)
    return struct.pack("<Q", len(changed_header)) + changed_header + payload


def _consistent(rng: Random, header: bytes) -> bytes:
    """A change that the header survives: another name, another shape or dtype of as many bytes."""
    table = json.loads(header)
    names = [name for name in table if name != "__metadata__"]
    name = rng.choice(names)
    row = table[name]
    kind = rng.randrange(4)
    if kind == 0:
        table[rng.choice((*TEXTS, *(name.replace(".0.", f".{number}.") for number in (7, 10**9))))] = table.pop(name)
    elif kind == 1:
        same = {"BF16": ("F16", "I16"), "F32": ("I32", "U32"), "I8": ("U8", "F8_E4M3", "BOOL", "F8_E8M0")}
        row["dtype"] = rng.choice(same.get(row["dtype"], ("BF16",)))
    elif kind == 2:
        shape = row["shape"]
        row["shape"] = rng.choice((shape[::-1], [1, *shape], [*shape, 1], [_product(shape)], [1] * 40 + shape))
    else:  # no bytes at all, but any number of rows
        row["shape"] = [rng.choice((2**40, 2**62, 1)), 0]
        row["data_offsets"] = [row["data_offsets"][0]] * 2
    return json.dumps(table).encode()


def _product(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


# ------------------------------------------------------------------------------------------------- others

_JINJA = (
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**8) * 10**2 }}",
    "{{ 10 ** (10 ** 8) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(messages) }}",
    "{% set ns = namespace(x=messages) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ messages[0]['content'].format(messages.__class__) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'x'.ljust(9999999999) }}",
    "{{ raise_exception('no') }}",
    "{% include '../bait/config.json' %}",
    "{{ lipsum(n=100000) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ range(10) | batch(0) | list }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{{ messages | tojson(indent=10000000000) }}",
    "{% generation %}",
    "{{" * 2000,
    "{% if " + "(" * 3000 + "1",
    "{{ " + "1+" * 20000 + "1 }}",
)


def template_text(rng: Random, raw: str) -> str:
    """A chat template: damaged, or a program that never ends, fills the memory or reaches for what it must not."""
    if rng.random() < 0.5:
        return damaged(rng, raw.encode()).decode("utf-8", "replace")
    piece = rng.choice(_JINJA)
    return rng.choice((piece, raw + piece, piece + raw))


def lines_bytes(rng: Random, raw: bytes) -> bytes:
    """A file of JSON lines: one line changed, dropped, repeated, or the text damaged."""
    if rng.random() < 0.2:
        return damaged(rng, raw)
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.7:
        lines[at] = json_bytes(rng, lines[at])
    elif kind < 0.85:
        lines.insert(at, rng.choice((b"", b"null", b"[]", b"{}", b"1", b'"x"', b"{", b"\xff", b'{"text": null}')))
    else:
        lines = [lines[at]] * rng.choice((1, 50))
    return rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines)
