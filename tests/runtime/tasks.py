"""What tests ask the ranks of a mesh to do; functions of a module, so that they can be sent to a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit.convert.run import convert
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit_runtime import device as devices
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import load_model
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.session import make_runner
from tests.families import VOCAB, make_tiny

TOKENS, NEW_TOKENS = 12, 4


def prompt(tokens: int = TOKENS, seed: int = 7, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(3, vocab, (1, tokens), generator=torch.Generator().manual_seed(seed))


def prepare(family: str, folder: Path, meshes: dict[str, Mesh], recipe: str = "w8a8") -> dict[str, str]:
    """Convert a family's tiny model for every mesh; what was refused, and why."""
    source = make_tiny(family, folder / "source")
    refused = {}
    for name, mesh in meshes.items():
        try:
            convert(source, folder / name, load_recipe(recipe), form="sharded", mesh=mesh, jobs=1)
        except Exception as error:
            refused[name] = str(error)
    return refused


def run_model(folder: Path, ids: torch.Tensor, new_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
    """Load this process's part, run a forward and a greedy generation."""
    loaded = load_model(
        folder, devices.resolve("cpu"), torch.float32, cache_tokens=TOKENS + NEW_TOKENS, prompt_tokens=TOKENS, **options
    )
    with torch.no_grad(), loaded.trace():
        logits = loaded.model(input_ids=ids).logits
        fmt = KvFormat(torch.float32, torch.float32)
        engine = Engine(make_runner(loaded, fmt, 1 + fmt.blocks(ids.shape[1] + new_tokens)))
        (generated,) = engine.generate(ids.tolist(), new_tokens)
    verdict = loaded.account.verdict()
    return {
        "logits": logits.numpy(),
        "tokens": generated.tokens,
        "expected": loaded.account.expected,
        "routed": loaded.account.routed,
        "fallbacks": verdict.fallbacks,
        "missing": verdict.missing,
        "files": loaded.checked.files,
        "weights": sum(loaded.memory.weights.values()),
        "layers": sorted({row.key.layer for row in loaded.planned if row.key.layer is not None}),
    }
