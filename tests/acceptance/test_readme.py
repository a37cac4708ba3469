"""Both READMEs: their commands run as they stand there, what they show is what is printed, and they say the same."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main as toolkit
from quantkit.recipe import parse_recipe, shipped_recipes
from quantkit.spec.baseline import LOGPROBS_NAME, read_baseline
from quantkit_instruments.cli import main as runtime
from tests.acceptance import family_table
from tests.acceptance.conftest import MODELS, PIPE, ROOT, cli, smoke_load, succeeded
from tests.acceptance.readme import MARKS, PARSED, TEXTS, Block, between, blocks, cells, code
from tests.endpoint.stub import Stub, running_stub

ENGLISH = TEXTS["en"]
LANGUAGES = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
ENDPOINT = "http://localhost:8000/v1"
PROGRAMS = ("quantkit", "quantkit-runtime", "python", "torchrun", "make", "vllm", "sbatch", "pip", ".")


def run(line: str) -> Result | None:
    program, *arguments = shlex.split(line)
    if program in (".", "make"):  # the environment of the tests is active, what make fetches is there
        return None
    if program == "python":
        assert arguments.pop(0) == "runtime/smoke_load.py"
        return smoke_load(*arguments)
    if program == "quantkit-runtime":
        return CliRunner(env=PIPE).invoke(runtime, arguments)
    assert program == "quantkit", f"README marks a command that the test cannot run: {line}"
    return cli(*arguments)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()]


def run_blocks(found: list[Block]) -> None:
    """Run all commands in order; an output block after some holds lines of what they printed, in order."""
    printed: list[list[str]] = []
    for block in found:
        if block.mark == "output":
            shown, rest = [line for line in words(block.text) if line != ["..."]], iter(printed)
            missing = [line for line in shown if line not in rest]
            assert not missing, f"the README shows what is not printed, or elsewhere: {missing}"
            continue
        printed = []
        for line in block.lines:
            if result := run(line):
                printed += words(succeeded(result).output)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the commands are typed."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_outputs(*marks: str) -> list[Block]:
    """The English blocks of these marks, each with the output blocks that follow it."""
    found, wanted = [], False
    for block in blocks(ENGLISH):
        wanted = block.mark in marks if block.mark != "output" else wanted
        found += [block] if wanted else []
    return found


def test_commands_run(here: Path) -> None:
    found = with_outputs("run", "endpoint")
    used = {tuple(shlex.split(line)[:2]) for block in found if block.mark != "output" for line in block.lines}
    assert {name for program, name in used if program == "quantkit"} >= set(
        toolkit.list_commands(_context(toolkit))
    ) - {"merge-manifest"}
    run_blocks([block for block in found if block.mark != "endpoint"])
    with running_stub() as stub:
        answer_as(stub, here / "out/baseline")
        for block in found:
            for line in block.lines if block.mark == "endpoint" else ():
                assert ENDPOINT in line
                succeeded(cli(*shlex.split(line.replace(ENDPOINT, stub.url))[1:]))


def answer_as(stub: Stub, folder: Path) -> None:
    """A server whose model is the source itself: it answers what its baseline holds."""
    from safetensors.numpy import load_file

    baseline, known = read_baseline(folder), load_file(folder / LOGPROBS_NAME)["next_logprob"]
    rows = baseline.rows()
    stub.context = 2048
    for text in baseline.sequences:
        stub.continuations[text.ids[: text.prompt_tokens]] = list(text.ids[text.prompt_tokens :])
        if text.use == "text":
            stub.logprobs[text.ids] = known[slice(*rows[text.name])].tolist()


def test_quick_start_runs(here: Path) -> None:
    assert (MODELS / "smollm2-135m" / "config.json").is_file(), "run `make smollm2` first"
    run_blocks(with_outputs("quick"))


# ------------------------------------------------------------------------------------------ what is not run is parsed


@LANGUAGES
def test_every_command_has_a_mark(text: str) -> None:
    for block in blocks(text):
        assert not block.mark or block.mark in MARKS, block.mark
        first = block.lines[0].split()[0]
        assert block.mark or first not in PROGRAMS, f"commands without a mark: {block.text}"


def commands(line: str) -> Iterator[list[str]]:
    """The command lines of ours in a line of the shell."""
    found = shlex.split(line)
    if found[0] == "sbatch":
        yield from commands(found[found.index("--wrap") + 1])
    elif found[0] == "torchrun":
        yield _of_torchrun(found)
    else:
        yield found


def _of_torchrun(found: list[str]) -> list[str]:
    assert found[1] == "--nproc-per-node"
    assert found[2].isdigit()
    if found[3] == "-m":
        module, *rest = found[4:]
        return [{"quantkit": "quantkit", "quantkit_instruments.cli": "quantkit-runtime"}[module], *rest]
    assert (ROOT / found[3]).is_file()
    return ["quantkit-runtime", "smoke-load", *found[4:]]


def _context(group: click.Group) -> click.Context:
    return click.Context(group)


def test_other_commands_are_parsed() -> None:
    lines = [line for block in blocks(ENGLISH, *PARSED) for line in block.lines]
    assert len(lines) > 5
    for line in lines:
        for program, name, *arguments in commands(line):
            group = {"quantkit": toolkit, "quantkit-runtime": runtime}[program]
            command = group.get_command(_context(group), name)
            assert command, line
            command.make_context(name, arguments)  # raises on an unknown option, a missing or a wrong value


def test_make_targets_and_extras_exist() -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for line in (line for block in blocks(ENGLISH) for line in block.lines if line.startswith("make ")):
        _, target, *variables = line.partition("#")[0].split()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        assert all(re.search(rf"^{name.split('=')[0]}\s*\?=", makefile, re.MULTILINE) for name in variables), line
    for name in re.findall(r"make ([a-z][\w-]*)`", ENGLISH):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
    for extra in re.findall(r"quantkit\[(\w+)\]", ENGLISH):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


# ------------------------------------------------------------------------------------------ both say the same


@LANGUAGES
def test_code_is_the_same(text: str) -> None:
    """Commands, outputs and recipes are equal; comments behind commands and the tree are translated."""
    english, other = (
        [(block.mark, [line.partition("   # ")[0].rstrip() for line in block.lines]) for block in blocks(each)]
        for each in (ENGLISH, text)
    )
    assert [mark for mark, _ in english] == [mark for mark, _ in other]
    for (mark, ours), (_, theirs) in zip(english, other, strict=True):
        names = [re.split(r"\s{2,}", line.strip())[0] for line in ours]
        assert ours == theirs if mark else names == [re.split(r"\s{2,}", line.strip())[0] for line in theirs]


@LANGUAGES
def test_the_same_things_are_named(text: str) -> None:
    """Options, files, messages, recipes: whatever stands in backticks."""
    english, other = (set(code(each)) for each in (ENGLISH, text))
    assert english == other


@LANGUAGES
def test_headings_and_tables_have_their_counterparts(text: str) -> None:
    def shape(text: str) -> list[int]:
        lines = [line for line in text.splitlines() if line.startswith(("|", "## "))]
        return [len(cells(line)) if line.startswith("|") else 0 for line in lines]

    assert shape(text) == shape(ENGLISH)
    assert len(text.splitlines()) <= 460


# ------------------------------------------------------------------------------------------ families, recipes, tree


@pytest.mark.parametrize("language", TEXTS)
def test_table_of_families_is_that_of_records_and_tests(language: str) -> None:
    wanted = family_table.table(language)
    assert between(TEXTS[language], "families") == wanted, f"write this into the README:\n{wanted}"


def test_each_column_of_families_is_a_test_of_every_family() -> None:
    for file, name in family_table.EVIDENCE.items():
        assert f"`{file}`" in ENGLISH
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
        decorators = " ".join(ast.unparse(node) for node in found.decorator_list)
        assert "FAMILY_NAMES" in decorators or "MODELS" in decorators, f"{file}::{name} does not run on every family"


@LANGUAGES
def test_example_recipes_are_valid(text: str) -> None:
    (own,) = (parse_recipe(block.text, "README.md") for block in blocks(text, "recipe"))
    assert own.rules[1].match == "attn.o"
    assert own.auto_keep is not None


@LANGUAGES
def test_shipped_recipes_are_named(text: str) -> None:
    assert all(f"`{name}`" in text for name in shipped_recipes())


@LANGUAGES
def test_paths_exist(text: str) -> None:
    (tree,) = (block.text for block in blocks(text, "") if block.text.startswith("quantkit/"))
    folder = ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        folder = ROOT if not line.startswith(" ") else folder
        for name in names:
            assert (folder / name).exists(), f"{name} of the README's tree is not there"
        if not line.startswith(" "):
            folder = ROOT / names[0]
    files = {name for name in code(text) if re.fullmatch(r"[\w./-]+/[\w.-]*\.?\w*", name) and " " not in name}
    known = {name for name in files if name.split("/")[0] in {"tests", "quantkit", "runtime", "recipes", "tools"}}
    assert known
    assert [name for name in known if not (ROOT / name).exists()] == []
