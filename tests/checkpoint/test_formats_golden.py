"""Every native format against independent decoders: ml_dtypes, transformers, compressed-tensors, numpy in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.checkpoint.formats import FormatContext
from quantkit.checkpoint.formats.base import decode_e4m3, e4m3_table, e8m0_table
from quantkit.checkpoint.formats.mxfp4 import decode_e2m1
from tests.checkpoint.native import (
    E2M1,
    PACKERS,
    Memory,
    as_torch,
    assert_same_bits,
    e8m0,
    fp8_block,
    infos,
    int4_packed,
    mxfp4_blocks,
    mxfp4_packed,
    mxfp8,
    pack_nibbles,
    spread,
    weight,
)

RNG_SEED = 7
BYTES = np.arange(256, dtype=np.uint8)


def finite_codes(shape: tuple[int, ...], seed: int = RNG_SEED) -> np.ndarray:
    """Random F8_E4M3 codes, all but both NaNs, subnormals and negative zero among them."""
    legal = BYTES[(BYTES & 0x7F) != 0x7F]
    return np.random.default_rng(seed).choice(legal, shape)


def test_every_e4m3_code() -> None:
    wanted = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_bits(e4m3_table().numpy()[[*range(127), *range(128, 255)]], np.delete(wanted, [127, 255]))
    assert np.isnan(e4m3_table().numpy()[[127, 255]]).all()


def test_every_pair_of_e4m3_codes() -> None:
    pairs = np.arange(65536, dtype=np.uint16).view(np.uint8)
    wanted = pairs.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    legal = ~np.isnan(wanted)
    codes = torch.from_numpy(pairs.copy()).view(torch.float8_e4m3fn)
    assert_same_bits(decode_e4m3(codes).numpy()[legal], wanted[legal])
    assert decode_e4m3(codes)[torch.from_numpy(~legal)].isnan().all()
    assert_same_bits(decode_e4m3(codes[1:256]).numpy()[:126], wanted[1:127])  # odd count, odd address
    assert_same_bits(decode_e4m3(codes[1:127]).numpy(), wanted[1:127])


def test_every_e8m0_code() -> None:
    assert_same_bits(e8m0_table().numpy()[:255], BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:255])
    assert torch.isnan(e8m0_table()[255])


def test_every_pair_of_e2m1_codes() -> None:
    low, high = (BYTES & 15).view(E2M1), (BYTES >> 4).view(E2M1)
    wanted = np.stack((low, high), -1).astype(np.float32)
    assert_same_bits(decode_e2m1(torch.from_numpy(BYTES)[:, None]).numpy(), wanted)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (130, 320), (576, 160)])
def test_each_format_decodes_what_was_packed(name: str, shape: tuple[int, int]) -> None:
    parts, decoded = PACKERS[name](weight(shape))
    memory = Memory(parts)
    one_scale = shape == (1, 32) and name in {"fp8-channel", "fp8-tensor"}  # one channel is the tensor
    assert memory.format.name == ("fp8-tensor" if one_scale else name)
    assert memory.shape == shape
    assert_same_bits(memory.decode(), decoded)


@pytest.mark.parametrize("name", sorted(set(PACKERS) - {"fp8-tensor"}))
def test_stacked_experts(name: str) -> None:
    parts, decoded = PACKERS[name](weight((3, 130, 160)))
    memory = Memory(parts)
    assert (memory.format.name, memory.shape) == (name, (3, 130, 160))
    assert_same_bits(memory.decode(), decoded)
    for rows in [(0, 1), (1, 3), (2, 2)]:
        assert_same_bits(memory.decode(rows), decoded[slice(*rows)])


def test_one_scale_per_stacked_expert() -> None:
    codes, scale = finite_codes((3, 5, 7)).view(ml_dtypes.float8_e4m3fn), np.float32([[[0.5]], [[3.0]], [[1e-3]]])
    memory = Memory({"weight": as_torch(codes), "weight_scale": as_torch(scale)})
    assert memory.format.name == "fp8-tensor"
    wanted = (codes.astype(np.float64) * scale).astype(np.float32)
    assert_same_bits(memory.decode(), wanted)
    assert_same_bits(memory.decode((1, 3)), wanted[1:])


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((576, 7168), (128, 128)),  # kv_a of DeepSeek-V3: 4.5 blocks
        ((64, 2880), (128, 128)),  # K of gpt-oss: 22.5 blocks
        ((129, 1), (128, 128)),
        ((1, 257), (128, 128)),
        ((100, 100), (128, 128)),
        ((70, 90), (64, 32)),
        ((5, 300), (1, 128)),
        ((96, 200), (48, 80)),
    ],
)
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_fp8_blocks_with_ragged_edges(shape: tuple[int, int], block: tuple[int, int], scale_dtype: type) -> None:
    parts, decoded = fp8_block(weight(shape), *block, dtype=scale_dtype)
    memory = Memory(parts, FormatContext(declared=("fp8",), block=block))
    assert memory.format.name == "fp8-block"
    assert_same_bits(memory.decode(), decoded)
    if all(size & (size - 1) == 0 for size in block):  # powers of two follow from the shapes
        assert_same_bits(Memory(parts).decode(), decoded)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 16, 32, 64, 128, 256]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_fp8_block_size_follows_from_the_shapes(n: int, k: int, block: int, seed: int) -> None:
    codes = finite_codes((n, k), seed).view(ml_dtypes.float8_e4m3fn)
    scale = np.random.default_rng(seed).uniform(0.1, 2, (-(-n // block), -(-k // block))).astype(np.float32)
    memory = Memory({"weight": as_torch(codes), "weight_scale_inv": as_torch(scale)})
    wanted = (codes.astype(np.float64) * spread(scale, (n, k), block, block)).astype(np.float32)
    assert_same_bits(memory.decode(), wanted)


@pytest.mark.parametrize("name", ["weight_scale", "scale", "weight_scale_inv"])
def test_fp8_block_spellings(name: str) -> None:
    parts, decoded = fp8_block(weight((200, 260)))
    stored = {"weight": parts["weight"], name: parts["weight_scale_inv"]}
    memory = Memory(stored)
    assert memory.format.name == "fp8-block"
    assert_same_bits(memory.decode(), decoded)


def test_fp8_block_with_e8m0_scales() -> None:
    codes, exponents = finite_codes((200, 260)).view(ml_dtypes.float8_e4m3fn), np.uint8([[120, 127, 130], [1, 126, 90]])
    scale = exponents.view(ml_dtypes.float8_e8m0fnu)
    memory = Memory({"weight": as_torch(codes), "scale": as_torch(scale)})
    assert memory.format.name == "fp8-block"
    wanted = (codes.astype(np.float64) * spread(e8m0(exponents), (200, 260), 128, 128)).astype(np.float32)
    assert_same_bits(memory.decode(), wanted)


def test_transformers_fp8_blocks() -> None:
    parts, _ = fp8_block(weight((256, 384)))
    wanted = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    assert_same_bits(Memory(parts).decode(), wanted.numpy())


def test_transformers_mxfp8() -> None:
    parts, _ = mxfp8(weight((48, 96)))
    wanted = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    assert_same_bits(Memory(parts).decode(), wanted.numpy())


def test_transformers_fp4_in_i8() -> None:
    rng = np.random.default_rng(RNG_SEED)
    packed = torch.from_numpy(rng.integers(-128, 128, (48, 80), dtype=np.int8))
    scale = torch.from_numpy(rng.integers(100, 140, (48, 5), dtype=np.uint8)).view(torch.float8_e8m0fnu)
    memory = Memory({"weight": packed, "scale": scale})
    assert (memory.format.name, memory.shape) == ("fp4-in-i8", (48, 160))
    wanted = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    assert_same_bits(memory.decode(), wanted.numpy())


@pytest.mark.parametrize("shape", [(2, 6, 1), (3, 5, 90)])  # 90 blocks: K = 2880 of gpt-oss
def test_transformers_gpt_oss_experts(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(RNG_SEED)
    blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(3, 250, shape, dtype=np.uint8))
    memory = Memory({"blocks": blocks, "scales": scales})
    assert memory.format.oriented
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()
    assert_same_bits(memory.decode(), wanted.numpy())


def test_mxfp_extremes() -> None:
    """Smallest and largest exponents that stay finite: subnormal float32 results included."""
    values = np.tile(np.arange(16, dtype=np.uint8).view(E2M1), 4).reshape(2, 32)
    exponents = np.uint8([[0], [252]])
    parts = {"weight_packed": as_torch(pack_nibbles(values.view(np.uint8))), "weight_scale": as_torch(exponents)}
    wanted = (values.astype(np.float64) * e8m0(exponents)).astype(np.float32)
    assert 0 < np.abs(wanted[wanted != 0]).min() < np.finfo(np.float32).tiny
    assert_same_bits(Memory(parts).decode(), wanted)


def scheme(**weights: object) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_tensors_fp8(strategy: str) -> None:
    w = torch.from_numpy(weight((37, 65))).float()
    absmax = w.abs().amax(1, keepdim=True) if strategy == "channel" else w.abs().amax().reshape(1)
    args = scheme(num_bits=8, type="float", strategy=strategy)
    packed = FloatQuantizationCompressor.compress({"weight": w, "weight_scale": absmax / 448}, args)
    memory = Memory(packed)
    assert memory.format.name == f"fp8-{strategy}"
    wanted = FloatQuantizationCompressor.decompress(packed, args)["weight"]
    assert_same_bits(memory.decode(), wanted.numpy())


def test_compressed_tensors_fp8_block() -> None:
    w = torch.from_numpy(weight((200, 300))).float()
    scale = fp8_block(w.double().numpy())[0]["weight_scale_inv"]
    args = scheme(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    packed = FloatQuantizationCompressor.compress({"weight": w, "weight_scale": scale}, args)
    config = {"quantization_config": {"format": "float-quantized", "config_groups": {"g": args.model_dump()}}}
    memory = Memory(packed, FormatContext.from_config(config))
    assert (memory.format.name, memory.context.block) == ("fp8-block", (128, 128))
    assert_same_bits(memory.decode(), FloatQuantizationCompressor.decompress(packed, args)["weight"].numpy())


def test_packings_that_are_no_numbers_say_nothing() -> None:
    args = [{"num_bits": [4], "group_size": 32}, {"num_bits": 4, "group_size": [32]}, {"num_bits": 4}]
    groups = {str(number): {"weights": each} for number, each in enumerate(args)}
    assert FormatContext.from_config({"quantization_config": {"config_groups": groups}}).packings == ((4, 0),)


def test_compressed_tensors_int8() -> None:
    w = torch.from_numpy(weight((37, 65))).float()
    args = scheme(num_bits=8, type="int", strategy="channel")
    packed = IntQuantizationCompressor.compress(
        {"weight": w, "weight_scale": w.abs().amax(1, keepdim=True) / 127}, args
    )
    memory = Memory(packed)
    assert memory.format.name == "int8-channel"
    assert_same_bits(memory.decode(), IntQuantizationCompressor.decompress(packed, args)["weight"].numpy())


def test_compressed_tensors_mxfp8() -> None:
    w = torch.from_numpy(weight((12, 96))).float()
    scale = as_torch(e8m0(mxfp8(w.double().numpy())[0]["weight_scale_inv"].numpy()).astype(np.float32))
    args = scheme(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    packed = MXFP8QuantizationCompressor.compress({"weight": w, "weight_scale": scale}, args)
    memory = Memory(packed)
    assert memory.format.name == "mxfp8"
    wanted = MXFP8QuantizationCompressor.decompress(packed, args)["weight"]  # bf16 holds e4m3 x 2^n exactly
    assert_same_bits(memory.decode(), wanted.float().numpy())


def test_compressed_tensors_mxfp4() -> None:
    w = torch.from_numpy(weight((12, 96))).float()
    scale = as_torch(e8m0(mxfp4_packed(w.double().numpy())[0]["weight_scale"].numpy()).astype(np.float32))
    args = scheme(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    packed = MXFP4PackedCompressor.compress({"weight": w, "weight_scale": scale}, args)
    memory = Memory({part: packed[part] for part in ("weight_packed", "weight_scale")})
    assert memory.format.name == "mxfp4-packed"
    wanted = MXFP4PackedCompressor.decompress(packed, args)["weight"]
    assert_same_bits(memory.decode(), wanted.float().numpy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("shape", "group"), [((33, 256), 128), ((13, 96), 32), ((7, 45), 0), ((9, 8), 0), ((1, 1), 0)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed_integers(bits: int, shape: tuple[int, int], group: int, symmetric: bool) -> None:
    rng = np.random.default_rng(RNG_SEED)
    groups = shape[1] // group if group else 1
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = scheme(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    half = 2 ** (bits - 1)
    stored = {
        "weight": torch.from_numpy(weight(shape)).float(),
        "weight_scale": torch.from_numpy(rng.uniform(0.01, 0.1, (shape[0], groups)).astype(np.float32)),
    }
    if not symmetric:
        zero = rng.integers(-half, half, (shape[0], groups), dtype=np.int8)
        stored["weight_zero_point"] = torch.from_numpy(zero)
    packed = PackedQuantizationCompressor.compress(stored, args)
    wanted = PackedQuantizationCompressor.decompress(packed, args)["weight"].numpy()
    told = FormatContext(packings=((bits, group),))
    for context in (told, FormatContext()) if shape[1] > 4 else (told,):  # 1 value a word: the width is the config's
        memory = Memory(packed, context)
        assert (memory.format.name, memory.shape) == ("int-packed", shape)
        assert_same_bits(memory.decode(), wanted)
        for start in range(shape[0]):
            rows = (start, min(start + 3, shape[0]))
            assert_same_bits(memory.decode(rows), memory.decode()[slice(*rows)])


def test_zero_points_of_few_rows_share_one_word() -> None:
    rng = np.random.default_rng(RNG_SEED)
    codes, zeros = rng.integers(0, 16, (5, 96)), rng.integers(0, 16, (5, 3))
    scale = rng.uniform(0.1, 1, (5, 3)).astype(np.float32)
    words = sum(zeros[row].astype(np.int64) << 4 * row for row in range(5)).astype(np.uint32).view(np.int32)
    parts = {
        "weight_packed": as_torch(pack_nibbles(codes.astype(np.uint8)).view(np.int32)),
        "weight_scale": as_torch(scale),
        "weight_shape": torch.tensor([5, 96], dtype=torch.int32),
        "weight_zero_point": as_torch(words[None]),
    }
    wanted = ((codes - zeros.repeat(32, 1)) * spread(scale, (5, 96), 1, 32)).astype(np.float32)
    assert_same_bits(Memory(parts).decode(), wanted)
    assert_same_bits(Memory(parts).decode((3, 5)), wanted[3:])


def test_shape_of_packed_integers_needs_no_read_when_the_config_settles_it() -> None:
    parts, _ = int4_packed(weight((5, 96)))
    memory = Memory(parts, FormatContext(packings=((4, 32),)))
    assert memory.shape == (5, 96)
    assert memory.read_rows == {}
    assert Memory(parts).shape == (5, 96)


@pytest.mark.parametrize("name", PACKERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_row_slices_equal_the_whole_and_read_no_more(name: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 300)), 32 * data.draw(st.integers(1, 5))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    parts, decoded = PACKERS[name](weight((n, k), seed=n))
    memory = Memory(parts, FormatContext(block=(128, 128) if name == "fp8-block" else None))
    assert_same_bits(memory.decode((start, stop)), decoded[start:stop])
    payload, read = memory.format.payload[0], memory.read_rows
    assert read[payload] == stop - start
    for part in memory.format.scales:
        if part in read:
            per_tensor = memory.format.name == "fp8-tensor"
            blocks = -(-stop // 128) - start // 128
            assert read[part] <= (1 if per_tensor else blocks if name == "fp8-block" else stop - start)


def test_gpt_oss_slices_are_experts() -> None:
    parts, decoded = mxfp4_blocks(weight((5, 6, 64)))
    memory = Memory(parts)
    assert_same_bits(memory.decode((2, 4)), decoded[2:4])
    assert memory.read_rows == {"blocks": 2, "scales": 2}


def test_empty_weights() -> None:
    empty = {"weight": torch.empty(0, 64, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.empty(0, 1)}
    assert Memory(empty).decode().shape == (0, 64)


def test_infos_names_dtypes() -> None:
    found = infos({"weight": torch.zeros(2, 3, dtype=torch.float8_e4m3fn)})
    assert (found["weight"].dtype, found["weight"].nbytes) == ("F8_E4M3", 6)
