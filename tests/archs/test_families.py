"""Every family against transformers: names, values, logits, roles and sizes, on tiny models in published names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from quantkit.archs import Key, Kind, Split, architecture_for
from quantkit.archs.assemble import rows_in_fused
from quantkit.archs.modeling import build_skeleton, load_config, parameter_key, parameter_value, set_tensor
from quantkit.checkpoint.reader import Source
from tests.families import FAMILIES, FAMILY_NAMES

Tiny = Callable[[str], Path]

PUBLISHED = {
    "llama": ["model.layers.0.mlp.gate_proj.weight", "lm_head.weight"],
    "qwen2": ["model.layers.0.self_attn.q_proj.bias"],
    "qwen3": ["model.layers.0.self_attn.q_norm.weight"],
    "gemma2": ["model.layers.0.pre_feedforward_layernorm.weight", "model.layers.0.post_feedforward_layernorm.weight"],
    "gemma3_vl": [
        "language_model.model.layers.0.self_attn.q_norm.weight",
        "multi_modal_projector.mm_input_projection_weight",
    ],
    "phi3": ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"],
    "mixtral": ["model.layers.2.block_sparse_moe.experts.4.w3.weight", "model.layers.2.block_sparse_moe.gate.weight"],
    "qwen2_moe": ["model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.mlp.experts.4.gate_proj.weight"],
    "qwen3_moe": ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate_proj.weight"],
    "qwen3_next": ["model.layers.0.linear_attn.in_proj_qkvz.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"],
    "qwen3_5_moe": [
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.experts.down_proj",
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.fc.weight",
    ],
    "deepseek_v2": ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"],
    "deepseek_v3": [
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.5.down_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.shared_head.head.weight",
    ],
    "deepseek_v32": ["model.layers.0.self_attn.indexer.wq_b.weight", "model.layers.0.self_attn.indexer.k_norm.bias"],
    "deepseek_v4": [
        "embed.weight",
        "head.weight",
        "hc_head_fn",
        "layers.0.attn.wq_a.weight",
        "layers.0.attn.kv_norm.weight",
        "layers.0.attn.attn_sink",
        "layers.0.ffn.gate.tid2eid",
        "layers.0.hc_attn_fn",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.indexer.compressor.wkv.weight",
        "layers.1.ffn.gate.bias",
        "layers.1.ffn.experts.4.w1.weight",
    ],
    "glm4": ["model.layers.0.post_self_attn_layernorm.weight", "model.layers.0.mlp.gate_up_proj.weight"],
    "glm4_moe": ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.enorm.weight"],
    "minimax_m2": [
        "model.layers.0.block_sparse_moe.e_score_correction_bias",
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
    ],
    "minimax_m3": [
        "language_model.model.layers.1.block_sparse_moe.experts.4.w1.weight",
        "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight",
        "language_model.model.layers.1.self_attn.index_q_proj.weight",
        "language_model.lm_head.weight",
        "vision_tower.vision_model.pre_layrnorm.weight",
        "patch_merge_mlp.linear_1.weight",
    ],
    "gpt_oss": ["model.layers.0.mlp.router.bias", "model.layers.0.self_attn.sinks"],
    "ernie4_5_moe": ["model.layers.1.mlp.moe_statics.e_score_correction_bias"],
    "olmoe": ["model.layers.0.self_attn.k_norm.weight", "model.layers.0.mlp.experts.4.up_proj.weight"],
}
"""Names that real checkpoints have and the tiny ones must have too, or these tests would test nothing."""

NEVER_QUANTIZED = (Kind.ROUTER, Kind.NORM, Kind.EMBEDDING, Kind.VECTOR, Kind.OPAQUE)

KEPT_LINEARS = re.compile(r"mla\.(q_a|kv_a)|indexer\.|linear_attn\.|compressor\.|attn\.o_a")
"""GEMMs that the default recipe leaves in the source's dtype."""


def _reference(family: str, folder: Path, into: Path) -> nn.Module:
    """The model as transformers itself loads the checkpoint, in float32."""
    row = FAMILIES[family]
    if row.retype:
        folder = Path(shutil.copytree(folder, into / family))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": row.model_type}))
    model: nn.Module = getattr(transformers, row.model_class).from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _filled_skeleton(source: Source) -> nn.Module:
    """Our skeleton with every parameter and stored buffer built from the checkpoint by key."""
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    for name in model.state_dict():
        key = parameter_key(source.arch, name)
        if key == Key(None, "lm_head") and source.tied:
            value = source.get(Key(None, "embed"))
        else:
            value = parameter_value(source.arch, source.dims, name, source.get)
        set_tensor(model, name, value.float())
    return model


def _ids(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_names_are_the_published_ones(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    names = set(source.index.names)
    assert [name for name in PUBLISHED.get(family, []) if name not in names] == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_tensor_and_parameter_has_a_role(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    source.require_classified()
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    unknown = [name for name in model.state_dict() if source.arch.parse(name) is None]
    assert unknown == []
    whole = transformers.AutoConfig.for_model(FAMILIES[family].model_type).__class__.from_pretrained(source.root)
    with torch.device("meta"):
        original = getattr(transformers, FAMILIES[family].model_class)(whole)
    assert [name for name in original.state_dict() if source.arch.parse(name) is None] == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_both_spellings_parse_to_the_same_keys(tiny: Tiny, family: str) -> None:
    """What the model needs and what the checkpoint stores are one set once fused and stacked forms are resolved."""
    source = Source(tiny(family))
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    wanted = {_unfused(source, parameter_key(source.arch, name)) for name in model.state_dict()}
    stored = {_unfused(source, key) for key in source.entries if not source.dims.is_draft(key)}
    flat = lambda keys: {key for group in keys for key in group}  # noqa: E731
    surplus = {key for key in flat(stored) - flat(wanted) if key.role != "vision"}
    missing = flat(wanted) - flat(stored) - ({Key(None, "lm_head")} if source.tied else set())
    assert surplus == set()
    assert missing == set()


def _unfused(source: Source, key: Key) -> tuple[Key, ...]:
    role = source.arch.role(key.role)
    experts = range(source.dims.experts) if role.per_expert and key.expert is None else [key.expert]
    return tuple(key._replace(role=part, expert=e) for part in role.parts or (role.name,) for e in experts)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_logits_are_bit_identical_to_transformers(tiny: Tiny, family: str, tmp_path: Path) -> None:
    source = Source(tiny(family))
    ids = _ids(source.dims.vocab)
    with torch.no_grad():
        expected = _reference(family, source.root, tmp_path)(input_ids=ids).logits
        actual = _filled_skeleton(source)(input_ids=ids).logits
    assert expected.std() > 0.1
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_only_gemms_of_the_layers_are_quantized(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    quantized = set()
    for key, entry in source.entries.items():
        role = source.arch.role(key.role)
        if role.kind in NEVER_QUANTIZED:
            assert not role.quantize, entry.name
        elif not KEPT_LINEARS.match(role.name):
            assert role.quantize, entry.name
            assert key.layer is not None
            quantized.add(role.name)
        if "norm" in ".".join(entry.name.split(".")[-2:-1]) and role.kind is not Kind.OPAQUE:
            assert role.kind is Kind.NORM, entry.name
    assert "attn.o" in quantized
    assert source.dims.experts == 0 or "expert.down" in quantized


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_matrix_of_a_layer_is_a_gemm_with_a_named_input(tiny: Tiny, family: str) -> None:
    """By transformers' modules, not by names: each nn.Linear and each 3-D experts parameter of a decoder layer."""
    source = Source(tiny(family))
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts = {name for name, value in model.named_parameters() if ".experts." in name and value.ndim == 3}
    for name in linears | experts:
        key = parameter_key(source.arch, name)
        role = source.arch.role(key.role)
        if key.layer is None:
            assert role.kind is Kind.EMBEDDING, name
        else:
            assert role.kind in (Kind.LINEAR, Kind.ROUTER), name
            assert role.input, name


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_reads_a_norm_is_what_the_table_says(tiny: Tiny, family: str) -> None:
    """Scaling a norm and dividing every consumer by the same factors leaves the logits: no consumer is forgotten.

    The factors are powers of two, so that both sides of the product are exact.
    """
    source = Source(tiny(family))
    model = _filled_skeleton(source)
    ids = _ids(source.dims.vocab)
    scale = 2.0 ** torch.randint(-2, 3, (source.dims.hidden,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        scaled = 0
        for name, value in list(model.named_parameters()):
            key = parameter_key(source.arch, name)
            role = source.arch.role(key.role)
            if key.role in ("norm.input", "norm.pre_mlp"):
                set_tensor(model, name, (value + source.arch.norm_offset) * scale - source.arch.norm_offset)
                scaled += 1
            elif role.input in ("attn.in", "mlp.in") and key.part == "weight":
                transposed = role.per_expert and source.arch.experts_transposed
                set_tensor(model, name, value / (scale[:, None] if transposed else scale))
        actual = model(input_ids=ids).logits
    assert scaled == 2 * source.dims.layers
    assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_gemm_takes_over_the_scale_of_what_feeds_it(tiny: Tiny, family: str) -> None:
    """Rows of `fed_by` times s and columns of the GEMM over s leave the logits: smoothing pairs are real."""
    source = Source(tiny(family))
    parameters = {name: parameter_key(source.arch, name) for name in _filled_skeleton(source).state_dict()}
    consumers = {part: role for key in parameters.values() for part, role in _fed(source, key).items()}
    ids = _ids(source.dims.vocab)
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    for name, key in parameters.items():
        tied_head = key == Key(None, "lm_head") and source.tied
        if key.layer is None:
            value = source.get(Key(None, "embed") if tied_head else key)
        else:
            value = parameter_value(source.arch, source.dims, name, lambda k: _rescaled(source, k, consumers))
        set_tensor(model, name, value.float())
    with torch.no_grad():
        expected = _filled_skeleton(source)(input_ids=ids).logits
        actual = model(input_ids=ids).logits
    assert bool(consumers) is (family not in ("gpt_oss", "minimax_m3"))  # these clamp between up and down
    assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-4)


def _fed(source: Source, key: Key) -> dict[str, str]:
    """Feeder -> consumer for a key whose GEMM reads channels of one feeder of the same layer."""
    role = source.arch.role(key.role)
    latent = role.fed_by.startswith("mla.")
    gated = role.name.endswith(".down") and source.arch.gate_is_linear_in_up
    return {role.fed_by: role.name} if latent or gated else {}


def _rescaled(source: Source, key: Key, consumers: dict[str, str]) -> torch.Tensor:
    value = source.get(key).float().clone()
    role = source.arch.role(key.role)
    for part in role.parts or (role.name,):
        if part in consumers:
            rows = value.unbind(0) if source.is_stacked(key) else (value,)
            for matrix in rows:
                start, stop = (0, len(matrix))
                if role.parts:
                    start, stop = rows_in_fused(source.arch, source.dims, part, len(matrix))
                scale = _powers(stop - start)
                matrix[start:stop] *= scale if matrix.ndim == 1 else scale[:, None]
    if _fed(source, key) and key.part == "weight":
        value /= _powers(value.shape[-1])
    return value


def _powers(size: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, (size,), generator=torch.Generator().manual_seed(4))


def test_norm_offset_of_each_family_is_that_of_its_class(tiny: Tiny) -> None:
    """(1 + w) norms start at zero, plain ones at one."""
    for family in FAMILY_NAMES:
        config = load_config(tiny(family))
        model = transformers.AutoModelForCausalLM.from_config(config)
        fresh = model.model.layers[0].input_layernorm.weight
        offset = architecture_for({"model_type": config.model_type}).norm_offset
        assert torch.equal(fresh + offset, torch.ones_like(fresh)), family


EXPECTED_DIMS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "kv_heads": 2, "tied": False, "intermediate": 40, "experts": 0},
    "qwen2": {"head_dim": 12, "tied": True},
    "gemma2": {"head_dim": 16, "tied": True},
    "gemma3": {"tied": True},
    "phi3": {"head_dim": 12},
    "mixtral": {"experts": 5, "experts_per_token": 2, "moe_intermediate": 40, "shared_intermediate": 0},
    "qwen2_moe": {"experts": 5, "moe_intermediate": 24, "shared_intermediate": 56, "intermediate": 40},
    "qwen3_next": {"experts": 5, "shared_intermediate": 56, "query_rows": 32, "head_dim": 16},
    "qwen3_5_moe": {"shared_intermediate": 56, "query_rows": 32, "layers": 3, "vocab": 131, "experts": 5},
    "deepseek_v2": {"experts": 6, "shared_intermediate": 48, "q_lora_rank": 0, "kv_lora_rank": 24},
    "deepseek_v3": {"head_dim": 20, "v_head_dim": 10, "q_lora_rank": 20, "shared_intermediate": 48},
    "deepseek_v32": {"experts": 6, "head_dim": 20, "index_heads": 3, "index_head_dim": 16},
    "deepseek_v4": {
        "head_dim": 16,
        "v_head_dim": 0,
        "output_groups": 4,
        "output_lora_rank": 10,
        "stream_width": 144,
        "moe_intermediate": 24,
    },
    "glm4_moe_lite": {"experts": 5, "head_dim": 20, "v_head_dim": 10, "shared_intermediate": 24},
    "kimi_k2": {"experts": 5, "shared_intermediate": 24},
    "qwen3_moe": {"experts": 5, "moe_intermediate": 24, "shared_intermediate": 0},
    "glm4_moe": {"head_dim": 16, "experts": 5, "shared_intermediate": 48, "experts_per_token": 2},
    "glm_moe_dsa": {"experts": 5, "head_dim": 20, "v_head_dim": 10, "index_heads": 3},
    "minimax_m2": {"experts": 5, "moe_intermediate": 24, "intermediate": 0},
    "minimax_m3": {
        "experts": 5,
        "moe_intermediate": 24,
        "intermediate": 40,
        "shared_intermediate": 56,
        "index_heads": 2,
        "index_head_dim": 16,
    },
    "gpt_oss": {"experts": 5, "moe_intermediate": 32, "experts_per_token": 4},
    "ernie4_5_moe": {"experts": 5, "experts_per_token": 2, "shared_intermediate": 48, "tied": True},
    "olmoe": {"experts": 5, "moe_intermediate": 40, "head_dim": 12},
}


@pytest.mark.parametrize("family", EXPECTED_DIMS)
def test_sizes(tiny: Tiny, family: str) -> None:
    dims = Source(tiny(family)).dims
    assert {name: getattr(dims, name) for name in EXPECTED_DIMS[family]} == EXPECTED_DIMS[family]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_units_times_rows_are_the_shapes(tiny: Tiny, family: str) -> None:
    """The sizes that a mesh splits by are those of the tensors, for every split role, weights and biases."""
    source = Source(tiny(family))
    seen = set()
    for key, entry in source.entries.items():
        role = source.arch.role(key.role)
        if not role.unit or (key.part == "bias" and role.split is Split.ROW):
            continue
        members = role.parts or (role.name,)
        size = sum(source.dims.count(source.arch.role(p).unit) * source.dims.rows_per_unit(p) for p in members)
        shape = entry.canonical_shape[1:] if source.is_stacked(key) else entry.canonical_shape
        assert (shape[-1] if role.split is Split.ROW else shape[0]) == size, entry.name
        seen.add(role.name)
    assert {"embed", "attn.o"} <= seen


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_query_and_key_norms_split_when_they_are_wider_than_a_head(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    for key, entry in source.entries.items():
        if key.role in ("attn.q_norm", "attn.k_norm"):
            per_head = entry.shape == (source.dims.head_dim,)
            assert source.arch.role(key.role).split is (Split.REP if per_head else Split.COL), entry.name


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if EXPECTED_DIMS.get(name, {}).get("experts")])
def test_gate_stands_before_up_in_canonical_form(tiny: Tiny, family: str) -> None:
    """By transformers' own gate: it shuts where the rows that we call `gate` are very negative, and only there."""
    source = Source(tiny(family))
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    name, module = next((name, module) for name, module in model.named_modules() if name.endswith("mlp.experts"))
    shape = (source.dims.experts, source.dims.moe_intermediate)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    shut = torch.full(shape, -1e4)
    for parts, passing in (((shut, noise), False), ((noise, shut), True)):
        canonical = torch.cat(parts, 1)[..., None]
        stored = parameter_value(source.arch, source.dims, f"{name}.gate_up_proj", lambda _, value=canonical: value)
        assert bool(module._apply_gate(stored.reshape(shape[0], -1)).all()) is passing


def test_parts_are_cut_out_of_what_is_stored_fused(tiny: Tiny) -> None:
    """Against slices written by hand from the class's code: halves, q before k before v, interleaved and transposed."""
    phi = Source(tiny("phi3"))
    raw = load_file(phi.root / "model.safetensors")
    qkv = raw["model.layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(phi.get(Key(1, "attn.q")), qkv[:48])
    assert torch.equal(phi.get(Key(1, "attn.k")), qkv[48:72])
    assert torch.equal(phi.get(Key(1, "attn.v")), qkv[72:])
    assert torch.equal(phi.get(Key(1, "mlp.up")), raw["model.layers.1.mlp.gate_up_proj.weight"][40:])
    qwen = Source(tiny("qwen3_5_moe"))
    raw = load_file(qwen.root / "model.safetensors")
    stacked = raw["model.language_model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(qwen.get(Key(2, "expert.gate", 4)), stacked[4, :24])
    assert torch.equal(qwen.get(Key(2, "expert.up", 4)), stacked[4, 24:])
    gpt = Source(tiny("gpt_oss"))
    raw = load_file(gpt.root / "model.safetensors")
    experts = "model.layers.2.mlp.experts"
    assert torch.equal(gpt.get(Key(2, "expert.gate", 3)), raw[f"{experts}.gate_up_proj"][3].T[0::2])
    assert torch.equal(gpt.get(Key(2, "expert.up", 3)), raw[f"{experts}.gate_up_proj"][3].T[1::2])
    assert torch.equal(gpt.get(Key(2, "expert.down", 3)), raw[f"{experts}.down_proj"][3].T)
    assert torch.equal(gpt.get(Key(2, "expert.up", 3, "bias")), raw[f"{experts}.gate_up_proj_bias"][3][1::2])
    assert torch.equal(gpt.get(Key(2, "expert.down", 3, "bias")), raw[f"{experts}.down_proj_bias"][3])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_tied_is_what_the_tensors_say(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    heads = [name for name in source.index.names if name.endswith("lm_head.weight") or name == "head.weight"]
    assert source.tied == (not heads)
    assert source.tied == source.dims.tied


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if FAMILIES[name].draft])
def test_draft_layers_are_recognised(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    drafts = {entry.name for key, entry in source.entries.items() if source.dims.is_draft(key)}
    pattern = r"^mtp\." if FAMILIES[family].draft == "module" else r"^model\.layers\.3\."
    assert drafts == {name for name in source.index.names if re.match(pattern, name)}
    assert drafts


def test_correction_biases_stay_float32(tiny: Tiny) -> None:
    for family in ("deepseek_v3", "glm4_moe", "minimax_m2", "minimax_m3", "ernie4_5_moe"):
        source = Source(tiny(family))
        corrections = [entry for key, entry in source.entries.items() if key.role == "router.correction"]
        assert {entry.dtype for entry in corrections} == {"F32"}
        assert "router.correction" in source.arch.float32_parameters
        value = source.get(corrections[0].key)
        assert not torch.equal(value, value.bfloat16().float())  # else keeping it would prove nothing
