"""What tests ask the ranks of a mesh to do; functions of a module, so that they can be sent to a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from quantkit.convert.run import convert
from quantkit.errors import QuantkitError
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit_instruments import cli, comm
from quantkit_instruments.trace import gemm_rows, judge, trace
from quantkit_runtime import device as devices
from quantkit_runtime import fuse, session
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import load_model
from quantkit_runtime.kernels import reference
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.runner import PagedRunner
from quantkit_runtime.session import make_runner
from tests.families import VOCAB, make_tiny
from tests.runtime.recorded import record, recording

TOKENS, NEW_TOKENS = 12, 3


def prompt(tokens: int = TOKENS, seed: int = 7, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(3, vocab, (1, tokens), generator=torch.Generator().manual_seed(seed))


def prepare(family: str, folder: Path, meshes: dict[str, Mesh], recipe: str = "w8a8", **sizes: Any) -> dict[str, str]:
    """Convert a family's tiny model for every mesh; what was refused, and why."""
    source = make_tiny(family, folder / "source", **sizes)
    refused = {}
    for name, mesh in meshes.items():
        try:
            convert(source, folder / name, load_recipe(recipe), form="sharded", mesh=mesh, jobs=1)
        except Exception as error:
            refused[name] = str(error)
    return refused


def run_model(
    folder: Path, *prompts: torch.Tensor, dtype: str = "float32", fused: bool = False, **options: Any
) -> dict[str, Any]:
    """Load this process's part, run a forward and a greedy generation on the prompt of its replica.

    `fused`: with all fusions.
    """
    compute = getattr(torch, dtype)
    loaded = load_model(
        folder, devices.resolve("cpu"), compute, cache_tokens=TOKENS + NEW_TOKENS, prompt_tokens=TOKENS, **options
    )
    fusions = fuse.apply(loaded.model, None if fused else [], paged=not isinstance(loaded.kv, str))
    ids = prompts[loaded.files.ranks.at.dp % len(prompts)]
    with torch.no_grad(), trace(loaded):
        logits = loaded.model(input_ids=ids).logits
        fmt = KvFormat(compute, compute)
        engine = Engine(make_runner(loaded, fmt, 1 + fmt.blocks(ids.shape[1] + NEW_TOKENS)))
        (generated,) = engine.generate(ids.tolist(), NEW_TOKENS)
    verdict = judge(loaded.account)
    placements = [module.placement for module in loaded.model.modules() if hasattr(module, "placement")]
    return {
        "logits": logits.float().numpy(),
        "tokens": generated.tokens,
        "expected": loaded.account.expected,
        "routed": loaded.account.routed,
        "calls": sum(row.calls for row in gemm_rows(loaded.account) if row.dtype == "int8"),
        "fallbacks": verdict.fallbacks,
        "missing": verdict.missing,
        "files": loaded.checked.files,
        "layers": sorted({row.key.layer for row in loaded.planned if row.key.layer is not None}),
        "fused": {outcome.name: len(outcome.fused) for outcome in fusions},
        "dispatch": [placement.dispatch for placement in placements],
        "load": [placement.load.tolist() for placement in placements],
    }


def run_session(
    folder: Path, prompts: list[list[int]], count: int, chunk: int, recorded: bool = False
) -> dict[str, Any]:
    """A session of this process's part for all prompts at once: their tokens and what the pools came to; `recorded`:
    prefill in the form that graphs have."""
    loaded = load_model(folder, devices.resolve("cpu"), torch.float32)
    context, kv = max(map(len, prompts)) + count - 1, KvFormat(torch.float32, torch.float32, 4)
    engine, table = session.start(loaded, session.Options(context, kv, len(prompts), chunk))
    assert isinstance(engine.runner, PagedRunner)
    if recorded:
        engine.runner.attend = reference.paged_prefill
        record(engine.runner, chunk, len(prompts), kv.blocks(context))
    layers = engine.runner.cache.layers.values()
    return {
        "tokens": [one.tokens for one in engine.generate(prompts, count)],
        "blocks": {layer.spec.layer: len(layer.keys.data) for layer in layers},
        "fits": table.fits,
        "replays": engine.runner.replays["prefill"],
    }


def run_recording(folder: Path, prompts: list[list[int]], count: int, *faults: tuple[int, str]) -> dict[str, Any]:
    """A session that records on the host; `faults`: of each rank, see `recording`."""
    loaded = load_model(folder, devices.resolve("cpu"), torch.float32)
    context, kv = max(map(len, prompts)) + count - 1, KvFormat(torch.float32, torch.float32, 4)
    with recording(*faults[loaded.files.ranks.rank]):
        engine, _ = session.start(loaded, session.Options(context, kv, len(prompts), 24))
    runner = engine.runner
    return {
        "tokens": [one.tokens for one in engine.generate(prompts, count)],
        "replays": runner.replays,
        "because": (runner.eager_because, runner.prefill_eager_because),
    }


def load_poisoned(folder: Path) -> list[str]:
    """Names of what has no value after loading where fresh memory holds NaN and 255 instead of zeros."""
    torch.use_deterministic_algorithms(True)  # fills memory that `torch.empty` returns
    try:
        state = load_model(folder, devices.resolve("cpu"), torch.float32).model.state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    return [name for name, value in state.items() if value.is_meta or not bool(torch.isfinite(value.float()).all())]


def failure(folder: Path) -> tuple[str, str]:
    """Class and text of the error that loading ends with."""
    try:
        load_model(folder, devices.resolve("cpu"), torch.float32)
    except QuantkitError as error:
        return type(error).__name__, str(error)
    return "", ""


def command_line(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `quantkit-runtime` in this process."""
    result = CliRunner().invoke(cli.main, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def commcheck_with_a_fault() -> tuple[int, list[str]]:
    """Exit code and offenders of a check where the first rank's all-reduce is off by one."""
    right, real = comm.COLLECTIVES["all-reduce"], comm.COLLECTIVES.copy()
    comm.COLLECTIVES["all-reduce"] = (lambda team, x: right[0](team, x) + (team.index == 0), *right[1:])
    try:
        options = ["commcheck", "--tp", "2", "--mib", "1", "--repeats", "1", "--device", "cpu"]
        code, _, stderr = command_line(*options)
    finally:
        comm.COLLECTIVES.update(real)
    return code, [line.removeprefix("  - ") for line in stderr.splitlines() if line.startswith("  - ")]
