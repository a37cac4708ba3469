"""A few cases of every parser, with the seeds that once found something; `make fuzz` runs them for an hour.

A finding prints the command that reproduces it.
"""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from quantkit.errors import InputError
from tests.fuzz import corpus as files
from tests.fuzz import mutate, runs
from tests.fuzz.guard import GIB, Finding, Limits, run_case
from tests.fuzz.mutate import BAIT

CASES = 6
FOUND: dict[str, tuple[int, ...]] = {
    "index": (7,),
    "checkpoint": (27, 1002000212, 9000432, 9201556, 1000031831),
    "config": (722393, 722892, 1000018, 1001002626, 1002000089, 1007000824, 9200797, 1009400364),
    "config_of_a_run": (52041, 52243),
    "manifest": (982, 723672, 1002104, 36205),
    "texts": (721670, 723203, 1007000519, 2007001022, 31001458),
    "baseline": (4, 9, 10, 16, 33, 44, 47),
    "comparison": (30706,),
    "work": (18,),
    "tokenizer": (21, 1032, 1001912, 1001000912, 32196),
    "endpoint": (2, 5, 6),
}
"""Seeds of cases that ended with a traceback when they were run first."""

PARSERS = runs.parsers()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.make(tmp_path_factory.mktemp("fuzz") / "corpus")


@pytest.fixture(scope="module")
def workspace(corpus: Path) -> Path:
    return files.workspace(corpus.parent / "cases", corpus)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Libraries warn about damaged files."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_is_read_or_refused(name: str, workspace: Path, corpus: Path) -> None:
    for seed in (*range(CASES), *FOUND.get(name, ())):
        found = runs.case(name, PARSERS[name], seed, workspace, corpus)
        assert found is None, f"python -m tests.fuzz {name} --seed {seed}\n{found.kind}: {found.detail}"


# ------------------------------------------------------------------------------------------- the fuzzer itself


def watched(workspace: Path, case: object, **limits: float) -> Finding | None:
    folder = workspace / "own"
    folder.mkdir(exist_ok=True)
    return run_case("x", 0, folder, case, Limits(**limits))  # type: ignore[arg-type]


def refuse() -> None:
    raise InputError("a broken file")


def spin() -> None:
    while True:
        pass


def fill(size: int) -> None:
    """Make so many bytes resident that were not, whatever the heap has free."""
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1


def test_what_is_allowed(workspace: Path) -> None:
    assert watched(workspace, lambda: None) is None
    assert watched(workspace, refuse) is None
    assert watched(workspace, lambda: (workspace / "own" / "new").write_text("x")) is None


@pytest.mark.parametrize(
    ("kind", "case", "limits"),
    [
        ("exception", lambda _: {}["key"], {}),
        ("exception", lambda _: exec("raise SystemExit"), {}),
        ("time", lambda _: spin(), {"cpu_s": 0.3}),
        ("memory", lambda _: fill(2**26), {"memory": 2**25}),
        ("exception", lambda _: bytearray(64 * GIB), {}),
        ("escape", lambda root: (root / BAIT / "config.json").read_text(), {}),
        ("escape", lambda root: (root / "own/../bait/config.json").read_text(), {}),
        ("escape", lambda root: (root / "elsewhere").write_text("x"), {}),
        ("escape", lambda root: exec(compile("x = 1", str(root / "own" / "code.py"), "exec"), {}), {}),
        ("escape", lambda _: __import__("pickle").loads(b"cbuiltins\nlist\n."), {}),
        ("escape", lambda _: __import__("subprocess").run(["true"], check=True), {}),
    ],
)
def test_what_is_a_finding(kind: str, case: object, limits: dict[str, float], workspace: Path) -> None:
    found = watched(workspace, lambda: case(workspace), **limits)  # type: ignore[operator]
    assert found is not None
    assert found.kind == kind


def test_a_loaded_machine_makes_no_finding(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> None:
        time.sleep(0.5)

    found = watched(workspace, waits, wall_s=0.1)
    assert found is not None
    assert (found.kind, "waited too long" in found.detail) == ("time", True)
    monkeypatch.setattr("tests.fuzz.guard.queued_s", time.monotonic)  # as if it had been ready to run all the while
    assert watched(workspace, waits, wall_s=0.1) is None


def test_a_case_is_its_seed(corpus: Path) -> None:
    raw = (corpus / "model" / "config.json").read_bytes()
    for how in (mutate.json_bytes, mutate.damaged):
        made = [[how(Random(f"x {seed}"), raw) for seed in range(50)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 40


def test_dead_and_hanging_processes_are_findings(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").symlink_to(corpus)
    monkeypatch.setattr(runs, "GRACE_S", 1)
    result = tmp_path / "result.json"
    assert runs.session(["dies", "hangs", "expert_map"], tmp_path, cases=1, result=result) == 1
    found = json.loads(result.read_text())
    assert {(row["parser"], row["kind"]) for row in found["findings"]} == {("dies", "process"), ("hangs", "process")}
    assert found["parsers"]["expert_map"] == {"cases": 1, "findings": 0} | {
        "seconds": found["parsers"]["expert_map"]["seconds"]
    }
    runs.add_up([result, result], tmp_path / "both.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert (both["cpu_minutes"], both["sessions"][0]["cpu_minutes"]) == (2 * found["cpu_minutes"], found["cpu_minutes"])
    assert (both["cases"], both["findings"]) == (2 * found["cases"], 2 * found["findings"])
    assert both["parsers"]["expert_map"]["cases"] == 2
    assert [session["cases"] for session in both["sessions"]] == [found["cases"]] * 2
