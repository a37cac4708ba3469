"""Every operation in plain torch: the reference of every other kernel, and the CPU's kernel.

int8 x int8 products are integers of at most 127^2, and float32 holds every integer up to 2^24. A float32 GEMM over at
most `EXACT_F32_K` = 1,040 inputs is therefore exact in any order of summation, and the chunks add up in int32. The
int8 GEMMs of oneDNN and fbgemm are not used: without VNNI they saturate 16-bit intermediates silently.

Shape suffixes: T tokens, N output channels, K input channels, G groups of K, E experts, k experts per token,
S = T x k slots (a token at one of its experts), I inner channels; B sequences, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.arithmetic import EXACT_F32_K, MAX_INT32_K, dequantize, quantize_tokens
from quantkit_runtime.errors import ShapeMismatch

Product = Callable[[Tensor, Tensor], Tensor]
"""(x int8 [T, K], w int8 [N, K]) -> int32 [T, N], exact."""


def check_accumulator(k: int, name: str = "a weight") -> None:
    """Refuse a K whose sum could overflow int32.

    Raises:
        ShapeMismatch: K > 133,144.
    """
    if k > MAX_INT32_K:
        raise ShapeMismatch(
            f"{name} has {k} inputs; an int32 accumulator is safe up to {MAX_INT32_K}",
            "split this weight along its inputs (tensor parallelism) or keep it unquantized",
        )


def int32_product(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """Exact `x @ w.T` of int8 matrices -> int32 `[T, N]`."""
    k = x_TK.shape[1]
    check_accumulator(k)
    if k <= EXACT_F32_K:
        return (x_TK.float() @ w_NK.float().T).to(torch.int32)
    total = x_TK.new_zeros((x_TK.shape[0], w_NK.shape[0]), dtype=torch.int32)
    for start in range(0, k, EXACT_F32_K):
        chunk = slice(start, start + EXACT_F32_K)
        total += (x_TK[:, chunk].float() @ w_NK[:, chunk].float().T).to(torch.int32)
    return total


def scaled_product(
    product: Product,
    x_TK: Tensor,
    x_scale: Tensor,
    w_NK: Tensor,
    w_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`product` with the epilogue of the `w8a8` schemes, in float32.

    Per token: `acc * x_scale * w_scale + bias`. Per group: int32 sums of each group, scaled by the group's `x_scale`
    and added in float32, then `* w_scale + bias`.
    """
    groups = x_scale.shape[1]
    if groups == 1:
        out = product(x_TK, w_NK).float() * x_scale
    else:
        size = x_TK.shape[1] // groups
        out = x_scale.new_zeros((x_TK.shape[0], w_NK.shape[0]))
        for group in range(groups):
            part = slice(group * size, (group + 1) * size)
            out += product(x_TK[:, part], w_NK[:, part]).float() * x_scale[:, group : group + 1]
    out *= w_scale_N1.T
    if bias_N is not None:
        out += bias_N.float()
    return out.to(out_dtype)


def w8a8_gemm(
    x_TK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    return scaled_product(int32_product, x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype)


# ------------------------------------------------------------------------------------------- fused quantize


def quantize(x_TK: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """int8 of `x` and float32 scales `[T, 1]`, or `[T, K / group_size]` for activations quantized per group."""
    return quantize_tokens(x_TK, group_size or None)


class Normed(NamedTuple):
    """Result of `norm_quantize`.

    Attributes:
        q, scale: quantized `normed`, as `quantize` gives them.
        normed: RMSNorm of `total`, in x's dtype; None where it was not to be kept.
        total: x + residual in x's dtype; x itself without a residual.
    """

    q: Tensor
    scale: Tensor
    normed: Tensor | None
    total: Tensor


def norm_quantize(
    x_TK: Tensor,
    weight_K: Tensor,
    eps: float,
    residual_TK: Tensor | None = None,
    unit_offset: bool = False,
    group_size: int = 0,
    keep: bool = True,
) -> Normed:
    """Add the residual, RMSNorm, quantize.

    Rounds where transformers does: `weight * normalized.to(dtype)` as Llama, or with `unit_offset`
    `(normalized * (1 + weight)).to(dtype)` as Gemma.
    """
    total = x_TK if residual_TK is None else x_TK + residual_TK
    wide = total.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        normed = (normalized * (1.0 + weight_K.float())).to(x_TK.dtype)
    else:
        normed = (weight_K * normalized.to(x_TK.dtype)).to(x_TK.dtype)
    return Normed(*quantize(normed, group_size), normed if keep else None, total)


def silu_mul_quantize(gate_up_TI: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize `silu(gate) * up` of `[T, 2 I]`, gate first, each rounded to x's dtype."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return quantize(functional.silu(gate) * up, group_size)


# ------------------------------------------------------------------------------------------- routed experts


class Alignment(NamedTuple):
    """Slots sorted by expert, each expert's run padded to whole tiles of rows.

    Attributes:
        slots: int32 `[tiles x block]`: slot of a row, or S for padding.
        tile_expert: int32 `[tiles]`: expert of a tile, or -1 for tiles that are not needed.
        block: rows of a tile.
    """

    slots: Tensor
    tile_expert: Tensor
    block: int


def most_tiles(slots: int, experts: int, block: int) -> int:
    """Tiles that suffice for any routing: every expert that is hit may waste block - 1 rows."""
    return (slots + min(experts, slots) * (block - 1)) // block


def align(index_Tk: Tensor, experts: int, block: int) -> Alignment:
    """Sort the slots of `index` by expert, stably; slots of experts outside 0..E-1 (another rank's) are left out."""
    flat = index_Tk.reshape(-1)
    slots, tile_expert = [], []
    for expert in range(experts):
        run = (flat == expert).nonzero().squeeze(1)
        padded = functional.pad(run, (0, -run.numel() % block), value=flat.numel())
        slots.append(padded)
        tile_expert += [expert] * (padded.numel() // block)
    unused = most_tiles(flat.numel(), experts, block) - len(tile_expert)
    slots.append(flat.new_full((unused * block,), flat.numel()))
    tiles = torch.tensor([*tile_expert, *[-1] * unused], dtype=torch.int32, device=flat.device)
    return Alignment(torch.cat(slots).to(torch.int32), tiles, block)


def grouped_gemm(
    x_RK: Tensor,
    x_scale: Tensor,
    w_ENK: Tensor,
    w_scale_EN1: Tensor,
    bias_EN: Tensor | None,
    alignment: Alignment,
    share: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Each slot's row through its expert -> `[S, N]`.

    Args:
        share: slots that read one row of x: k where x has a row per token, 1 where it has a row per slot.

    Rows of slots that `alignment` leaves out are undefined in other kernels, and 0 here.
    """
    slots_of = alignment.slots.view(-1, alignment.block).long()
    out = torch.zeros((x_RK.shape[0] * share, w_ENK.shape[1]), dtype=out_dtype, device=x_RK.device)
    for tile, expert in enumerate(alignment.tile_expert.tolist()):
        slots = slots_of[tile][slots_of[tile] < out.shape[0]]
        if expert >= 0 and slots.numel():
            x, scale = x_RK[slots // share], x_scale[slots // share]
            bias = None if bias_EN is None else bias_EN[expert]
            out[slots] = w8a8_gemm(x, scale, w_ENK[expert], w_scale_EN1[expert], bias, out_dtype)
    return out


def combine(out_SH: Tensor, weights_Tk: Tensor, index_Tk: Tensor, experts: int) -> Tensor:
    """Weighted sum of each token's slots in float32 -> `[T, H]`; slots of experts outside 0..E-1 add nothing."""
    inside = ((index_Tk >= 0) & (index_Tk < experts)).unsqueeze(-1)
    slots = torch.where(inside, out_SH.view(*index_Tk.shape, -1).float(), 0.0)
    return (slots * weights_Tk.float().unsqueeze(-1)).sum(dim=1).to(out_SH.dtype)


# ------------------------------------------------------------------------------------------- paged attention


def paged_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of one query per sequence over its cached tokens -> `[B, H, Dv]` in q's dtype.

    Args:
        q_BHD: queries; query head h reads key head h / (H / kv_heads).
        k_cache: `[blocks, kv_heads, block, D]`, int8 with `k_scale`, or float.
        k_scale: float32 `[blocks, kv_heads, block]`, one per token and head, or None.
        v_cache, v_scale: as the keys; the values' head dimension may differ.
        block_table: int32 `[B, max_blocks]`; entries behind a sequence's end may hold anything.
        lengths: int32 `[B]`, cached tokens, the query's own included; 0 gives a row of zeros.
        scale: of the scores.
        sinks: `[H]`, a score per head that takes part in the softmax and has no value (gpt-oss).
        window: a query sees only the last `window` tokens, its own included; 0 means all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 means none.
    """
    (b, h, _), (kv_heads, block) = q_BHD.shape, k_cache.shape[1:3]
    places = torch.arange(block_table.shape[1] * block, device=q_BHD.device)
    seen = places < lengths.unsqueeze(1)
    if window:
        seen = seen & (places >= lengths.unsqueeze(1) - window)
    table = torch.where(seen.view(b, -1, block).any(-1), block_table, 0).long()
    k, v = _gather(k_cache, k_scale, table), _gather(v_cache, v_scale, table)
    q = q_BHD.float().view(b, kv_heads, h // kv_heads, -1)
    weights = _weights(torch.einsum("bgrd,bgld->bgrl", q, k).mul_(scale), seen, sinks, softcap)
    out = torch.einsum("bgrl,bgld->bgrd", weights, v.masked_fill(~seen[:, None, :, None], 0.0))
    return out.reshape(b, h, -1).to(q_BHD.dtype)


def _weights(scores_BGRL: Tensor, seen_BL: Tensor, sinks: Tensor | None, softcap: float) -> Tensor:
    """Softmax over the positions that are seen."""
    b, groups, repeat, _ = scores_BGRL.shape
    if softcap:
        scores_BGRL = torch.tanh(scores_BGRL / softcap) * softcap
    scores_BGRL = scores_BGRL.masked_fill(~seen_BL[:, None, None], -torch.inf)
    sink = scores_BGRL.new_full((groups * repeat,), -torch.inf) if sinks is None else sinks.float()
    with_sink = torch.cat([scores_BGRL, sink.view(1, groups, repeat, 1).expand(b, -1, -1, 1)], dim=-1)
    weights = with_sink.softmax(dim=-1)[..., :-1]
    return weights.masked_fill(~seen_BL.any(-1)[:, None, None, None], 0.0)  # an empty sequence without a sink is 0 / 0


def _gather(cache: Tensor, scale: Tensor | None, table: Tensor) -> Tensor:
    """Float32 `[B, kv_heads, max_blocks x block, D]` of each sequence's blocks."""
    values = cache[table].float() if scale is None else dequantize(cache[table], scale[table].unsqueeze(-1))
    return values.transpose(1, 2).flatten(2, 3)


class Tiles(NamedTuple):
    """Packed queries cut into tiles of one sequence; every query is in one tile.

    Attributes:
        rows: int32 `[tiles, 4]`: row of the block table, first query, number of queries, position of the first query in
            its sequence. Queries at negative positions are padding. Tiles of no queries are not needed.
        queries: most of a tile, a power of two.
    """

    rows: Tensor
    queries: int


def cut(shapes: Iterable[tuple[int, int]], queries: int) -> list[tuple[int, int, int, int]]:
    """Rows of `Tiles` for packed sequences of which each has (queries, positions with them)."""
    rows, first = [], 0
    for row, (count, length) in enumerate(shapes):
        rows += [(row, first + at, min(queries, count - at), length - count + at) for at in range(0, count, queries)]
        first += count
    return rows


def paged_prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
    block_table: Tensor,
    tiles: Tiles,
    scale: float,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of packed queries, whose own keys are cached already -> `[T, H, Dv]` in q's dtype.

    Args:
        q_THD: queries of all sequences, those of one in order.
        tiles: which query is whose, and where it stands; padding gives zeros.
        k_cache, k_scale, v_cache, v_scale, block_table, scale, sinks, window, softcap: as in `paged_decode`.
    """
    (tokens, heads, _), (groups, block), dim_v = q_THD.shape, k_cache.shape[1:3], v_cache.shape[3]
    out = q_THD.new_zeros((tokens, heads, dim_v))
    for row, first, queries, position in tiles.rows.tolist():
        length, part = position + queries, slice(first, first + queries)
        if queries and length > 0:
            table = block_table[row : row + 1, : -(-length // block)].long()
            (k,), (v,) = (_gather(*store, table)[:, :, :length] for store in ((k_cache, k_scale), (v_cache, v_scale)))
            at, places = torch.arange(position, length).to(q_THD.device), torch.arange(length).to(q_THD.device)
            seen = places <= at.unsqueeze(1)
            if window:
                seen = seen & (places > at.unsqueeze(1) - window)
            q = q_THD[part].float().view(queries, groups, heads // groups, -1)
            weights = _weights(torch.einsum("tgrd,gld->tgrl", q, k).mul_(scale), seen, sinks, softcap)
            out[part] = torch.einsum("tgrl,gld->tgrd", weights, v).reshape(queries, heads, dim_v).to(q_THD.dtype)
    return out


class Rope(NamedTuple):
    """How heads are rotated: pairs of their first 2P values, each by an angle of its own; what is behind stays.

    Attributes:
        cos, sin: of the angles, float `[T, P]`.
        adjacent: value 2i forms a pair with 2i + 1, and not i with i + P.
    """

    cos: Tensor
    sin: Tensor
    adjacent: bool = False


def rotated(x_THD: Tensor, rope: Rope | None) -> Tensor:
    """Every head rotated, in float32 and rounded once; as it is without a rope."""
    if rope is None:
        return x_THD
    width = 2 * rope.cos.shape[1]
    shape = (-1, 2) if rope.adjacent else (2, -1)
    first, second = x_THD[..., :width].float().unflatten(-1, shape).unbind(-1 if rope.adjacent else -2)
    cos, sin = rope.cos.float().unsqueeze(1), rope.sin.float().unsqueeze(1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1 if rope.adjacent else -2)
    return torch.cat((turned.flatten(-2).to(x_THD.dtype), x_THD[..., width:]), dim=-1)


def rope_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    rope: Rope | None,
    places: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
) -> Tensor:
    """Rotate queries and keys, write keys and values into their pages -> rotated queries `[T, H, D]`.

    Args:
        rope: None: both are rotated already.
        places: int64 `[T]`, block x block_size + offset of each token; negative ones are not written.
        k_cache, k_scale, v_cache, v_scale: as in `paged_decode`; written in place.
    """
    q, k = rotated(q_THD, rope), rotated(k_TGD, rope)
    kept = places >= 0
    block, offset = places[kept] // k_cache.shape[2], places[kept] % k_cache.shape[2]
    for values, cache, scale in ((k, k_cache, k_scale), (v_TGD, v_cache, v_scale)):
        written = values[kept]
        if scale is not None:
            written, written_scale = quantize_tokens(written)
            scale[block, :, offset] = written_scale.squeeze(-1)
        cache[block, :, offset] = written.to(cache.dtype)
    return q
