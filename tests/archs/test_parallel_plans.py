"""How our roles split, held against transformers' own tensor- and expert-parallel plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from quantkit.archs import Architecture, Split, architecture_for
from quantkit.archs.modeling import build_skeleton, load_config, parameter_key
from tests.families import FAMILY_NAMES

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="plans of older transformers lack rows"
)

Tiny = Callable[[str], Path]

STYLES: Mapping[str, Split] = {
    "colwise": Split.COL,
    "packed_colwise": Split.COL,
    "colwise_gather_output": Split.COL,  # as colwise, and the whole output is wanted at once
    "embedding_rowwise": Split.COL,  # rows of the table are the vocabulary
    "rowwise": Split.ROW,
    "rowwise_split_input": Split.ROW,
    "replicated_with_grad_allreduce": Split.REP,
    "mla_kv_a_proj": Split.REP,
}

COMMUNICATION = ("moe_tp_experts", "ep_dispatch_experts", "ep_router")
"""Styles that split no parameter: how a module's inputs and outputs travel."""

WE_REPLICATE = {
    r"linear_attn\.": "transformers splits these to compute parts and gathers every output at once: the same numbers, "
    "but the recurrent state is not split; we keep linear attention whole",
}
"""Roles that transformers splits and we do not, with the reason."""

EVERYWHERE = {"embed": "transformers replicates the table; split on the vocabulary it costs 1/tp of the memory"}

WE_SPLIT: Mapping[str, Mapping[str, str]] = {
    "qwen2_moe": {r"shared\.": "its plan forgets the shared expert that Qwen3-Next's plan, the same block, splits"},
    "deepseek_v3": {r"mla\.q_b|mla\.kv_b|attn\.o": "its plan leaves attention out; V3.2's splits it as we do"},
    "kimi_k2": {r"mla\.q_b|mla\.kv_b|attn\.o": "as DeepSeek-V3"},
    "deepseek_v4": {
        r"mla\.q_b|attn\.": "its plan replicates attention; DeepSeek's own code splits heads and groups as we do",
        r"shared\.": "its plan finds them too small to split; they are a gated MLP like any other",
    },
    "glm4_moe_lite": {r"shared\.": "its plan forgets the shared expert, a gated MLP like the dense ones"},
    "minimax_m2": {r"attn\.[qk]_norm": "transformers gathers q and k before their full-width norms; we all-reduce"},
    "olmoe": {r"attn\.[qk]_norm": "as MiniMax-M2"},
    "minimax_m3": {
        r"mlp\.|shared\.": "its plan leaves the dense and shared MLPs out; they are gated MLPs like any other",
        r"indexer\.q": "each index head selects for one kv head, so it goes where that goes",
    },
    "gpt_oss": {r".": "transformers has no tensor-parallel plan for it, only an expert-parallel one"},
}
"""Roles that we split and transformers does not, by family, with the reason."""


@cache
def _parameters(folder: Path) -> tuple[Any, Architecture, Mapping[str, str]]:
    """transformers' config, our record, and parameter -> role of the tiny model."""
    config = load_config(folder)
    arch = architecture_for({"model_type": config.model_type})
    names = [name for name, _ in build_skeleton(config, dtype=torch.float32).named_parameters()]
    return config, arch, {name: parameter_key(arch, name).role for name in names}


def _roles_of_plan(roles: Mapping[str, str], plan: Mapping[str, str] | None) -> dict[str, str]:
    """Role -> style for every parameter that a plan of transformers names."""
    found = {}
    for name, role in roles.items():
        stem = re.sub(r"\.(weight|bias)$", "", name.removeprefix("model."))
        style = (plan or {}).get(re.sub(r"layers\.\d+\.", "layers.*.", stem))
        if style and style not in COMMUNICATION:
            found[role] = style
    return found


def _our_splits(arch: Architecture, roles: Mapping[str, str]) -> set[str]:
    return {role for role in roles.values() if arch.role(role).split is not Split.REP}


def _is_known(role: str, patterns: Iterable[str]) -> bool:
    return any(re.match(pattern, role) for pattern in patterns)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_tensor_parallel_plan(tiny: Tiny, family: str) -> None:
    config, arch, roles = _parameters(tiny(family))
    theirs = _roles_of_plan(roles, {**(config.base_model_tp_plan or {}), "lm_head": "colwise_gather_output"})
    wrong = {
        role: (style, arch.role(role).split)
        for role, style in theirs.items()
        if STYLES[style] is not arch.role(role).split and not _is_known(role, WE_REPLICATE)
    }
    assert wrong == {}
    documented = [*EVERYWHERE, *WE_SPLIT.get(family, {})]
    assert [role for role in _our_splits(arch, roles) - theirs.keys() if not _is_known(role, documented)] == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_expert_parallel_plan(tiny: Tiny, family: str) -> None:
    """What their plan spreads over ranks is what we hold one of for each expert, and the other way round."""
    config, arch, roles = _parameters(tiny(family))
    theirs = _roles_of_plan(roles, config.base_model_ep_plan)
    assert set(theirs.values()) <= {"grouped_gemm"}
    assert theirs.keys() == {role for role in roles.values() if arch.role(role).per_expert}


def test_documented_differences_still_exist(tiny: Tiny) -> None:
    """A row that nothing needs any more misleads."""
    for family, rows in WE_SPLIT.items():
        config, arch, roles = _parameters(tiny(family))
        left = _our_splits(arch, roles) - _roles_of_plan(roles, config.base_model_tp_plan).keys()
        for pattern in rows:
            assert any(re.match(pattern, role) for role in left), (family, pattern)
    config, _, roles = _parameters(tiny("qwen3_next"))
    assert any(_is_known(role, WE_REPLICATE) for role in _roles_of_plan(roles, config.base_model_tp_plan))
