"""Perplexity and KL divergence of quantized models against their source, on the same windows, paired.

Every window goes through the source and all candidates before the next one, so nothing is stored and each difference is
taken within a window. All in float32 (sums in float64):
- perplexity: as `quantkit_instruments.perplexity` defines it, exp(mean negative log-likelihood) over windows;
- KL: mean over predicted positions of KL(P_source || P_candidate) over the full vocabulary, in nats;
- standard errors: of the mean over windows, of the paired differences where two models are compared (delta method).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

from quantkit_runtime.device import resolve
from quantkit_runtime.graft import load_model

_POSITIONS = 64
"""Rows of logits whose distributions are taken at once: 64 x 50,000 float32 values are 13 MB."""


def load_runtime(folder: Path, device: str = "cpu") -> nn.Module:
    """Any folder that quantkit-runtime loads; its INT8 products are exact."""
    return load_model(folder, resolve(device), torch.float32, verify=False).model.eval()


def load_compressed_tensors(folder: Path, device: str = "cpu") -> nn.Module:
    """A compressed-tensors folder in transformers: dequantized weights, activations rounded on the fly per token."""
    from transformers import AutoModelForCausalLM

    # Not moved afterwards: its hooks would hand the outputs back to the device that it was loaded on.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)  # unpacks the weights
    _require_active(model, folder)
    return model


def _require_active(model: nn.Module, folder: Path) -> None:
    """A loader that forgot the activations would flatter everybody: rounding must change a layer's output."""
    layer = next((m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None), None)
    if layer is None:
        raise SystemExit(f"error: {folder.name}: no module has a quantization scheme")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, layer.in_features, generator=generator).to(layer.weight.device)
    with torch.no_grad():
        rounded, plain = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    if torch.equal(rounded, plain):
        raise SystemExit(f"error: {folder.name}: activations are not quantized by this version of compressed-tensors")


LOADERS: Mapping[str, Callable[[Path, str], nn.Module]] = {
    "compressed-tensors": load_compressed_tensors,
    "quantkit-runtime": load_runtime,
}


def load_source(folder: Path, device: str = "cpu") -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)


# -------------------------------------------------------------------------------------------------- routing


class Routing:
    """Experts that each token was sent to, by layer, taken from what enters a layer's experts."""

    def __init__(self, model: nn.Module) -> None:
        self.chosen: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = next((v for v in (*args, *kwargs.values()) if v.dtype in (torch.int64, torch.int32)), None)
            if index is None:
                raise SystemExit(f"error: {name} is not given the chosen experts by this version of transformers")
            self.chosen[name] = index.sort(dim=-1).values

        return keep

    def agreement(self, other: Routing) -> dict[str, float]:
        """Share of the source's choices (`self`) that `other` made as well, by layer."""
        found = {}
        for name, mine in self.chosen.items():
            same = (mine.unsqueeze(-1) == other.chosen[name].unsqueeze(-2)).any(-1)
            found[name] = float(same.double().mean())
        return found


# --------------------------------------------------------------------------------------------------- scores


@dataclass
class Windows:
    """Per-window values of one candidate: mean negative log-likelihood, mean KL, share of equal likeliest tokens."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    routing: dict[str, list[float]] = field(default_factory=dict)


def score(
    source: nn.Module, candidates: Mapping[str, nn.Module], windows: Tensor
) -> tuple[Windows, dict[str, Windows]]:
    """Run windows int64 `[W, L]`, on the models' device, through all models."""
    base, rows = Windows(), {name: Windows() for name in candidates}
    routing = {name: Routing(model) for name, model in {"": source, **candidates}.items()}
    with torch.no_grad():
        for ids in windows.split(1):
            target = ids[0, 1:]
            reference = logits(source, ids)
            base.nll.append(_nll(reference, target))
            for name, model in candidates.items():
                _add(rows[name], reference, logits(model, ids), target)
                for layer, share in routing[""].agreement(routing[name]).items():
                    rows[name].routing.setdefault(layer, []).append(share)
    return base, rows


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Float32 `[L - 1, V]`: predictions of every token but the first."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    if not bool(torch.isfinite(found).all()):
        raise SystemExit("error: a model's logits are not finite")
    return found


def _nll(values: Tensor, target: Tensor) -> float:
    return float(nn.functional.cross_entropy(values, target, reduction="none").double().mean())


def _add(row: Windows, reference: Tensor, values: Tensor, target: Tensor) -> None:
    divergence = 0.0
    for p, q in zip(reference.split(_POSITIONS), values.split(_POSITIONS), strict=True):
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    row.nll.append(_nll(values, target))
    row.kl.append(divergence / len(target))
    row.top1.append(float((reference.argmax(-1) == values.argmax(-1)).double().mean()))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def compare(base: Windows, row: Windows) -> dict[str, Any]:
    """Perplexity, its change with the paired standard error, KL, agreement."""
    change, change_error = mean_and_error([a - b for a, b in zip(row.nll, base.nll, strict=True)])
    kl, kl_error = mean_and_error(row.kl)
    return {
        "perplexity": math.exp(mean_and_error(row.nll)[0]),
        "change_percent": 100 * math.expm1(change),
        "change_percent_error": 100 * math.exp(change) * change_error,
        "kl": kl,
        "kl_error": kl_error,
        "top1_agreement": mean_and_error(row.top1)[0],
        "routing_agreement_by_layer": {layer: mean_and_error(shares)[0] for layer, shares in row.routing.items()},
    }


def kl_difference(ours: Windows, theirs: Windows) -> tuple[float, float]:
    """Mean of the paired differences of KL and its standard error; negative: ours is closer to the source."""
    return mean_and_error([a - b for a, b in zip(ours.kl, theirs.kl, strict=True)])


def show(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Tables of `rows[candidate][kind]`."""
    kinds = list(next(iter(rows.values())))
    for title, text in {
        "change of perplexity in %, paired standard error": lambda row: (
            f"{row['change_percent']:+.2f} ± {row['change_percent_error']:.2f}"
        ),
        "KL in 1e-3 nats": lambda row: f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}",
    }.items():
        print(f"\n{title}")
        common.table(["", *kinds], [[name, *(text(found[kind]) for kind in kinds)] for name, found in rows.items()])
