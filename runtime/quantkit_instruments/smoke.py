"""The smoke test: load, run a forward, generate, account for every GEMM and every byte, on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.archs.modeling import load_tokenizer, text_of
from quantkit.arithmetic import quantize_tokens
from quantkit.errors import VerificationError
from quantkit_instruments.since import since
from quantkit_instruments.tokenizer import encode, require_positions, stop_tokens, vocab_size
from quantkit_instruments.trace import GemmRow, Verdict, gemm_rows, judge, trace
from quantkit_runtime import device as devices
from quantkit_runtime.engine import Engine, Generated
from quantkit_runtime.experts import loads
from quantkit_runtime.graft import LoadedModel, load_model
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.layers import Int8Experts
from quantkit_runtime.loader import require_folder
from quantkit_runtime.memory import MemoryPlan, out_of_memory_as_error
from quantkit_runtime.runner import prefill_facts
from quantkit_runtime.session import make_runner

SELF_TEST_TOKENS = 3


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    root: Path
    device: str = "auto"
    dtype: str = "auto"
    prompt: str = "The"
    max_new_tokens: int = 32
    verify: bool = True


@dataclass(frozen=True)
class Result:
    """Everything that the command reports.

    Attributes:
        loaded: the model.
        logits_shape: of the forward over the prompt.
        logits_finite: whether all of them are finite.
        text: prompt and generated text.
        generated: token ids.
        cache: what kept keys and values.
        prefill: how chunks ran.
        cache_bytes: of keys and values, as they lay in memory.
        rows, verdict: GEMMs by kernel and dtype, INT8 against expected.
        memory_before, memory_after: bytes held by the process (host) or allocated on the card.
        memory_peak: largest amount allocated on the card; 0 on the host, where it is not measured.
    """

    loaded: LoadedModel
    logits_shape: tuple[int, ...]
    logits_finite: bool
    text: str
    generated: Generated
    cache: str
    prefill: dict[str, Any]
    cache_bytes: int
    rows: tuple[GemmRow, ...]
    verdict: Verdict
    memory_before: int
    memory_after: int
    memory_peak: int

    @property
    def passed(self) -> bool:
        return self.verdict.passed and self.logits_finite


Hook = Callable[[LoadedModel], None]


def run(options: Options, on_plan: Callable[[MemoryPlan], None] | None = None, on_loaded: Hook | None = None) -> Result:
    """Load, run and count. The verdict is in the result; `require` turns a bad one into an error.

    Args:
        on_plan: sees the memory plan before anything is read.
        on_loaded: sees the loaded model before it runs.
    """
    require_folder(options.root)
    device = devices.resolve(options.device)
    dtype = devices.compute_dtype(options.dtype, device)
    tokenizer = load_tokenizer(options.root)
    prompt = encode(tokenizer, options.prompt, vocab_size(options.root))
    positions = require_positions(options.root, len(prompt), options.max_new_tokens)
    before = device.used_memory()
    loaded = load_model(
        options.root,
        device,
        dtype,
        verify=options.verify,
        cache_tokens=positions,
        prompt_tokens=len(prompt),
        on_plan=on_plan,
    )
    if on_loaded is not None:
        on_loaded(loaded)
    ids, fmt = torch.tensor([prompt], device=device.torch), KvFormat(dtype, dtype)
    with torch.no_grad(), out_of_memory_as_error(loaded.memory), trace(loaded):
        logits = loaded.model(input_ids=ids, use_cache=False).logits
        runner = make_runner(loaded, fmt, 1 + fmt.blocks(positions), sequences=1)
        engine = Engine(runner, stop=stop_tokens(options.root))
        (generated,) = engine.generate([prompt], options.max_new_tokens)
    loaded.files.ranks.together(lambda: self_test(loaded), "the self-test")
    return Result(
        loaded=loaded,
        logits_shape=tuple(logits.shape),
        logits_finite=bool(torch.isfinite(logits).all()),
        text=text_of(tokenizer, [*prompt, *generated.tokens], special=False),
        generated=generated,
        cache=runner.kind,
        prefill=prefill_facts(runner),
        cache_bytes=runner.nbytes,
        rows=tuple(gemm_rows(loaded.account)),
        verdict=judge(loaded.account),
        memory_before=before,
        memory_after=device.used_memory(),
        memory_peak=device.peak_memory(),
    )


def self_test(loaded: LoadedModel) -> None:
    """Run each expert that no token reached once, and hold the result against float64.

    Raises:
        VerificationError: a kernel's result is off.
    """
    ran = loaded.account.ran_int8("forward")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), loaded.account.self_test():
        for name, module in loaded.model.named_modules():
            if not isinstance(module, Int8Experts):
                continue
            k = module.weight.shape[-1]
            x = torch.randn(SELF_TEST_TOKENS, k, generator=generator).to(module.weight.device)
            for expert, names in enumerate(module.names):
                if not ran.issuperset(names):
                    _compare(module, x, expert, f"{name}, expert {expert}")


def _compare(module: Int8Experts, x: Tensor, expert: int, name: str) -> None:
    q, scale = quantize_tokens(x, module.group_size or None)
    got = module.gemm(expert, q, scale, None, x.dtype).double()
    x_dequantized = (q.double().unflatten(-1, (scale.shape[-1], -1)) * scale.double().unsqueeze(-1)).flatten(-2)
    want = x_dequantized @ (module.weight[expert].double() * module.weight_scale[expert].double()).T
    limit = 1e-5 * float(want.abs().max()) + 1e-30
    error = float((got - want).abs().max())
    if not error <= limit:
        raise VerificationError(
            f"{name}: the INT8 kernel is off by {error:.3g}, allowed {limit:.3g}",
            "report the card, its driver and this shape; another kernel can be put first in kernels/registry.py",
        )


def reports(result: Result) -> list[dict[str, Any]]:
    """What every rank has to report, by rank; every rank must call it."""
    return result.loaded.files.ranks.world.objects(as_json(result))


def require(found: list[dict[str, Any]]) -> None:
    """Raise what is wrong with the reports of all ranks.

    Raises:
        VerificationError: a GEMM that the files hold in INT8 ran otherwise or never, or logits are not finite.
    """
    items, expected = [], sum(report["int8"]["expected"] for report in found)
    for rank, report in enumerate(found):
        where = f"rank {rank}, " if len(found) > 1 else ""
        items += [f"{where}{name}: ran in floating point" for name in report["int8"]["fallbacks"]]
        items += [f"{where}{name}: never ran in INT8" for name in report["int8"]["missing"]]
    if items:
        raise VerificationError(
            f"{len(items)} of {expected} GEMMs that the files hold in INT8 did not run in INT8",
            "the runtime or a patched model bypasses INT8 layers; run again without patches and report it",
            items=items,
        )
    if not all(report["forward"]["finite"] for report in found):
        raise VerificationError("the logits of the prompt are not finite", "compare with --dtype float32")


def as_json(result: Result) -> dict[str, Any]:
    """The machine-readable report of this rank."""
    loaded, plan, ranks = result.loaded, result.loaded.memory, result.loaded.files.ranks
    layers = {row.key.layer for row in loaded.planned if row.key.layer is not None}
    return {
        "passed": result.passed,
        "form": loaded.files.form,
        "architecture": loaded.files.arch.name,
        "mesh": ranks.mesh.sizes,
        "rank": {"rank": ranks.rank, **ranks.at._asdict(), "layers": sorted(layers), "experts": loaded.files.experts},
        "expert_load": loads(loaded.model),
        "device": {
            "name": loaded.device.name,
            "arch": loaded.device.arch,
            "family": loaded.device.family,
            "stack": loaded.device.stack,
        },
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "checksums": {
            "tensors": len(loaded.checked.names),
            "files": len(loaded.checked.files),
            "bytes": loaded.checked.nbytes,
        },
        "changed_since": [
            event._asdict() for event in since(loaded.files.root, loaded.files.environments, ranks.mesh.world)
        ],
        "unused_tensors": list(loaded.unused),
        "memory": {
            "planned": {**dict(plan.rows()), "total": plan.total},
            "free_before": plan.free,
            "used_before": result.memory_before,
            "used_after": result.memory_after,
            "peak": result.memory_peak,
            "kv_cache": result.cache,
            "kv_cache_measured": result.cache_bytes,
        },
        "forward": {"logits_shape": list(result.logits_shape), "finite": result.logits_finite},
        "generated": {
            "text": result.text,
            "tokens": list(result.generated.tokens),
            "stopped": result.generated.stopped,
        },
        "prefill_runs": result.prefill,
        "gemms": [asdict(row) for row in result.rows],
        "int8": {**asdict(result.verdict), "run": result.verdict.forward + result.verdict.self_tested},
    }
