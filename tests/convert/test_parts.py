"""`--part i/n` and `merge-manifest`: several machines fill one folder, and its bytes are those of one machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from quantkit.cli import main
from quantkit.convert.execute import Job
from quantkit.convert.parts import Part, assign, merge_manifest, prepare_recorded, run_part
from quantkit.convert.run import Prepared, convert, prepare
from quantkit.convert.units import PlannedFile
from quantkit.convert.verify import verify
from quantkit.errors import QuantkitError, UsageError
from quantkit.host import versions
from quantkit.outdir import create_once, exclusive_part, prepare_output
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.manifest import read_manifest
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import tree
from tests.convert.test_crash import SHARD_BYTES, assert_whole_files, counted, in_child

FORMS: dict[str, dict[str, Any]] = {
    "checkpoint": {},
    "sharded": {"form": "sharded", "mesh": Mesh(tp=2, pp=2, ep=2), "layout": "aiter_16x16"},
}


def prepared(source: Path, form: str = "checkpoint") -> Prepared:
    return prepare(source, load_recipe("w8a8"), max_shard_bytes=SHARD_BYTES, **FORMS[form])


def do_part(source: Path, out: Path, number: int, count: int, form: str = "checkpoint") -> None:
    run_part(prepared(source, form), out, Part(number, count), jobs=1)


@pytest.fixture(scope="module")
def model(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of several files: the units that hash them are shared out too."""
    out = tmp_path_factory.mktemp("source") / "model"
    convert(minimax, out, load_recipe("bf16"), jobs=1, max_shard_bytes=1_500_000)
    return out


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What one machine makes, by form."""
    found = {}
    for name, options in FORMS.items():
        out = tmp_path_factory.mktemp("alone") / "out"
        convert(model, out, load_recipe("w8a8"), jobs=1, max_shard_bytes=SHARD_BYTES, **options)
        found[name] = tree(out)
    return found


def test_parts_in_any_order_give_the_bytes_of_one_machine(
    form: str, model: Path, tmp_path: Path, alone: dict[str, dict[str, str]]
) -> None:
    out = tmp_path / "out"
    for number in (3, 1, 2):
        do_part(model, out, number, 3, form)
        assert not list(out.glob("*manifest.json")), "a part never writes the manifest"
        assert not (out / "config.json").exists()
    merge_manifest(prepare_recorded(out, model), out)
    assert tree(out) == alone[form]
    assert sorted(path.name for path in (out / ".quantkit-work").iterdir()) == ["lock", "options.json"]
    assert verify(out, source=model).passed


def test_each_part_does_its_own_units(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = [run_part(prepared(model), out, Part(number, 3), jobs=1) for number in (1, 2, 3)]
    written = [path.stat().st_size for path in out.iterdir() if path.is_file()]
    assert [result.left > 0 for result in results] == [True, True, False]
    assert min(result.units for result in results) >= 3
    assert 0 <= sum(written) - sum(result.nbytes for result in results) < 100_000, "all but the headers of the files"


def test_all_parts_start_at_the_same_moment(model: Path, tmp_path: Path, alone: dict[str, dict[str, str]]) -> None:
    out = tmp_path / "deep/out"
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=do_part, args=(model, out, number, 4)) for number in range(1, 5)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 4
    merge_manifest(prepare_recorded(out, model), out)
    assert tree(out) == alone["checkpoint"]


def test_machines_with_other_software_are_all_listed(
    model: Path, tmp_path: Path, alone: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content is that of one machine; what differs is the list of environments, and nothing is lost from it."""
    out, here = tmp_path / "out", versions()
    for number, driver in ((1, "amdgpu 6.8.5"), (2, "amdgpu 6.12.12"), (3, "amdgpu 6.8.5")):
        monkeypatch.setattr("quantkit.convert.execute.versions", lambda driver=driver: {**here, "driver": driver})
        do_part(model, out, number, 3)
    done = quantkit("merge-manifest", out, "--source", model)
    assert done.exit_code == 0, done.output
    assert "driver amdgpu 6.12.12 / amdgpu 6.8.5" in done.output
    manifest = read_manifest(out / "quantkit_manifest.json")
    assert sorted(each.versions["driver"] for each in manifest.environments) == ["amdgpu 6.12.12", "amdgpu 6.8.5"]
    names = [name for name in alone["checkpoint"] if name != "quantkit_manifest.json"]
    assert {name: tree(out)[name] for name in names} == {name: alone["checkpoint"][name] for name in names}
    assert verify(out, source=model).passed


def count_calls(name: str, work: Callable[[], object], patch: pytest.MonkeyPatch) -> int:
    """How often `work` calls `os.NAME`."""
    original, calls = getattr(os, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    with patch.context() as within:
        within.setattr(os, name, wrapped)
        work()
    return calls[0]


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_a_killed_part_is_run_again(
    name: str, model: Path, tmp_path: Path, alone: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before a random call of the part that runs last."""
    out, other = tmp_path / "out", tmp_path / "other"
    for folder in (out, other):
        do_part(model, folder, 2, 2)
    calls = count_calls(name, lambda: do_part(model, other, 1, 2), monkeypatch)

    def dying() -> None:
        at = random.Random(name).randint(2, calls - 1)
        counted(name, lambda: os.kill(os.getpid(), signal.SIGKILL), at)
        do_part(model, out, 1, 2)

    assert os.WTERMSIG(in_child(dying)) == signal.SIGKILL
    assert_whole_files(out)
    with pytest.raises(QuantkitError, match="are not done") as caught:
        merge_manifest(prepare_recorded(out, model), out)
    assert caught.value.items
    assert all(item.startswith("part 1/2: ") for item in caught.value.items)
    assert not list(out.glob("*manifest.json"))
    do_part(model, out, 1, 2)
    merge_manifest(prepare_recorded(out, model), out)
    assert tree(out) == alone["checkpoint"]
    assert not [path for path in out.rglob("*") if path.name.endswith("-tmp")]


def test_missing_parts_are_listed_and_one_machine_may_finish(
    model: Path, tmp_path: Path, w8a8: Recipe, alone: dict[str, dict[str, str]]
) -> None:
    out = tmp_path / "out"
    do_part(model, out, 2, 3)
    with pytest.raises(QuantkitError, match="units of work are not done") as caught:
        merge_manifest(prepare_recorded(out, model), out)
    assert {item.partition(":")[0] for item in caught.value.items} == {"part 1/3", "part 3/3"}
    assert any("checksum of the source" in item for item in caught.value.items)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert before
    convert(model, out, w8a8, jobs=1, max_shard_bytes=SHARD_BYTES)
    assert tree(out) == alone["checkpoint"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_division_or_other_options_are_refused(model: Path, tmp_path: Path, bf16: Recipe) -> None:
    out = tmp_path / "out"
    do_part(model, out, 1, 3)
    before = tree(out)
    with pytest.raises(UsageError, match="in 3 parts, not in 2"):
        do_part(model, out, 2, 2)
    with pytest.raises(UsageError, match="with other options"):
        run_part(prepare(model, bf16, max_shard_bytes=SHARD_BYTES), out, Part(2, 3), jobs=1)
    assert tree(out) == before


def test_another_source_is_refused(model: Path, deepseek: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    do_part(model, out, 1, 1)
    with pytest.raises(UsageError, match="with other options") as caught:
        merge_manifest(prepare_recorded(out, deepseek), out)
    assert [item.partition(":")[0] for item in caught.value.items] == ["source"]
    with pytest.raises(UsageError, match="holds no conversion"):
        prepare_recorded(tmp_path / "nothing", model)


def test_locks(model: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """A part twice, and a part beside a whole run, are refused; two different parts are not."""
    out, planned = tmp_path / "out", prepared(model)
    folder = prepare_output(out, planned.options, final=planned.manifest_name)
    with exclusive_part(folder, "part-1"):
        with pytest.raises(UsageError, match="another process is writing part-1"):
            do_part(model, out, 1, 2)
        with pytest.raises(UsageError, match="another process is writing to"):
            convert(model, out, w8a8, jobs=1, max_shard_bytes=SHARD_BYTES)
        do_part(model, out, 2, 2)
    do_part(model, out, 1, 2)


def test_after_the_end_a_part_does_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    do_part(model, out, 1, 1)
    first = merge_manifest(prepare_recorded(out, model), out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    do_part(model, out, 2, 7)
    assert merge_manifest(prepare_recorded(out, model), out) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


# ---------------------------------------------------------------------------------------------- assignment


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 10**9)), max_size=60),
    count=st.integers(1, 9),
)
def test_assignment_is_a_partition_and_even(sizes: list[tuple[bool, int]], count: int) -> None:
    planned = PlannedFile("x", ())
    todo = [
        Job(f"source:{number}", size, hashed="x") if hashed else Job(f"file:{number}", size, planned=planned)
        for number, (hashed, size) in enumerate(sizes)
    ]
    parts = assign(todo, count)
    assert len(parts) == count
    assert sorted(job.label for part in parts for job in part) == sorted(job.label for job in todo)
    position = {job.label: number for number, job in enumerate(todo)}
    for part in parts:
        assert [position[job.label] for job in part] == sorted(position[job.label] for job in part)
    loads = [sum(job.size for job in part) for part in parts]
    largest = max((job.size for job in todo), default=0)
    # greedy: the fullest part got its last bundle while it was the emptiest; a bundle is one unit or within a share
    assert max(loads) <= sum(loads) / count + max(largest, sum(loads) / count)
    assert assign(todo, count) == parts


def test_even_files_are_spread_evenly() -> None:
    planned = PlannedFile("x", ())
    todo = [Job(f"file:{number}", 2**31, planned=planned) for number in range(64)]
    assert [len(part) for part in assign(todo, 8)] == [8] * 8


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "a/b", "1/0", "-1/2", "1/2/3", ""])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UsageError, match="is no part"):
        Part.parse(text)


def test_part_of_text() -> None:
    assert Part.parse("3/16") == Part(3, 16)


def _create(path: Path, content: bytes) -> None:
    while not path.with_name("go").exists():
        time.sleep(0.001)
    create_once(path, content)


def test_created_once_by_many(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    contents = [bytes([65 + number]) * 100_000 for number in range(6)]
    running = [context.Process(target=_create, args=(tmp_path / "file", content)) for content in contents]
    for process in running:
        process.start()
    (tmp_path / "go").touch()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 6
    assert (tmp_path / "file").read_bytes() in contents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "go"]


# -------------------------------------------------------------------------------------------- command line


def quantkit(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_commands(model: Path, tmp_path: Path, alone: dict[str, dict[str, str]]) -> None:
    out = tmp_path / "out"
    convert_ = ["convert", model, "-o", out, "--max-shard-size", SHARD_BYTES, "--jobs", 1]
    assert json.loads(quantkit(*convert_, "--part", "1/2", "--json").stdout)["left"] > 0
    missing = quantkit("merge-manifest", out, "--source", model)
    assert missing.exit_code == 3
    assert "part 2/2: " in missing.stderr
    assert quantkit(*convert_, "--part", "3/2").exit_code == 2
    assert "exclude each other" in quantkit(*convert_, "--part", "1/2", "--ray", "auto").stderr
    second = quantkit(*convert_, "--part", "2/2")
    assert f"quantkit merge-manifest {out} --source {model}" in second.stdout, second.output
    merged = quantkit("merge-manifest", out, "--source", model)
    assert merged.exit_code == 0, merged.stderr
    assert tree(out) == alone["checkpoint"]
