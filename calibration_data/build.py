"""Rebuild the extracted part of the calibration texts from unpacked packages.

Every line whose ``source`` is ``quantkit`` was written for this project and is kept as it is.
All other lines are made anew, in a fixed order, from the folders of ``--packages``: one folder
for each unpacked package, named after the package (SOURCES.md lists them with their versions).
A document that shares a run of 64 characters, whitespace removed, with a text of ``--held-out``
is left out whole, so that no text used to measure quality is also used to calibrate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

OWN_SOURCE = "quantkit"
WINDOW = 64
MIN_CHARS = 300
MAX_CHARS = 20_000
PROSE_SIZES = (1200, 2600, 700, 4200, 1800, 6000, 3000, 900, 2200, 12000, 3600)
CODE_SIZES = (1800, 4000, 900, 5200, 2400, 6000, 3600, 2800, 11000, 1400)
CHINESE_SIZES = (700, 1400, 900, 2400, 1800, 600, 3600, 1100, 2000, 10500, 1500)

EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
URL_HOST = re.compile(r"\b(https?|ftp|git|ssh|wss?)://[^/\s\"'<>)\]，。；）]+")
HOST = re.compile(r"\b(?:[\w-]+\.)+(?:org|com)\b(?!\()")
NAVIGATION = re.compile(
    r"(?:Download the ebook|Prev|Next|Home|Up|上一级|起始页|Debian 管理员手册|The Debian Administrator's Handbook)$"
    r"|(?:Prev|Next)(?:[A-Z]\.|\d|[A-Z][a-z])|上一页|下一页"
)
CJK = re.compile(r"[\u4e00-\u9fff]")

Messages = list[dict[str, str]]
Row = dict[str, Any]
Reader = Callable[[Path], list[str]]
Documents = Callable[[Path], Iterable[list[str]]]


@dataclass(frozen=True)
class Part:
    """How many samples of one kind come from one source, and how its documents are read."""

    kind: str
    source: str
    count: int
    sizes: tuple[int, ...]
    documents: Documents
    joiner: str = "\n\n"
    keep_head: bool = False


def squeeze(text: str) -> str:
    """Return the text without any whitespace."""
    return "".join(text.split())


class HeldOut:
    """The held-out texts: finds runs that a document shares with them."""

    def __init__(self, folder: Path) -> None:
        self.windows: set[str] = set()
        joined: list[str] = []
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                text = squeeze(json.loads(line)["text"])
                joined.append(text)
                self.windows.update(text[i : i + WINDOW] for i in range(len(text) - WINDOW + 1))
        if not self.windows:
            raise SystemExit(f"no held-out texts in {folder}")
        self.blob = "\n".join(joined)

    def overlaps(self, text: str) -> bool:
        """Whether the text shares a run of WINDOW characters with a held-out text."""
        bare = squeeze(text)
        return any(bare[i : i + WINDOW] in self.windows for i in range(len(bare) - WINDOW + 1))

    def holds(self, text: str) -> bool:
        """Whether the whole text stands inside a held-out text."""
        return squeeze(text) in self.blob


def clean(text: str) -> str:
    """Replace addresses and host names by example ones and tidy the whitespace."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\f", "\n").replace("\ufeff", "")
    text = EMAIL.sub("name@example.org", text)
    text = URL_HOST.sub(r"\1://example.org", text)
    text = HOST.sub("example.org", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n")


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Choose count items at even distances."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def pack(paragraphs: Iterable[str], sizes: Iterator[int], joiner: str) -> Iterator[str]:
    """Join neighbouring paragraphs into texts of about the given sizes."""
    held: list[str] = []
    length, goal = 0, next(sizes)
    for paragraph in paragraphs:
        if length >= max(MIN_CHARS, goal // 2) and length + len(paragraph) > goal * 1.4:
            yield joiner.join(held).strip("\n")
            held, length, goal = [], 0, next(sizes)
        held.append(paragraph)
        length += len(paragraph)
        if length >= max(MIN_CHARS, goal):
            yield joiner.join(held).strip("\n")
            held, length, goal = [], 0, next(sizes)
    if length >= MIN_CHARS:
        yield joiner.join(held).strip("\n")


# Readers of single file formats: each returns a document as a list of paragraphs.


class _Paragraphs(HTMLParser):
    blocks = frozenset(
        {"p", "div", "li", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "h5", "h6"}
        | {"td", "th", "tr", "table", "ul", "ol", "dl", "br", "hr"}
    )
    hidden = frozenset({"script", "style", "head"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.pre = 0
        self.skip = 0
        self.nav = 0

    def flush(self) -> None:
        text = "".join(self.parts)
        text = text.strip("\n") if self.pre else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(text)
        self.parts = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = dict(attrs).get("class") or ""
        if tag == "div" and (self.nav or "nav" in classes):
            self.nav += 1
        if tag in self.hidden:
            self.skip += 1
        if tag in self.blocks and not (tag == "br" and self.pre):
            self.flush()
        if tag == "pre":
            self.pre += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in self.blocks and tag != "br":
            self.flush()
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in self.hidden:
            self.skip = max(0, self.skip - 1)
        if tag == "div" and self.nav:
            self.nav -= 1

    def handle_data(self, data: str) -> None:
        if not self.skip and not self.nav:
            self.parts.append(data)


def read(path: Path) -> str:
    """Return the cleaned text of a file, gzipped or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return clean(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return clean(raw.decode("latin-1"))


def html_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of an HTML page without its navigation."""
    parser = _Paragraphs()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    parser.close()
    parser.flush()
    kept = [clean(p) for p in parser.paragraphs]
    return [p for p in kept if len(p) > 1 and not NAVIGATION.match(p)]


def mallard_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a Mallard help page without its credits."""
    root = ElementTree.parse(path).getroot()
    found: list[str] = []

    def walk(node: ElementTree.Element) -> None:
        name = str(node.tag).rsplit("}", 1)[-1]
        if name in {"info", "media", "links", "comment"}:
            return
        if name in {"p", "title", "code", "screen", "td"} and not list(node.iter("{*}item")):
            text = " ".join("".join(node.itertext()).split())
            if text:
                found.append(clean(text))
            return
        for child in node:
            walk(child)

    walk(root)
    return found


def text_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a plain text."""
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", read(path)) if p.strip()]
    return [p for p in paragraphs if not p.startswith("Produced by ")]


def code_blocks(path: Path) -> list[str]:
    """Return source code cut before lines that follow a blank line and are not indented, blank lines kept."""
    return re.split(r"(?<=\n\n)(?=[^\s}\])])", read(path) + "\n\n\n")


# Readers of packages: each yields the documents of one package folder.


def files(pattern: str, reader: Reader, skip: str = "") -> Documents:
    """Make a reader of every file of a package that matches the pattern."""

    def documents(folder: Path) -> Iterator[list[str]]:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not (skip and re.search(skip, path.relative_to(folder).as_posix())):
                yield reader(path)

    return documents


def chinese_only(documents: Documents) -> Documents:
    """Keep the paragraphs that are mostly Chinese, and the documents that keep enough of them."""

    def filtered(folder: Path) -> Iterator[list[str]]:
        for paragraphs in documents(folder):
            kept = [p for p in paragraphs if len(CJK.findall(p)) > 0.3 * len(squeeze(p))]
            if sum(map(len, kept)) >= MIN_CHARS:
                yield kept

    return filtered


def grouped(documents: Documents, size: int) -> Documents:
    """Join short documents until each has at least size characters."""

    def joined(folder: Path) -> Iterator[list[str]]:
        held: list[str] = []
        for paragraphs in documents(folder):
            held.extend(paragraphs)
            if sum(map(len, held)) >= size:
                yield held
                held = []

    return joined


def champ(folder: Path) -> Iterator[list[str]]:
    """Yield every CHAMP problem with its solution."""
    [path] = folder.glob("**/dataset_files/v0.json")
    problems: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["problems"]
    for problem in problems.values():
        lines = ["Problem: " + problem["_text"], "Solution:"]
        lines += [step["_text"] for step in problem["solution"]["steps"]]
        yield ["\n".join(lines)]


def human_eval(folder: Path) -> Iterator[list[str]]:
    """Yield every HumanEval task completed with its canonical solution."""
    [path] = folder.glob("**/HumanEval.jsonl.gz")
    for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines():
        task = json.loads(line)
        yield [clean(task["prompt"] + task["canonical_solution"]) + "\n\n\n"]


def poetry_books(folder: Path) -> Iterator[list[str]]:
    """Yield the chapters of the prose books of chinese-poetry."""

    def chapters(node: Any, title: str) -> Iterator[list[str]]:
        if isinstance(node, list):
            for item in node:
                yield from chapters(item, title)
            return
        name = str(node.get("chapter") or node.get("title") or title)
        if "paragraphs" in node:
            yield [name, *map(str, node["paragraphs"])]
        elif isinstance(node.get("content"), list):
            yield from chapters(node["content"], name)

    [root] = folder.glob("**/dist")
    books = (
        "lunyu/lunyu",
        "mengxue/guwenguanzhi",
        "mengxue/youxueqionglin",
        "sishuwujing/daxue",
        "sishuwujing/mengzi",
        "sishuwujing/zhongyong",
    )
    for book in books:
        yield from chapters(json.loads((root / f"{book}.json").read_text(encoding="utf-8")), book)
    notes = json.loads((root / "youmengying/youmengying.json").read_text(encoding="utf-8"))
    for start in range(0, len(notes), 24):
        yield [line for note in notes[start : start + 24] for line in (note["content"], *note["comment"])]


def chatterbot(folder: Path, language: str, topics: Sequence[tuple[str, int]], held: HeldOut) -> Iterator[Messages]:
    """Yield exchanges of the ChatterBot corpus, several short ones of a topic joined."""
    for topic, size in topics:
        [path] = folder.glob(f"**/data/{language}/{topic}.yml")
        conversations = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        messages: Messages = []
        asked: set[str] = set()
        for conversation in conversations:
            turns = [clean(str(turn)).strip() for turn in conversation]
            turns = turns[: len(turns) // 2 * 2]
            pairs = [f"User: {q} Assistant: {a}" for q, a in zip(turns[::2], turns[1::2], strict=True)]
            if not all(turns) or turns[0] in asked or any(held.holds(p) for p in pairs):
                continue
            if any(held.overlaps(pair) for pair in pairs):
                continue
            asked.add(turns[0])
            roles = cycle(("user", "assistant"))
            messages.extend({"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False))
            if len(messages) >= size:
                yield messages
                messages = []


STDLIB_SKIP = (
    r"(test|idlelib|lib2to3|site-packages|__pycache__|_sysconfigdata|config-3|distutils"
    r"|ensurepip|pydoc_data|encodings|/this\.py)"
)
LICENCE_PAGES = r"(legalnotice|copyright|index|foreword|preface|acknowledg|about|bookindex|release|contributors)"

PARTS: tuple[Part, ...] = (
    Part("code", "cpython-stdlib", 46, CODE_SIZES, files("**/*.py", code_blocks, STDLIB_SKIP), "", True),
    Part("code", "human-eval", 12, (2500, 4000, 1600, 6000), grouped(human_eval, 6500), "", True),
    Part("code", "more-itertools", 3, CODE_SIZES, files("more_itertools/*.py", code_blocks), ""),
    Part("code", "toolz", 4, CODE_SIZES, files("toolz/*.py", code_blocks), "", True),
    Part("code", "attrs", 4, CODE_SIZES, files("attr/*.py", code_blocks, "_version"), "", True),
    Part("code", "sortedcontainers", 3, CODE_SIZES, files("sortedcontainers/*.py", code_blocks), ""),
    Part("code", "pybind11", 8, CODE_SIZES, files("pybind11/include/**/*.h", code_blocks), "", True),
    Part(
        "code",
        "lodash",
        8,
        (900, 1400, 2400),
        grouped(files("package/[a-z]*.js", code_blocks, r"(lodash|core|fp)"), 2500),
        "",
    ),
    Part("code", "express", 4, CODE_SIZES, files("package/lib/*.js", code_blocks), ""),
    Part("code", "zod", 7, CODE_SIZES, files("package/src/v4/c*/*.ts", code_blocks), "", True),
    Part("code", "redux", 2, CODE_SIZES, files("package/src/*.ts", code_blocks), "", True),
    Part("code", "golang-1.19-src", 9, CODE_SIZES, files("**/src/container/**/*.go", code_blocks), "", True),
    Part("math", "champ-dataset", 64, (4000,), grouped(champ, 1000)),
    Part("english_prose", "debian-handbook", 18, PROSE_SIZES, files("**/en-US/*.html", html_paragraphs, LICENCE_PAGES)),
    Part(
        "english_prose", "postgresql-doc-15", 18, PROSE_SIZES, files("**/html/*.html", html_paragraphs, LICENCE_PAGES)
    ),
    Part(
        "english_prose",
        "python3.11-doc",
        14,
        PROSE_SIZES,
        files("**/[fht]*/[a-z]*.rst.txt", text_paragraphs, LICENCE_PAGES),
    ),
    Part(
        "english_prose",
        "gnome-user-docs",
        12,
        PROSE_SIZES,
        grouped(files("**/C/gnome-help/*.page", mallard_paragraphs), 2500),
    ),
    Part("english_prose", "debmake-doc", 4, PROSE_SIZES, files("**/html/ch*.en.html", html_paragraphs)),
    Part("english_prose", "jargon-text", 8, PROSE_SIZES, files("**/jargon.txt.gz", text_paragraphs)),
    Part(
        "english_prose",
        "golang-github-golang-snappy-dev",
        6,
        PROSE_SIZES,
        files("**/Mark.Twain-Tom.Sawyer.txt", text_paragraphs),
    ),
    Part(
        "english_prose",
        "golang-1.19-src",
        20,
        PROSE_SIZES,
        files("**/src/testdata/Isaac.Newton-Opticks.txt", text_paragraphs),
    ),
    Part("english_prose", "miscfiles", 4, PROSE_SIZES, files("**/state/us-*.gz", text_paragraphs)),
    Part(
        "chinese_prose",
        "debian-handbook",
        30,
        CHINESE_SIZES,
        chinese_only(files("**/zh-CN/*.html", html_paragraphs, LICENCE_PAGES)),
    ),
    Part(
        "chinese_prose",
        "debmake-doc",
        12,
        CHINESE_SIZES,
        chinese_only(files("**/html/ch*.zh-cn.html", html_paragraphs)),
    ),
    Part(
        "chinese_prose",
        "gnome-user-docs",
        10,
        CHINESE_SIZES,
        grouped(chinese_only(files("**/zh_CN/gnome-help/*.page", mallard_paragraphs)), 1200),
    ),
    Part("chinese_prose", "chinese-poetry", 45, CHINESE_SIZES, grouped(poetry_books, 11000), "\n"),
)

ENGLISH_TOPICS = (
    ("coding", 8), ("tech_support", 14), ("conversations", 10), ("ai", 12), ("science", 10), ("history", 8),
    ("food", 8), ("literature", 10), ("movies", 8), ("money", 10), ("trivia", 12), ("sports", 10), ("computers", 8),
)  # fmt: skip
CHINESE_TOPICS = (
    ("conversations", 8), ("trivia", 8), ("science", 8), ("history", 6), ("literature", 8), ("money", 8), ("sports", 8),
)  # fmt: skip


def texts_of(part: Part, packages: Path, held: HeldOut) -> list[str]:
    """Return the chosen texts of a part."""
    sizes = cycle(part.sizes)
    candidates: list[str] = []
    for paragraphs in part.documents(packages / part.source):
        if part.kind == "math":
            paragraphs = [p for p in paragraphs if not held.overlaps(p) and not held.holds(p)]
        whole = part.joiner.join(paragraphs)
        if len(whole) < MIN_CHARS:
            continue
        if held.overlaps(whole):
            if part.source not in {"jargon-text"}:
                continue
            paragraphs = [p for p in paragraphs if not held.overlaps(p)]
        chunks = [c for c in pack(paragraphs, sizes, part.joiner) if len(c) <= MAX_CHARS and not held.overlaps(c)]
        candidates.extend(chunks[:1] if part.keep_head else chunks)
    chosen: list[str] = spread(list(dict.fromkeys(candidates)), part.count)
    if len(chosen) < part.count:
        sys.stderr.write(f"{part.kind} {part.source}: only {len(chosen)} of {part.count}\n")
    return chosen


def build(packages: Path, held: HeldOut) -> dict[str, list[Row]]:
    """Return the extracted rows by kind."""
    rows: dict[str, list[Row]] = {}
    for part in PARTS:
        for text in texts_of(part, packages, held):
            rows.setdefault(part.kind, []).append({"text": text, "kind": part.kind, "source": part.source})
    plans = (
        ("english_dialogue", "english", ENGLISH_TOPICS, {"coding": 20, "tech_support": 10}),
        (
            "chinese_dialogue",
            "chinese",
            CHINESE_TOPICS,
            dict.fromkeys(("science", "history", "literature", "sports"), 1),
        ),
    )
    corpus = packages / "chatterbot-corpus"
    for kind, language, topics, limits in plans:
        for topic in topics:
            talks = list(chatterbot(corpus, language, [topic], held))
            for messages in spread(talks, limits.get(topic[0], 3)):
                rows.setdefault(kind, []).append({"messages": messages, "kind": kind, "source": "chatterbot-corpus"})
    return rows


def write(folder: Path, kind: str, extracted: Sequence[Row]) -> tuple[int, int]:
    """Write one file: the kept own rows first, then the extracted ones."""
    path = folder / f"{kind}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    own = [row for row in map(json.loads, lines) if row["source"] == OWN_SOURCE]
    out = [json.dumps(row, ensure_ascii=False) for row in (*own, *extracted)]
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
    return len(own), len(extracted)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder with one unpacked package a folder")
    parser.add_argument("--held-out", type=Path, required=True, help="folder with the held-out texts (*.jsonl)")
    parser.add_argument("--out", type=Path, default=here, help="folder of the calibration texts")
    args = parser.parse_args(argv)
    for kind, rows in sorted(build(args.packages, HeldOut(args.held_out)).items()):
        own, extracted = write(args.out, kind, rows)
        sys.stdout.write(f"{kind}: {own} own, {extracted} extracted\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
