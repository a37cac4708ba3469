"""Each transform of each family leaves transformers' float model unchanged within rounding, or refuses with a reason.

A forgotten consumer must not pass: faults are planted for each kind of reader and writer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate.methods import method, view_of
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.refusals import refusals
from quantkit.checkpoint.transformed import TransformedSource
from quantkit.errors import UsageError
from quantkit.spec.transform import (
    RESIDUAL_NORMS,
    FoldNorm,
    RotateHeads,
    RotateResidual,
    ScalePair,
    Step,
    Transforms,
)
from tests.families import FAMILY_NAMES
from tests.transforms.conftest import REAL, logits, relative_error

Tiny = Callable[..., Path]

TOLERANCE = 1e-4
"""Relative error of float32 logits; what is measured is below 1e-5, a forgotten tensor gives 1e-2 and more."""

MODELS = (*FAMILY_NAMES, *REAL)

_SHARPENED = "a norm after the block multiplies"
_SEES = "how it reads or writes the residual stream is not described"
_GATED = "gate channel by channel"
_SHIFTED = "not linear in it"

REFUSED: dict[tuple[str, str], str] = {
    **{(family, "rotate"): _SHARPENED for family in ("gemma2", "gemma3", "gemma3_vl", "glm4")},
    **{(family, "rotate"): _SEES for family in ("qwen3_5", "qwen3_5_moe", "minimax_m3")},
    **{(family, "heads"): _GATED for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    **{(family, "up_down"): _SHIFTED for family in ("minimax_m3", "gpt_oss", "deepseek_v4")},
    ("deepseek_v4", "rotate"): _SEES,
    **{("deepseek_v4", name): "has 40 columns" for name in ("heads", "values")},
}
"""(family, transform) -> part of the reason. What is not listed must work."""


def _random_scale(source: Source, key: Key) -> Tensor:
    """A vector over an order of magnitude, different for every producer."""
    dims = source.dims
    length = {
        "attn.v": (dims.heads if dims.is_mla else dims.kv_heads) * dims.v_head_dim,
        "mlp.up": dims.intermediate,
        "shared.up": dims.shared_intermediate,
        "expert.up": dims.moe_intermediate,
        "mla.q_a_norm": dims.q_lora_rank,
        "mla.kv_a_norm": dims.kv_lora_rank,
    }.get(key.role, dims.hidden)
    seed = sum(ord(letter) * 31**index for index, letter in enumerate(key.shard_name)) % 2**31
    return torch.empty(length).uniform_(-1.2, 1.2, generator=torch.Generator().manual_seed(seed)).exp()


def _ups(source: Source) -> tuple[Step, ...]:
    roles = {key.role for key in source.entries}
    parents = {"mlp.up": "mlp.gate_up", "shared.up": "shared.gate_up", "expert.up": "expert.gate_up"}
    return tuple(ScalePair(producer=up, vectors="t") for up, fused in parents.items() if {up, fused} & roles)


def _norms(source: Source) -> tuple[Step, ...]:
    roles = {key.role for key in source.entries}
    wanted = ("norm.input", "norm.pre_mlp", "norm.final", "mla.q_a_norm", *(["mla.kv_a_norm"] * ("mla.kv_b" in roles)))
    return tuple(ScalePair(producer=norm, vectors="t") for norm in wanted if norm in roles)


TRANSFORMS: dict[str, Callable[[Source], tuple[Step, ...]]] = {
    "fold": lambda _: (FoldNorm(),),
    "rotate": lambda _: (FoldNorm(), RotateResidual(seed=5)),
    "heads": lambda _: (RotateHeads(seed=5),),
    "values": lambda _: (ScalePair(producer="attn.v", vectors="t"),),
    "up_down": _ups,
    "norms": _norms,
    "folded_norms": lambda source: (FoldNorm(), *_norms(source)),
}


def _view(source: Source, name: str) -> TransformedSource:
    steps = TRANSFORMS[name](source)
    return TransformedSource(source, Transforms(steps=steps), lambda _set, key: _random_scale(source, key))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("family", MODELS)
def test_float_model_is_unchanged_or_the_family_says_why(tiny: Tiny, family: str, name: str) -> None:
    source = Source(tiny(family))
    if reason := REFUSED.get((family, name)):
        with pytest.raises(UsageError) as caught:
            _view(source, name)
        assert any(reason in item for item in caught.value.items)
        return
    view = _view(source, name)
    assert any(view.is_transformed(key) for key in view.entries)
    assert relative_error(logits(view), logits(source)) < TOLERANCE


@pytest.mark.parametrize("family", MODELS)
def test_all_steps_together(tiny: Tiny, family: str) -> None:
    """Everything that the family allows, in one view, as recipes combine it."""
    source = Source(tiny(family))
    steps: list[Step] = []
    for name in ("values", "up_down", "rotate", "heads"):
        steps += () if (family, name) in REFUSED else TRANSFORMS[name](source)
    view = TransformedSource(source, Transforms(steps=tuple(steps)), lambda _set, key: _random_scale(source, key))
    assert relative_error(logits(view), logits(source)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_rotation_changes_every_matrix_at_the_residual_stream(tiny: Tiny, family: str) -> None:
    """The view is no identity: with the source's own weights in place of one matrix the model is another one."""
    source = Source(tiny(family))
    view = _view(source, "rotate")
    before, after = source.get(Key(0, "norm.input")).float(), view.get(Key(0, "norm.input"))
    assert torch.equal(after, torch.full_like(after, 1 - source.arch.norm_offset))
    assert relative_error(after, before) > 0.1
    embed = Key(None, "embed")
    assert relative_error(view.get(embed), source.get(embed).float()) > 0.5


FORGOTTEN = [
    ("deepseek_v3", Key(1, "router")),
    ("deepseek_v3", Key(1, "expert.gate", 3)),
    ("deepseek_v3", Key(2, "expert.down", 0)),
    ("deepseek_v3", Key(1, "shared.gate")),
    ("deepseek_v3", Key(1, "shared.down")),
    ("deepseek_v3", Key(0, "mla.kv_a")),
    ("deepseek_v3", Key(0, "mla.q_a")),
    ("deepseek_v3", Key(None, "lm_head")),
    ("deepseek_v32", Key(0, "indexer.k")),
    ("deepseek_v32", Key(0, "indexer.weights")),
    ("qwen2_moe", Key(0, "shared.router")),
    ("qwen2_moe", Key(0, "router")),
    ("gpt_oss", Key(0, "attn.o", None, "bias")),
    ("gpt_oss", Key(0, "expert.down", None, "bias")),
    ("qwen3_next", Key(0, "linear_attn.o")),
    ("qwen3_next", Key(0, "linear_attn.ba")),
    ("minimax_m2", Key(2, "router")),
]
"""One tensor that a wrong table would leave as it is."""


@pytest.mark.parametrize(("family", "key"), FORGOTTEN, ids=[f"{family}-{key.shard_name}" for family, key in FORGOTTEN])
def test_a_forgotten_tensor_is_caught(tiny: Tiny, family: str, key: Key) -> None:
    """Plants the fault: the comparison above must fail by a wide margin."""
    source = Source(tiny(family))
    view = _view(source, "rotate")

    def broken(wanted: Key) -> Tensor:
        found = view.get(wanted)
        if wanted == key:
            return source.get(key)
        if wanted.role == "expert.gate_up" and key.role == "expert.gate" and wanted.layer == key.layer:
            found = found.clone()
            width = source.dims.moe_intermediate
            found[key.expert, :width] = source.get(key)
        if wanted.role == key.role and wanted.expert is None and key.expert is not None and wanted.layer == key.layer:
            found = found.clone()
            found[key.expert] = source.get(key)
        return found

    assert relative_error(logits(view, broken), logits(source)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("role", ["router", "shared.up", "expert.up"])
def test_scaling_a_norm_without_one_consumer_is_caught(tiny: Tiny, family: str, role: str) -> None:
    source = Source(tiny(family))
    view = _view(source, "norms")
    layer = 2

    def broken(wanted: Key) -> Tensor:
        if wanted.layer == layer and wanted.role in (role, source.arch.role(role).fuse):
            return source.get(wanted)
        return view.get(wanted)

    assert relative_error(logits(view, broken), logits(source)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_draft_layers_forbid_what_they_read(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family, mtp=True))
    for name in ("fold", "rotate"):
        transforms = Transforms(steps=TRANSFORMS[name](source))
        assert any("draft layers" in reason for reason in refusals(source, transforms))
        assert list(refusals(source, transforms, without_drafts=True)) == []
    assert list(refusals(source, Transforms(steps=(ScalePair(producer="attn.v", vectors="t"),)))) == []


def test_a_norm_that_no_matrix_reads_is_refused(tiny: Tiny) -> None:
    """DeepSeek-V4's keys are cached as they leave their norm."""
    source = Source(tiny("deepseek_v4"))
    (reason,) = refusals(source, Transforms(steps=(ScalePair(producer="mla.kv_a_norm", vectors="t"),)))
    assert "mla.kv_a_norm is no norm that feeds matrices" in reason


def test_steps_out_of_order_are_refused(tiny: Tiny) -> None:
    source = Source(tiny("llama"))
    wrong = {
        "fold it just before": (RotateResidual(),),
        "norm.final multiplies": (FoldNorm(norms=("norm.input", "norm.pre_mlp")), RotateResidual()),
        "norm.input multiplies": (FoldNorm(), ScalePair(producer="norm.input", vectors="t"), RotateResidual()),
        "scale them first": (RotateHeads(), ScalePair(producer="attn.v", vectors="t")),
        "is no norm, no attn.v": (ScalePair(producer="attn.q", vectors="t"),),
        "no norm that feeds": (FoldNorm(norms=("attn.q_norm",)),),
    }
    for reason, steps in wrong.items():
        found = list(refusals(source, Transforms(steps=steps)))
        assert any(reason in item for item in found), (reason, found)


def test_a_model_type_without_a_record_is_refused(tiny: Tiny) -> None:
    source = Source(tiny("llama"))
    source.config = {**source.config, "model_type": "olmo2"}
    assert "has no record of its own" in next(refusals(source, Transforms(steps=(FoldNorm(norms=RESIDUAL_NORMS),))))


def test_a_family_without_the_vision_part_may_rotate(tiny: Tiny) -> None:
    """What forbids it is the tower, not the family's norms or its indexer."""
    source = Source(tiny("minimax_m3"))
    source.entries = {key: entry for key, entry in source.entries.items() if key.role != "vision"}
    assert relative_error(logits(_view(source, "rotate")), logits(source)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "deepseek_v3", "gemma2", "ernie4_5_moe"])
def test_balance_evens_out_the_inputs_of_down(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    view = view_of(source, [method("balance").options(name="balance")])
    assert relative_error(logits(view), logits(source)) < TOLERANCE
