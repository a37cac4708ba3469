"""Imports go one way, and `--help` loads no torch: the design's rules as tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNTIME_MAY_IMPORT = ("arithmetic", "archs", "compare", "console", "errors", "host", "spec")
"""`compare`: functions of models and arrays that a baseline and a comparison share; its imports have a test too."""
COMPARE_MAY_IMPORT = ("arithmetic", "archs", "checkpoint.writer", "compare", "errors", "report", "rotation", "spec")
COMPARE_MAY_IMPORT += ("templates",)
LIGHT = ("quantkit.console", "quantkit.errors", "quantkit_instruments.commands.common")
LOW_LEVEL = ("quantkit.calibrate", "quantkit.convert", "quantkit.commands", "quantkit.cli", "quantkit.checkpoint")


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_toolkit_never_imports_the_runtime() -> None:
    above = ("quantkit_runtime", "quantkit_instruments")
    wrong = [(path, name) for path in files("quantkit") for name in imports(path) if name.startswith(above)]
    assert not wrong


def test_the_runtime_imports_only_the_shared_core() -> None:
    allowed = tuple(f"quantkit.{name}" for name in RUNTIME_MAY_IMPORT)
    wrong = [
        (path.name, name)
        for path in [
            *files("runtime/quantkit_runtime"),
            *files("runtime/quantkit_instruments"),
            ROOT / "runtime" / "smoke_load.py",
        ]
        for name in imports(path)
        if name.startswith("quantkit.") and not name.startswith(allowed) and name != "quantkit.__version__"
    ]
    assert not wrong


def test_the_runtime_never_imports_its_instruments() -> None:
    wrong = [
        (path, name)
        for path in files("runtime/quantkit_runtime")
        for name in imports(path)
        if name.startswith("quantkit_instruments")
    ]
    assert not wrong


def test_what_the_runtime_shares_with_a_baseline_knows_no_calibration_or_conversion() -> None:
    allowed = tuple(f"quantkit.{name}" for name in COMPARE_MAY_IMPORT)
    wrong = [
        (path.name, name)
        for path in files("quantkit/compare")
        for name in imports(path)
        if name.startswith("quantkit") and not name.startswith(allowed) and name != "quantkit.__version__"
    ]
    assert not wrong


OWN_NAMES = ("quantkit/host.py",)
"""Asks only for files of the system, under names of its own."""


@pytest.mark.parametrize("folder", ["quantkit", "runtime/quantkit_runtime", "runtime/quantkit_instruments"])
def test_files_are_asked_for_by_what_takes_any_name(folder: str) -> None:
    """`Path.is_file` and its like raise for a name that is too long; those of `spec.files` do not."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("is_file", "is_dir", "exists")
        if path.relative_to(ROOT).as_posix() not in OWN_NAMES and not (node.attr == "exists" and _of_os(node))
    ]
    assert not wrong


def _of_os(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Attribute) and node.value.attr == "path"


LAYERS = (
    "errors arithmetic rotation shipped threads garbage heap host report.page report.plots",
    "spec console",
    "archs outdir",
    "recipe rope checkpoint",
    "memory operators templates",
    "crosscheck",
    "plan chat_template compare acceptance",
    "companions calibrate",
    "inspect convert baseline",
    "ladder",
    "report",
    "commands",
    "cli",
    "__main__",
)
"""Parts of the toolkit, lowest first: each imports at its top only what stands above its line here. What must reach
downward, as a command that prints, imports inside the function that does."""


def part_of(module: str) -> str:
    """The part of `LAYERS` that a module of quantkit belongs to."""
    names = module.removeprefix("quantkit.").split(".")
    single = ".".join(names[:2])
    return single if single in ("report.page", "report.plots") else names[0]


def test_the_toolkit_imports_downward_only() -> None:
    rank = {name: row for row, names in enumerate(LAYERS) for name in names.split()}
    wrong = []
    for path in files("quantkit"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        own = part_of(module)
        assert module == "quantkit" or own in rank, f"{module}: give it a line in LAYERS"
        found = {part_of(name) for name in top_level_imports(path) if name.startswith("quantkit.")}
        wrong += [(module, name) for name in found - {own, "__version__"} if rank[name] >= rank.get(own, 0)]
    assert not wrong


@pytest.mark.parametrize("folder", ["quantkit/archs", "quantkit/spec", "quantkit/checkpoint"])
def test_the_core_does_not_know_the_commands(folder: str) -> None:
    below = tuple(name for name in LOW_LEVEL if not folder.endswith(name.rpartition(".")[2]))
    if folder.endswith("checkpoint"):
        below = tuple(name for name in below if name != "quantkit.checkpoint")
    wrong = [(path, name) for path in files(folder) for name in imports(path) if name.startswith(below)]
    assert not wrong


@pytest.mark.parametrize("folder", ["quantkit/commands", "runtime/quantkit_instruments/commands"])
def test_command_modules_import_only_click_and_the_console(folder: str) -> None:
    standard = sys.stdlib_module_names
    for path in files(folder):
        for name in top_level_imports(path):
            first = name.split(".")[0]
            assert first in standard or first == "click" or name.startswith(LIGHT), (
                f"{path.name} imports {name} at its top"
            )


@pytest.mark.parametrize(
    "code",
    [
        "import quantkit.cli",
        "import quantkit_instruments.cli",
        "import quantkit.archs, quantkit.recipe, quantkit.spec.manifest, quantkit.spec.index",
        "import quantkit.cli as cli; cli.main(['--help'], standalone_mode=False)",
        "import quantkit_instruments.cli as cli; cli.main(['--help'], standalone_mode=False)",
        "import quantkit_instruments.cli as cli; cli.main(['smoke-load', '--help'], standalone_mode=False)",
    ],
)
def test_what_must_start_at_once_loads_no_torch(code: str) -> None:
    heavy = ("torch", "transformers", "numpy", "datasets", "matplotlib")
    check = f"{code}\nimport sys\nfound = [name for name in {heavy!r} if name in sys.modules]\nassert not found, found"
    path = [str(ROOT), str(ROOT / "runtime")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {path!r}\n{check}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
