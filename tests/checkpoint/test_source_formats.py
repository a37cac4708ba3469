"""Checkpoints in each native format, written with the safetensors package, opened through `Source`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.archs import Key
from quantkit.archs.modeling import parameter_value
from quantkit.checkpoint.reader import Source
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import InputError
from quantkit.recipe import load_recipe
from tests.checkpoint.native import (
    CONFIGS,
    PACKERS,
    TINY,
    assert_same_bits,
    fp8_block,
    fp8_block_e8m0,
    mxfp4_blocks,
    weight,
)
from tests.families import make_tiny

Tensors = dict[str, torch.Tensor]
EXPERTS, LAYERS = 16, range(1, 6)

HALF_STEPS = {"int8": 0.5 / 127, "int4": 0.5 / 7, "e4m3": 2**-4, "e2m1": 1 / 3}
"""Largest rounding error by the format of the values, relative to the largest value: E4M3 has 3 bits of mantissa;
E2M1 steps by 2 between 4 and 6, and an E8M0 scale leaves the largest value of a group between 3 and 6."""

PAYLOADS = {fmt: "e4m3" if "fp8" in fmt else "e2m1" if "fp4" in fmt else "int4" for fmt in PACKERS}
PAYLOADS["int8-channel"] = "int8"


@pytest.fixture(scope="module")
def tiny() -> Tensors:
    return load_file(TINY / "model.safetensors")


def write(folder: Path, tensors: Tensors, quantization: object = None, files: int = 1) -> Path:
    """A checkpoint of the tiny model's shape; with several files tensors are dealt out one by one, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    weight_map = {name: names[i % files] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name, home in weight_map.items() if home == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def expert_weights(tensors: Tensors) -> list[str]:
    return [name for name in tensors if ".mlp.experts." in name]


def pack(tensors: Tensors, names: Iterable[str], fmt: str) -> tuple[Tensors, dict[str, np.ndarray]]:
    """`tensors` with those of `names` in a native format, and what these decode to."""
    packed, decoded = dict(tensors), {}
    for name in names:
        parts, decoded[name] = PACKERS[fmt](packed.pop(name).double().numpy())
        packed |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    return packed, decoded


def stack(tensors: Tensors) -> tuple[Tensors, dict[str, np.ndarray]]:
    """`tensors` with the experts stacked and in gpt-oss' spelling of MXFP4, and what each expert decodes to."""
    packed = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    decoded = {}
    for layer in LAYERS:
        prefix = f"model.layers.{layer}.mlp.experts"
        for members, name in ((("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj")):
            w = [torch.cat([tensors[f"{prefix}.{e}.{m}.weight"] for m in members]) for e in range(EXPERTS)]
            parts, values = mxfp4_blocks(torch.stack(w).double().numpy())
            packed |= {f"{prefix}.{name}_{part}": tensor for part, tensor in parts.items()}
            for e in range(EXPERTS):
                for member, rows in zip(members, np.split(values[e], len(members)), strict=True):
                    decoded[f"{prefix}.{e}.{member}.weight"] = rows
    return packed, decoded


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("fmt", PACKERS)
def test_a_whole_checkpoint(tmp_path: Path, tiny: Tensors, fmt: str, files: int) -> None:
    names = expert_weights(tiny)
    packed, decoded = stack(tiny) if fmt == "mxfp4-blocks" else pack(tiny, names, fmt)
    source = Source(write(tmp_path / "m", packed, CONFIGS[fmt], files))
    source.require_classified()
    assert source.notes == []
    assert source.formats[fmt] == (2 * len(LAYERS) if fmt == "mxfp4-blocks" else len(names))
    assert source.formats["plain"] == len(tiny) - len(names)
    for name in names:
        key = source.arch.parse(name)
        assert key is not None
        found = source.get(key)
        assert_same_bits(found.numpy(), decoded[name])
        error = np.abs(found.numpy() - tiny[name].float().numpy()).max() / np.abs(decoded[name]).max()
        assert error <= HALF_STEPS[PAYLOADS[fmt]] * 1.01  # the scale itself was rounded
    router = Key(1, "router")
    assert torch.equal(source.get(router), tiny["model.layers.1.mlp.gate.weight"])
    for entry in source.entries.values():
        assert entry.dtype == ("BF16" if entry.format.name == "plain" and "correction" not in entry.name else "F32")
    source.close()


def test_scales_in_another_file(tmp_path: Path, tiny: Tensors) -> None:
    packed, decoded = pack(tiny, expert_weights(tiny), "fp8-block")
    source = Source(write(tmp_path / "m", packed, CONFIGS["fp8-block"], files=2))
    apart = 0
    for name, wanted in decoded.items():
        scale = name.replace(".weight", ".weight_scale_inv")
        apart += source.index.file_of[name] != source.index.file_of[scale]
        assert_same_bits(source.get(source.arch.parse(name)).numpy(), wanted)
    assert apart > 10


@pytest.mark.parametrize("block", [(128, 256), (2**40, 2**40)])
def test_blocks_beyond_the_weight_are_cut_to_it(tmp_path: Path, tiny: Tensors, block: tuple[int, int]) -> None:
    """A config may name any number; memory follows the weight."""
    parts, decoded = fp8_block(weight((96, 160)), *(96, 160))
    name = "model.layers.6.eh_proj"
    extra = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    config = CONFIGS["fp8-block"] | {"weight_block_size": list(block)}
    source = Source(write(tmp_path / "m", tiny | extra, config))
    entry = next(entry for entry in source.entries.values() if entry.name == f"{name}.weight")
    assert_same_bits(source.fetch(entry.key).numpy(), decoded)
    source.close()


def test_entry_facts(tmp_path: Path, tiny: Tensors) -> None:
    packed, _ = pack(tiny, expert_weights(tiny), "int-packed")
    source = Source(write(tmp_path / "m", packed, CONFIGS["int-packed"]))
    entry = source.entries[Key(2, "expert.gate", 7)]
    assert (entry.shape, entry.dtype, entry.module) == ((96, 160), "F32", "model.layers.2.mlp.experts.7.gate_proj")
    assert entry.nbytes == 96 * 160 // 2 + 2 * 96 * 5 + 16
    assert entry.int8_nbytes == 96 * 160 + 4 * 96
    assert entry.kept_nbytes == 2 * 96 * 160
    norm = source.entries[Key(2, "norm.input")]
    assert norm.int8_nbytes == norm.kept_nbytes == norm.nbytes


@pytest.mark.parametrize(("fmt", "larger"), [("mxfp4-packed", True), ("int-packed", True), ("fp8-channel", False)])
def test_int8_size_says_beforehand_whether_it_grows(tmp_path: Path, tiny: Tensors, fmt: str, larger: bool) -> None:
    source = Source(write(tmp_path / "m", pack(tiny, expert_weights(tiny), fmt)[0], CONFIGS[fmt]))
    before, after = source.int8_size(lambda key: key.role.startswith("expert."))
    assert before == sum(header.file_size - header.payload_start for header in source.index.headers.values())
    assert (after > before) is larger
    assert source.int8_size(lambda key: False)[1] > after


@pytest.mark.parametrize("where", ["beside", "in another file"])
def test_deepseek_v4_as_it_is_published(tmp_path: Path, where: str) -> None:
    """Experts in FP4 stored as I8, attention and shared experts in FP8 blocks with ragged edges, every scale E8M0 and
    called `.scale`; a table of expert ids; vectors called scale that are none."""
    sizes = {"hidden_size": 160, "intermediate_size": 96, "q_lora_rank": 136, "o_lora_rank": 40}
    folder = make_tiny("deepseek_v4", tmp_path / "m", **sizes)
    tensors = load_file(folder / "model.safetensors")
    decoded, scales = {}, {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if re.search(r"ffn\.experts\.\d", name):
            parts, decoded[name] = PACKERS["fp4-in-i8"](tensors[name].double().numpy())
        elif re.search(r"\.(attn\.w|ffn\.shared|attn\.indexer\.wq)", name):
            parts, decoded[name] = fp8_block_e8m0(tensors[name].double().numpy())
        else:
            continue
        tensors[name], scales[f"{module}.scale"] = parts["weight"], parts["scale"]
    files = [{**tensors, **scales}] if where == "beside" else [tensors, scales]
    (folder / "model.safetensors").unlink()
    for number, file in enumerate(files, 1):
        save_file(file, folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS["fp4-in-i8"]}))
    source = Source(folder)
    source.require_classified()
    assert source.notes == []
    assert source.formats["fp4-in-i8"] == 3 * 5 * 3
    assert source.formats["fp8-block"] == 3 * (5 + 3) + 1
    assert source.formats["plain"] == len(tensors) - len(decoded)
    for name, wanted in decoded.items():
        key = source.arch.parse(name)
        assert key is not None
        assert_same_bits(source.get(key).numpy(), wanted)
    assert torch.equal(source.get(Key(0, "router.table")), tensors["layers.0.ffn.gate.tid2eid"])
    out = tmp_path / "out"
    convert(folder, out, load_recipe("w8a8"), jobs=1)
    report = verify(out, source=folder)
    assert report.passed, report.failures
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["layers.0.ffn.gate.tid2eid"], tensors["layers.0.ffn.gate.tid2eid"])
    name = "layers.1.ffn.experts.4.w2.weight"
    scale = np.abs(decoded[name]).max(1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(written[name].numpy(), np.clip(np.rint(decoded[name] / scale), -127, 127))
    assert written["layers.1.attn.wkv.weight"].dtype == torch.bfloat16  # kept, but no longer in 8 bits
    bad = scales["layers.2.ffn.experts.0.w1.scale"].view(torch.uint8)
    bad[5, 2] = 255
    save_file(files[-1], folder / f"model-{len(files):05d}-of-{len(files):05d}.safetensors")
    with pytest.raises(InputError, match=r"layers\.2\.ffn\.experts\.0\.w1\.scale holds nan at \[5, 2\]"):
        convert(folder, tmp_path / "bad", load_recipe("w8a8"), jobs=1)


def test_gpt_oss_experts_reach_transformers_as_its_own_dequantization(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 64,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    prefix = "model.layers.0.mlp.experts"
    tensors, values = {}, {}
    for name, shape in {"gate_up_proj": (3, 64, 64), "down_proj": (3, 64, 32)}.items():
        parts, values[name] = mxfp4_blocks(weight(shape))
        tensors |= {f"{prefix}.{name}_{part}": tensor for part, tensor in parts.items()}
        tensors[f"{prefix}.{name}_bias"] = torch.randn(3, 64, dtype=torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    source = Source(tmp_path)
    assert source.formats == {"mxfp4-blocks": 2, "plain": 2}
    for name in values:
        blocks, scales = tensors[f"{prefix}.{name}_blocks"], tensors[f"{prefix}.{name}_scales"]
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        found = parameter_value(source.arch, source.dims, f"{prefix}.{name}", source.get)
        assert_same_bits(found.numpy(), wanted.numpy())
        bias = parameter_value(source.arch, source.dims, f"{prefix}.{name}_bias", source.get)
        assert torch.equal(bias, tensors[f"{prefix}.{name}_bias"])
    up = source.get(Key(0, "expert.up", 1))
    assert_same_bits(up.numpy(), values["gate_up_proj"][1, 1::2])
    entry = source.entries[Key(0, "expert.down")]
    assert (entry.shape, entry.canonical_shape, entry.module) == ((3, 64, 32), (3, 64, 32), f"{prefix}.down_proj")


def test_opaque_subtrees_keep_their_scales(tmp_path: Path, tiny: Tensors) -> None:
    """A draft layer in FP8, and a vision tower with a parameter that happens to be called scale."""
    parts, decoded = fp8_block(weight((96, 160)))
    extra = {f"model.layers.6.eh_proj.{part}": tensor for part, tensor in parts.items()}
    extra["visual.blocks.0.ls1.scale"] = torch.ones(8)
    source = Source(write(tmp_path / "m", tiny | extra, CONFIGS["fp8-block"]))
    entry = next(entry for entry in source.entries.values() if entry.name == "model.layers.6.eh_proj.weight")
    assert entry.format.name == "fp8-block"
    assert entry.key.role == "mtp"
    assert_same_bits(source.fetch(entry.key).numpy(), decoded)
    scale = next(entry for entry in source.entries.values() if entry.name == "visual.blocks.0.ls1.scale")
    assert scale.format.name == "plain"
    assert sum(len(entry.stored) for entry in source.entries.values()) == len(tiny) + len(extra)


def test_bf16_under_a_stale_config_is_bf16(tmp_path: Path, tiny: Tensors) -> None:
    source = Source(write(tmp_path / "m", tiny, CONFIGS["fp8-block"]))
    assert source.formats == {"plain": len(tiny)}
    assert torch.equal(source.get(Key(1, "expert.up", 3)), tiny["model.layers.1.mlp.experts.3.up_proj.weight"])
    assert source.notes == [
        "config.json declares quantization (fp8), but no tensor is quantized: all are read as stored"
    ]


def test_tensors_beat_a_config_that_says_something_else(tmp_path: Path, tiny: Tensors) -> None:
    packed, _ = pack(tiny, expert_weights(tiny)[:5], "mxfp8")
    silent = Source(write(tmp_path / "a", packed))
    assert silent.notes == [
        "config.json declares no quantization, but 5 weights are stored as mxfp8: read as such",
    ]
    other = Source(write(tmp_path / "b", packed, CONFIGS["int-packed"]))
    assert other.notes == ["config.json declares pack-quantized, but 5 weights are stored as mxfp8: read as such"]
    unsized = Source(write(tmp_path / "c", pack(tiny, expert_weights(tiny), "fp8-block")[0], {"quant_method": "fp8"}))
    assert "names no block size" in unsized.notes[0]


@pytest.mark.parametrize("block", ["128", [128], [0, 128], [128, -1], [128.0, 128], [True, 1], {}])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, tiny: Tensors, block: object) -> None:
    folder = write(tmp_path / "m", tiny, {"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(InputError, match="block size"):
        Source(folder)


EXPERT = "model.layers.1.mlp.experts.0.down_proj"


def broken(tmp_path: Path, tiny: Tensors, fmt: str, change: Tensors, drop: tuple[str, ...] = ()) -> Path:
    """The tiny model with one expert in a format, then parts of it changed (`part -> tensor`) or dropped."""
    packed, _ = pack(tiny, [f"{EXPERT}.weight"], fmt)
    for part in drop:
        del packed[f"{EXPERT}.{part}"]
    packed |= {f"{EXPERT}.{part}": tensor for part, tensor in change.items()}
    return write(tmp_path / "m", packed, CONFIGS[fmt])


@pytest.mark.parametrize(
    ("fmt", "change", "drop", "says"),
    [
        ("fp8-block", {}, ("weight_scale_inv",), ["its scale is missing (weight_scale_inv"]),
        ("fp8-channel", {}, ("weight_scale",), ["its scale is missing"]),
        ("int8-channel", {}, ("weight_scale",), ["I8 [160, 96]", "as int8-channel: its scale is missing"]),
        ("fp8-block", {}, ("weight",), [f"{EXPERT}.weight_scale_inv is stored as", "weight is missing"]),
        ("int-packed", {}, ("weight_packed",), ["weight_packed is missing"]),
        ("int-packed", {}, ("weight_shape",), ["weight_shape is missing"]),
        ("int-packed", {"weight_g_idx": torch.zeros(96, dtype=torch.int32)}, (), ["weight_g_idx", "actorder"]),
        (
            "fp8-block",
            {"weight": torch.zeros(160, 96, dtype=torch.bfloat16)},
            (),
            [f"{EXPERT}.weight_scale_inv does not belong to it"],
        ),
        (
            "fp8-block",
            {"weight_scale_inv": torch.ones(1, 2)},
            (),
            [f"{EXPERT}.weight_scale_inv is [1, 2], expected [2, 1] for blocks of 128 x 128 of config.json"],
        ),
        ("fp8-block", {"weight_scale": torch.ones(2, 1)}, (), ["it has 2 scales (weight_scale_inv, weight_scale)"]),
        (
            "fp8-channel",
            {"weight_scale": torch.ones(96, 1)},
            (),
            ["expected [160, 1] for one scale per output channel"],
        ),
        ("int8-channel", {"weight_scale": torch.ones(96, 1)}, (), ["[96, 1], expected [160, 1]"]),
        ("mxfp8", {"weight_scale_inv": torch.ones(160, 4, dtype=torch.uint8)}, (), ["[160, 4], expected [160, 3]"]),
        ("mxfp4-packed", {"weight_scale": torch.ones(160, 6, dtype=torch.uint8)}, (), ["expected [160, 3]"]),
        ("fp4-in-i8", {"scale": torch.ones(160, 1)}, (), ["scale is F32, expected F8_E8M0"]),
        ("int-packed", {"weight_scale": torch.ones(96, 3)}, (), ["weight_scale is [96, 3], expected [160]"]),
        (
            "int-packed",
            {"weight_zero_point": torch.ones(160, 3, dtype=torch.int32)},
            (),
            ["expected [20, 3] or [40, 3]"],
        ),
    ],
)
def test_what_does_not_belong_together_is_named(
    tmp_path: Path, tiny: Tensors, fmt: str, change: Tensors, drop: tuple[str, ...], says: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        Source(broken(tmp_path, tiny, fmt, change, drop))
    for text in [EXPERT, *says]:
        assert text in str(error.value)


def test_weight_shape_that_contradicts(tmp_path: Path, tiny: Tensors) -> None:
    folder = broken(tmp_path, tiny, "int-packed", {"weight_shape": torch.tensor([160, 95])})
    source = Source(folder)  # the config's group size settles the shape: found when the weight is read
    with pytest.raises(InputError, match=rf"{EXPERT}.weight_shape says \[160, 95\]"):
        source.get(Key(1, "expert.down", 0))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="3 groups do not divide 95 inputs"):
        Source(folder)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4-packed", "fp4-in-i8"])
def test_e8m0_nan_is_refused_with_its_position(tmp_path: Path, tiny: Tensors, fmt: str) -> None:
    parts, _ = PACKERS[fmt](tiny[f"{EXPERT}.weight"].double().numpy())
    name = next(part for part in ("weight_scale_inv", "weight_scale", "scale") if part in parts)
    scale = parts[name].clone()
    scale.view(torch.uint8)[77, 2] = 255
    source = Source(broken(tmp_path, tiny, fmt, {name: scale}))
    key = Key(1, "expert.down", 0)
    for rows in (None, (70, 80)):
        with pytest.raises(InputError, match=rf"{EXPERT}.{name} holds nan at \[77, 2\]"):
            source.fetch(key, rows)
    assert source.fetch(key, (78, 160)).isfinite().all()


def test_fp8_nan_and_overflow_are_refused_with_their_position(tmp_path: Path, tiny: Tensors) -> None:
    parts, _ = fp8_block(tiny[f"{EXPERT}.weight"].double().numpy())
    bad = parts["weight"].clone()
    bad.view(torch.uint8)[130, 5] = 0xFF
    source = Source(broken(tmp_path / "a", tiny, "fp8-block", {"weight": bad}))
    with pytest.raises(InputError, match=rf"{EXPERT}.weight holds nan at \[130, 5\] \(1 values"):
        source.fetch(Key(1, "expert.down", 0), (128, 160))
    for value in (float("nan"), float("inf")):
        scale = torch.tensor([[1.0], [value]])
        source = Source(broken(tmp_path / str(value), tiny, "fp8-block", {"weight_scale_inv": scale}))
        with pytest.raises(InputError, match=rf"{EXPERT}.weight_scale_inv holds {value} at \[1, 0\]"):
            source.fetch(Key(1, "expert.down", 0), (129, 130))
    scale = torch.full((2, 1), 3e38)
    source = Source(broken(tmp_path / "big", tiny, "fp8-block", {"weight_scale_inv": scale}))
    with pytest.raises(InputError, match=rf"{EXPERT}.weight holds -?inf at"):
        source.get(Key(1, "expert.down", 0))


def test_a_lone_8_bit_weight_is_no_plain_tensor(tmp_path: Path, tiny: Tensors) -> None:
    for i, dtype in enumerate((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)):
        folder = write(tmp_path / str(i), tiny | {f"{EXPERT}.weight": torch.zeros(160, 96).to(dtype)})
        with pytest.raises(InputError, match=f"{EXPERT}.weight is stored as .*: no known format"):
            Source(folder)


def test_rows_outside_are_a_bug_not_neighbours_bytes(tmp_path: Path, tiny: Tensors) -> None:
    source = Source(write(tmp_path / "m", tiny))
    for rows in [(-1, 2), (3, 2), (0, 161)]:
        with pytest.raises(ValueError, match="rows"):
            source.fetch(Key(1, "expert.down", 0), rows)


def test_symlinked_files_as_in_the_hub_cache(tmp_path: Path, tiny: Tensors) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc [1] 模型"
    write(blobs, tiny, files=2)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    source = Source(snapshot)
    assert len(source.entries) == len(tiny)
    assert torch.equal(source.get(Key(None, "embed")), tiny["model.embed_tokens.weight"])
    shutil.rmtree(blobs)
    with pytest.raises(InputError, match="No such file"):
        Source(snapshot)
