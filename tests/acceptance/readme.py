"""Reading the two READMEs: marked blocks, sections, tables.

A block of code that holds commands has a mark in a comment above it, which says how the tests treat it:

    run       run in order, on the model of the tests     quick     run in order, on SmolLM2
    endpoint  run against a server of the tests           output    what the block of commands before it prints
    make      targets exist, variables are used there     recipe    a recipe that is valid
    cards, cluster   need more than a test has: the command line is parsed
    engine    other programs: shown
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.acceptance.conftest import ROOT

NAMES = {"en": "README.md", "zh": "README.zh.md"}
TEXTS = {language: (ROOT / name).read_text(encoding="utf-8") for language, name in NAMES.items()}
RUN, PARSED = ("run", "quick", "endpoint"), ("cards", "cluster")
MARKS = {*RUN, *PARSED, "output", "make", "recipe", "engine"}
_BLOCK = re.compile(r"^(?:<!-- (\w+) -->\n)?```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; mark "" where none stands above it."""

    mark: str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


def blocks(text: str, *marks: str) -> list[Block]:
    found = [Block(*match) for match in _BLOCK.findall(text)]
    return [block for block in found if not marks or block.mark in marks]


def sections(text: str) -> list[str]:
    """Bodies under the headings of the second level, without code."""
    return re.split(r"^## .*$", _BLOCK.sub("", text), flags=re.MULTILINE)[1:]


def between(text: str, mark: str) -> str:
    return text.split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0].strip()


def table_after(text: str, mark: str) -> list[list[str]]:
    """Cells of the rows of the table under a mark, without its head."""
    body = text.split(f"<!-- {mark} -->\n")[1].split("\n\n")[0]
    return [cells(line) for line in body.strip().splitlines()[2:]]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def code(text: str) -> list[str]:
    """What stands in backticks, outside blocks."""
    return re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))
