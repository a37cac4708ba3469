"""Source distribution and wheel, built and installed into an environment of their own: they are whole, and they work.

No network: builds take the setuptools that is here, and the environment sees the packages of the running one, but not
its quantkit, which is installed from the wheel alone.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from quantkit.host import versions
from quantkit.recipe import shipped_recipes
from tests.packaging.test_packaging import PYPROJECT, ROOT, run

# Folder in the repository -> folder in the wheel.
TREES = {
    "quantkit": "quantkit",
    "runtime/quantkit_runtime": "quantkit_runtime",
    "runtime/quantkit_instruments": "quantkit_instruments",
    "recipes": "quantkit/recipes",
    "calibration_data": "quantkit/calibration_data",
}

MODEL = ROOT / "tests" / "models" / "tiny-minimax-m2"


def tracked_files() -> list[Path]:
    """What git tracks or would track, relative to ROOT: build products and caches are left out."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def contents(wheel: Path) -> dict[str, str]:
    """Name -> sha256 of everything in a wheel but its list of files, which says the same."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def build_wheel(source: Path, out: Path) -> Path:
    """A wheel; the newest setuptools is in this environment already, isolation would ask an index for it."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, source)
    (wheel,) = out.glob("quantkit-*-py3-none-any.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that the checkout gets no build folders."""
    folder = tmp_path_factory.mktemp("source")
    for path in tracked_files():
        if path.parts[0] != "tests":
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((ROOT / path).read_bytes())
    return folder


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from the sources and unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (archive,) = out.glob("quantkit-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an installer without a wheel does."""
    return build_wheel(unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(contents(wheel))


class Installed:
    """An environment that holds the wheel and sees the third parties of the running one."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        (site,) = folder.glob("lib/python3*/site-packages")
        others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "others.pth").write_text("\n".join(others) + "\n")
        install = ("install", "--no-deps", "--no-index", "--quiet", wheel)
        run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *install)

    def run(self, program: str, *arguments: str | Path) -> str:
        """Standard output of a program of the environment, away from the checkout."""
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        command = [str(self.folder / "bin" / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=kept | offline)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment") / "venv", wheel)


def test_the_wheel_of_the_source_distribution_is_that_of_the_tree(source: Path, wheel: Path, tmp_path: Path) -> None:
    assert contents(wheel) == contents(build_wheel(source, tmp_path))


@pytest.mark.parametrize("tree", TREES)
def test_wheel_holds_every_file_of_the_tree(tree: str, wheel_names: set[str]) -> None:
    files = [path.relative_to(tree) for path in tracked_files() if path.is_relative_to(tree)]
    assert Path("__init__.py") in files
    missing = [str(path) for path in files if f"{TREES[tree]}/{path.as_posix()}" not in wheel_names]
    assert not missing, f"add the file type to [tool.setuptools.package-data], or an __init__.py: {missing}"


def test_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {
        "quantkit",
        "quantkit_runtime",
        "quantkit_instruments",
    }


@pytest.mark.parametrize("package", ["quantkit", "quantkit_runtime", "quantkit_instruments"])
def test_wheel_marks_every_package_as_typed(package: str, wheel_names: set[str]) -> None:
    assert f"{package}/py.typed" in wheel_names


def test_the_source_distribution_holds_what_its_readers_need(unpacked: Path) -> None:
    for name in ("CHANGES.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "runtime/smoke_load.py"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    assert f"\nVersion: {PYPROJECT['project']['version']}\n" in (unpacked / "PKG-INFO").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", PYPROJECT["project"]["scripts"])
def test_programs_say_the_version(script: str, installed: Installed) -> None:
    assert installed.run(script, "--version") == f"{script} {PYPROJECT['project']['version']}\n"


def test_recipes_and_texts_are_found(installed: Installed) -> None:
    code = """
import json, quantkit, quantkit_runtime
from quantkit.recipe import load_recipe, shipped_recipes
from quantkit.shipped import shipped_folder
names = [load_recipe(name) and name for name in shipped_recipes()]
texts = [path.name for path in shipped_folder("calibration_data").iterdir() if path.name.endswith(".jsonl")]
lines = [len(shipped_folder("calibration_data").joinpath(name).read_text("utf-8").splitlines()) for name in texts]
print(json.dumps([names, dict(zip(texts, lines)), quantkit.__file__, quantkit_runtime.__file__]))
"""
    names, texts, *places = json.loads(installed.run("python", "-c", code))
    assert names == list(shipped_recipes())
    want = {path.name: path.read_text("utf-8").count("\n") for path in (ROOT / "calibration_data").glob("*.jsonl")}
    assert texts == want
    assert all(Path(place).is_relative_to(installed.folder) for place in places), "not the installed quantkit"


def test_the_main_job_runs(installed: Installed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    installed.run("quantkit", "convert", MODEL, "-o", out, "--jobs", "1")
    (environment,) = json.loads((out / "quantkit_manifest.json").read_bytes())["environments"]
    assert environment["versions"] == versions(), "the same kernels, down to the byte"
    report = json.loads(
        installed.run("quantkit-runtime", "smoke-load", out, "--device", "cpu", "--max-new-tokens", "2", "--json")
    )
    assert report["passed"]
