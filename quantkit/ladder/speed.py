"""How fast a rung runs: converted, and measured by `quantkit-runtime bench` in a process of its own.

The toolkit never imports the runtime. Rungs without kernels (weights alone, FP8 activations) have no speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from quantkit.convert.run import convert
from quantkit.errors import QuantkitError
from quantkit.ladder.arithmetic import Arithmetic
from quantkit.ladder.rungs import Rung
from quantkit.spec.document import Strict
from quantkit.spec.mesh import Mesh

PROMPT_TOKENS, STEPS, SEQUENCES = 512, 32, 8


class Speed(Strict):
    """Attributes:
    device: as the runtime names it.
    prefill_per_s: prompt tokens per second of one prompt of `PROMPT_TOKENS`.
    token_s: median seconds for a further token, one sequence.
    decode_per_s: further tokens per second of `SEQUENCES` at a time.
    """

    device: str
    prefill_per_s: float
    token_s: float
    decode_per_s: float


def runs(rung: Rung) -> bool:
    """Whether the runtime has this arithmetic."""
    return rung.weights == "recipe" and rung.activations == "recipe"


def measure(root: Path, rung: Rung, arithmetic: Arithmetic, work: Path, *, device: str) -> Speed:
    """Convert the source as the rung says, unless a rung before has done it, and measure it.

    Raises:
        QuantkitError: the runtime refuses or fails; its own words are in the message.
    """
    plain = rung.compute == "bfloat16"
    folder = root if plain else work / f"converted-{arithmetic.recipe.name}-{arithmetic.digest[:16]}"
    if not plain:
        convert(root, folder, arithmetic.recipe, calibration=arithmetic.calibration, form="sharded", mesh=Mesh())
    command = [sys.executable, "-m", "quantkit_instruments.cli", "bench", str(folder), "--json", "--device", device]
    command += ["--dtype", "bfloat16" if plain else "auto"]
    command += ["--kv-keys", _dtype(rung.keys), "--kv-values", _dtype(rung.values)]
    command += ["--lengths", f"{PROMPT_TOKENS}", "--sweep-length", f"{PROMPT_TOKENS}", "--steps", f"{STEPS}"]
    command += ["--batches", f"1,{SEQUENCES}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-12:]
        raise QuantkitError(
            f"{rung.name}: quantkit-runtime bench ended with exit code {done.returncode}",
            "leave out --speed, or the rung, or see what the runtime says",
            items=last,
        )
    return _speed(json.loads(done.stdout)["candidate"])


def _dtype(name: str) -> str:
    return "int8" if name == "int8" else "auto"


def _speed(report: dict[str, object]) -> Speed:
    prefill, decode = report["prefill"], report["decode"]
    assert isinstance(prefill, list | tuple)
    assert isinstance(decode, list | tuple)
    by_batch = {row["batch"]: row for row in decode}
    return Speed(
        device=str(report["device"]),
        prefill_per_s=prefill[0]["tokens_per_second"],
        token_s=by_batch[1]["p50"],
        decode_per_s=by_batch[SEQUENCES]["tokens_per_second"] if SEQUENCES in by_batch else 0.0,
    )
