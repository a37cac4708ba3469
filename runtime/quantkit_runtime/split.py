"""Tensor and expert parallelism on transformers' own modules.

`localize` gives a skeleton the shapes and head counts of one rank, by the role table; `connect` adds what the ranks
say to each other. Column-parallel layers need nothing; row-parallel ones add their outputs; embedding and output head
are split over the vocabulary; norms over all heads at once share their sum of squares. What the role table replicates
(linear attention, latent down-projections, most indexers) runs whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Architecture, Kind, Split
from quantkit.archs.modeling import parameter_key
from quantkit.archs.split import local_shape
from quantkit_runtime import experts
from quantkit_runtime.layers import Int8Linear
from quantkit_runtime.parallel import Team
from quantkit_runtime.plan import Planned
from quantkit_runtime.shards import ModelFiles


def localize(model: nn.Module, files: ModelFiles) -> None:
    """Make a skeleton on `meta` that of this rank: shapes of parameters, counts of heads in modules and config."""
    if files.ranks.stage.size == 1:
        return
    arch, tp = files.arch, files.ranks.mesh.tp
    for name, value in model.state_dict(keep_vars=True).items():
        key = parameter_key(arch, name)
        turned = arch.experts_transposed and value.ndim == 3 and arch.role(key.role).per_expert
        canonical = value.transpose(1, 2) if turned else value
        shape = local_shape(arch, files.whole_dims, files.dims, key, tuple(canonical.shape), tp)
        if shape != list(canonical.shape):
            local = torch.empty(shape, dtype=value.dtype, device="meta")
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[leaf] = nn.Parameter(local.transpose(1, 2) if turned else local, requires_grad=False)
    if tp > 1:
        _count_heads(model, files)


def _count_heads(model: nn.Module, files: ModelFiles) -> None:
    arch, dims = files.arch, files.dims
    heads = {
        "num_heads": dims.heads,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "num_key_value_groups": dims.heads // dims.kv_heads,
    }
    groups = {"n_groups": dims.output_groups, "o_groups": dims.output_groups} if dims.output_groups else {}
    counts = {"heads": heads, "kv_heads": heads, "index_heads": {"num_heads": dims.index_heads}}
    for name, module in list(model.named_modules()):
        for leaf in module._parameters:
            role = arch.role(parameter_key(arch, f"{name}.{leaf}").role)
            if role.split is Split.COL and role.unit in counts:
                owner = name if leaf not in ("weight", "bias") else name.rpartition(".")[0]
                _set_present(model.get_submodule(owner), counts[role.unit])
            elif role.split is Split.COL and role.unit == "output_groups":
                _set_present(module, groups)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # of the whole table; it only matters to gradients
    for config in {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }.values():
        if getattr(config, "head_dim", None) is None:
            config.head_dim = dims.head_dim  # or it would be hidden / heads of this rank
        _set_present(config, {**heads, **groups})


def _set_present(holder: Any, values: dict[str, int]) -> None:
    for name, value in values.items():
        if isinstance(getattr(holder, name, None), int):
            setattr(holder, name, value)


def connect(
    model: Any, files: ModelFiles, planned: Iterable[Planned], device: torch.device, dispatch: bool | None
) -> None:
    """Add the collectives to a loaded model; every rank of the mesh must call it."""
    arch, tp = files.arch, files.ranks.tp
    for row in planned:
        role = arch.role(parameter_key(arch, row.name).role)  # of tied ends each has its own
        owner, _, leaf = row.name.rpartition(".")
        module = model.get_submodule(owner)
        if role.per_expert:
            if leaf == "down_proj":
                dims = files.whole_dims
                placed = experts.Placement(files.ranks, dims.experts, dims.experts_per_token, dispatch)
                experts.spread(module, placed, device)
        elif tp.size > 1 and leaf == "weight":
            _connect_dense(arch, role.name, module, tp, files.whole_dims.vocab)
    for module in model.modules():
        if isinstance(module, Int8Linear) and module.team.size > 1 and module.bias is not None:
            module.bias = module.team.sum(module.bias)  # the first rank's file has it, the others' hold zeros


def _connect_dense(arch: Architecture, role_name: str, module: Any, tp: Team, vocab: int) -> None:
    role = arch.role(role_name)
    if role.kind is Kind.EMBEDDING and isinstance(module, nn.Embedding):
        module.__dict__["forward"] = _vocabulary_parallel(module, tp)  # shadows the method
    elif role.kind is Kind.EMBEDDING:
        module.register_forward_hook(lambda _, __, logits: tp.gather(logits, -1)[..., :vocab])
    elif role.kind is Kind.NORM and role.split is Split.COL:
        module.__dict__["forward"] = _norm_over_heads(module, tp)
    elif role.split is Split.ROW and not isinstance(module, Int8Linear):
        module.register_forward_hook(lambda _, __, out: tp.sum(out))


def _vocabulary_parallel(table: nn.Embedding, tp: Team) -> Callable[[Tensor], Tensor]:
    """Rows of other ranks count zero, so the sum is the row."""
    forward, rows = table.forward, table.weight.shape[0]

    def split(input_ids: Tensor) -> Tensor:
        local = input_ids - tp.index * rows
        outside = (local < 0) | (local >= rows)
        return tp.sum(forward(local.clamp(0, rows - 1)).masked_fill(outside.unsqueeze(-1), 0))

    return split


def _norm_over_heads(norm: Any, tp: Team) -> Callable[[Tensor], Tensor]:
    """RMSNorm over the heads of all ranks. Replicated heads weigh the same on each side of the mean."""
    eps = getattr(norm, "variance_epsilon", None) or norm.eps

    def split(hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        mean = tp.sum(x.pow(2).mean(-1, keepdim=True)) / tp.size
        normed: Tensor = norm.weight * (x * torch.rsqrt(mean + eps)).to(hidden_states.dtype)
        return normed

    return split
