"""The distribution: that a vendor's torch survives an install, and what start-up imports.

No network: pip resolves against a folder of stub wheels.
"""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# pip must see neither this machine's configuration nor its index: the outcome depends on the stubs alone.
HERMETIC = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))} | {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def run(*command: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=HERMETIC, check=False, **options
    )
    if check and done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done


# ------------------------------------------------------------------------------------------ requirements


def test_tested_versions_cover_every_requirement() -> None:
    """constraints.txt pins each direct dependency, so that an install with it is reproducible."""
    pin_torch = load_pin_torch()
    pinned = {
        pin_torch.canonical(match["name"])
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if (match := pin_torch.PIN.match(line))
    }
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {pin_torch.canonical(requirement.partition(">")[0]) for requirement in wanted}
    assert names <= pinned


# ------------------------------------------------------------------------------------- vendor's torch


def load_pin_torch():
    """tools/pin_torch.py as a module; it is a script, so no package holds it."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("pin_torch", ROOT / "tools" / "pin_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_installed(site: Path, name: str, version: str) -> None:
    """A distribution that is installed in `site`: its metadata is all that pip and importlib look at."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """An empty but valid wheel that pip can choose."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        lines = [f"Requires-Dist: {requirement}" for requirement in requires]
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
        archive.writestr(f"{info}/METADATA", "\n".join(metadata))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class VendorMachine:
    """A virtual environment on a system whose torch and Triton are a vendor's, beside an index with newer ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = path / "index"
        run(sys.executable, "-m", "venv", "--without-pip", path / "venv")
        self.python = path / "venv" / "bin" / "python"
        # A .pth file is how the system's packages become visible without writing to the real system.
        (site,) = (path / "venv").glob("lib/python3*/site-packages")
        self.system_site = path / "system"
        (site / "system.pth").write_text(f"{self.system_site}\n")
        write_installed(self.system_site, "torch", "2.9.0+das.opt1.dtk2604")
        write_installed(self.system_site, "triton", "3.1.0+das.opt1")
        write_installed(self.system_site, "numpy", "1.26.4")
        for name, version in {"torch": "2.13.0", "triton": "3.6.0", "numpy": "2.4.6", "rich": "15.0.0"}.items():
            write_wheel(self.index, name, version)
        self.tested = path / "constraints.txt"
        self.tested.write_text("# tested\ntorch==2.13.0\ntriton==3.6.0\nnumpy==2.4.6\nrich==15.0.0\n")

    def pinned(self) -> Path:
        """The constraints file as `make venv SYSTEM_TORCH=1` writes it."""
        target = self.path / "pinned.txt"
        target.write_text(run(self.python, ROOT / "tools" / "pin_torch.py", self.tested).stdout)
        return target

    def pip(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        offline = ("--no-index", "--find-links", self.index, "--dry-run", "--quiet", "--report", "-")
        head = (sys.executable, "-m", "pip", "--python", self.python, "install")
        return run(*head, *offline, *arguments, check=check)

    def would_install(self, *arguments: str | Path) -> dict[str, str]:
        report = json.loads(self.pip(*arguments).stdout)
        return {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}


@pytest.fixture
def machine(tmp_path: Path) -> VendorMachine:
    return VendorMachine(tmp_path)


def test_vendor_torch_would_be_replaced_without_the_pins(machine: VendorMachine) -> None:
    """The control: with the tested versions alone pip does what this project promises never to do."""
    write_wheel(machine.index, "project", "1.0", "torch>=2.9", "numpy", "rich")
    install = machine.would_install("project", "-c", machine.tested)
    assert install == {"project": "1.0", "torch": "2.13.0", "numpy": "2.4.6", "rich": "15.0.0"}


@pytest.mark.parametrize("options", [(), ("--upgrade",), ("--upgrade", "--upgrade-strategy", "eager")], ids=" ".join)
def test_vendor_torch_is_kept(machine: VendorMachine, options: tuple[str, ...]) -> None:
    write_wheel(machine.index, "project", "1.0", "torch>=2.9", "triton", "rich")
    install = machine.would_install(*options, "project", "-c", machine.pinned())
    assert install == {"project": "1.0", "rich": "15.0.0"}


def test_numpy_of_the_system_is_kept(machine: VendorMachine) -> None:
    write_wheel(machine.index, "project", "1.0", "torch>=2.9", "numpy", "rich")
    install = machine.would_install("project", "-c", machine.pinned())
    assert install == {"project": "1.0", "rich": "15.0.0"}


def test_package_that_needs_a_newer_torch_is_refused(machine: VendorMachine) -> None:
    """Refusing is right: the alternative is a torch that does not know the card."""
    write_wheel(machine.index, "greedy", "1.0", "torch>=2.12")
    assert machine.would_install("greedy", "-c", machine.tested)["torch"] == "2.13.0"
    refused = machine.pip("greedy", "-c", machine.pinned(), check=False)
    assert refused.returncode != 0
    assert "conflicting dependencies" in refused.stderr


def test_package_that_follows_torch_gets_a_version_that_fits(machine: VendorMachine) -> None:
    write_wheel(machine.index, "compressed_tensors", "0.20.1", "torch>=2.10")
    write_wheel(machine.index, "compressed_tensors", "0.15.0", "torch>=1.7")
    with machine.tested.open("a") as lines:
        lines.write("compressed-tensors==0.20.1\n")
    install = machine.would_install("compressed-tensors", "-c", machine.pinned())
    assert install == {"compressed_tensors": "0.15.0"}


def test_own_requirements_accept_a_vendor_torch(machine: VendorMachine) -> None:
    """quantkit's bound on torch is met by the oldest build that vendors ship for it."""
    (requirement,) = (r for r in PYPROJECT["project"]["dependencies"] if r.startswith("torch"))
    assert machine.would_install(requirement, "-c", machine.pinned()) == {}


def test_torch_inside_the_venv_is_pinned_with_its_build(machine: VendorMachine) -> None:
    """Without SYSTEM_TORCH: the build that was chosen first is the build that stays, all tested pins stay too."""
    (site,) = (machine.path / "venv").glob("lib/python3*/site-packages")
    (site / "system.pth").unlink()
    write_installed(site, "torch", "2.13.0+cpu")
    write_installed(site, "numpy", "2.3.0")
    assert machine.pinned().read_text().split() == [
        "torch==2.13.0+cpu",
        "triton==3.6.0",
        "numpy==2.4.6",
        "rich==15.0.0",
    ]


def test_remains_of_an_interrupted_install_are_ignored(machine: VendorMachine) -> None:
    before = machine.pinned().read_text()
    (machine.system_site / "half_gone-1.0.dist-info").mkdir()
    assert machine.pinned().read_text() == before


def test_missing_torch_is_a_clear_error(machine: VendorMachine) -> None:
    (site,) = (machine.path / "venv").glob("lib/python3*/site-packages")
    (site / "system.pth").unlink()
    done = run(machine.python, ROOT / "tools" / "pin_torch.py", machine.tested, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "torch is not installed" in done.stderr
    assert "SYSTEM_TORCH=1" in done.stderr


# ------------------------------------------------------------------------------------------- start-up

# Seconds each to import; a command imports what it needs when it runs.
HEAVY = {"torch", "transformers", "accelerate", "datasets", "pandas", "pyarrow", "matplotlib", "scipy"}

# What the commands may import at the top (click, rich, pydantic, PyYAML, Jinja2, NumPy) is 270 modules; the rest is
# for our own. A jump means that something heavy became part of start-up.
IMPORT_LIMIT = {"import quantkit": 20, "import quantkit_runtime": 20}
HELP_LIMIT = 400

REPORT = "import sys; before = set(sys.modules)\n{}\nprint('\\n'.join(set(sys.modules) - before), file=sys.stderr)"


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter has imported after `statement`, beyond its own start-up."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'runtime')]!r}\n" + REPORT.format(statement)
    return set(run(sys.executable, "-c", code).stderr.split())


def heavy(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & HEAVY


@pytest.mark.parametrize("statement", IMPORT_LIMIT)
def test_import_is_light(statement: str) -> None:
    modules = modules_after(statement)
    assert statement.split()[1] in modules
    assert not heavy(modules)
    assert len(modules) <= IMPORT_LIMIT[statement]


@pytest.mark.parametrize("script", PYPROJECT["project"]["scripts"])
def test_help_is_light(script: str) -> None:
    module, _, function = PYPROJECT["project"]["scripts"][script].partition(":")
    modules = modules_after(
        f"sys.argv = [{script!r}, '--help']\n"
        f"from {module} import {function} as main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
    )
    assert not heavy(modules)
    assert len(modules) <= HELP_LIMIT
