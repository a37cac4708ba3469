"""Replicas of published models: true names, shapes and dtypes in true headers, over holes instead of values.

    python -m tests.models.replica Kimi-K2 OUT      # 1 TB to look at, some megabytes on disk

Names and shapes come from transformers' own class, built on `meta` from the published config and saved under the names
of its conversion mapping. What transformers does not keep is added as it is published: draft layers, float32 tensors
and the native low-bit form. The first layers are built and the others repeat them; building all of them takes longer
and gives the same, which `tests/bench/replicas.py` compares. Every command that reads headers alone sees the
real model.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.families import FAMILIES, Family, as_published, to_published_dtypes
from tests.inspect.sparse import Row, fp8_block, write_files, write_json
from tests.plan.facts import CONFIGS

FAMILY_OF = {
    "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen3-235B-A22B": "qwen3_moe",
    "MiniMax-M2.7": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "DeepSeek-V3.2": "deepseek_v32",
    "Kimi-K2": "kimi_k2",
    "GLM-4.5": "glm4_moe",
    "GLM-5": "glm_moe_dsa",
    "Qwen3.5-397B-A17B": "qwen3_5_moe",
    "gpt-oss-120b": "gpt_oss",
}
"""Published model -> its row of `FAMILIES`."""

_TOKENIZER = Path(__file__).parent / "tiny-minimax-m2"
_IN_FP8 = re.compile(
    r"\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\.(.*_proj|.*_with_mqa|.*\.w[123q]\w*|.*\.wk)\.weight$"
)
_KEPT_IN_FP8 = re.compile(r"\.weights_proj\.|\.eh_proj\.")
_STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")
_LAYER = re.compile(r"layers\.(\d+)\.")


def make_replica(model: str, root: Path, *, layers: int = 0) -> Path:
    """Write config.json, headers and a small tokenizer of another model to the new folder `root`.

    Args:
        layers: only the first ones, draft layers after them; 0: all.
    """
    config = CONFIGS[model] if not layers else thinned(CONFIGS[model], layers)
    root.mkdir(parents=True)
    write_files(root, list(by_layer(rows_of(model, config))))
    write_json(root / "config.json", {**config, "architectures": [FAMILIES[FAMILY_OF[model]].model_class]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, root)
    return root


def thinned(config: Any, layers: int, old: int = 0) -> Any:
    """A config with fewer layers: their number, and every list with an entry for each of them."""
    if isinstance(config, list):
        return config[:layers] if len(config) == old else config
    if not isinstance(config, dict):
        return config
    old = config.get("num_hidden_layers", old)
    found = {key: thinned(value, layers, old) for key, value in config.items()}
    return found | ({"num_hidden_layers": layers} if "num_hidden_layers" in config else {})


BUILT = 9
PERIOD = 4
"""From the fifth layer before this one on, the kinds of layers of every model here repeat after so many."""


def rows_of(model: str, config: Mapping[str, Any], *, whole: bool = False) -> list[Row]:
    """Every tensor of a checkpoint of `model`'s family with this config."""
    layers = config.get("text_config", config)["num_hidden_layers"]
    if whole or layers <= BUILT:
        return _built(model, config)
    found: list[Row] = []
    for part in by_layer(_built(model, thinned(dict(config), BUILT))):
        first = _layer(part[0][0])
        if first == BUILT:  # the draft layer
            found += _moved(part, layers)
        elif BUILT - PERIOD <= first < BUILT:
            for layer in range(first, layers, PERIOD):
                found += _moved(part, layer)
        else:
            found += part
    return found


def _moved(rows: Iterable[Row], layer: int) -> list[Row]:
    return [(_LAYER.sub(f"layers.{layer}.", name, count=1), dtype, shape) for name, dtype, shape in rows]


def _built(model: str, config: Mapping[str, Any]) -> list[Row]:
    row = FAMILIES[FAMILY_OF[model]]
    text = config.get("text_config", config)
    has_draft = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers")
    tensors = as_published(row, _saved(row, config), text["num_hidden_layers"], draft=bool(has_draft))
    method = config.get("quantization_config", {}).get("quant_method", "")
    native = {"": _plain, "fp8": _fp8, "mxfp4": _mxfp4}[method]
    return [stored for name, tensor in tensors.items() for stored in native(name, _dtype(tensor), tuple(tensor.shape))]


def _saved(row: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `save_pretrained` would write, on `meta`; experts that are published stacked stay as the class has them."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    built = transformers.AutoConfig.for_model(row.model_type, **values)
    with torch.device("meta"):
        model = getattr(transformers, row.model_class)(built)
    to_published_dtypes(row, model)
    tensors = model.state_dict()
    stacked = {name: tensors.pop(name) for name in [*tensors] if row.stacked and _STACKED.search(name)}
    saved: dict[str, Any] = revert_weight_conversion(model, tensors)
    return dict(sorted((saved | stacked).items()))


def _dtype(tensor: Any) -> str:
    return {"torch.bfloat16": "BF16", "torch.float32": "F32"}[str(tensor.dtype)]


def _plain(name: str, dtype: str, shape: tuple[int, ...]) -> list[Row]:
    return [(name, dtype, shape)]


def _fp8(name: str, dtype: str, shape: tuple[int, ...]) -> list[Row]:
    if not _IN_FP8.search(name) or _KEPT_IN_FP8.search(name):
        return [(name, dtype, shape)]
    return fp8_block(name.removesuffix(".weight"), *shape)


def _mxfp4(name: str, dtype: str, shape: tuple[int, ...]) -> list[Row]:
    """gpt-oss: experts alone, `[E, K, N]` of the class as `[E, N, K]` in groups of 32, two values a byte."""
    if not _STACKED.search(name):
        return [(name, dtype, shape)]
    experts, width, rows = shape
    groups = (experts, rows, width // 32)
    return [(f"{name}_blocks", "U8", (*groups, 16)), (f"{name}_scales", "U8", groups)]


_OUTSIDE = 1 << 30


def by_layer(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each layer, in order, then those outside the layers: the files of a replica."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(_layer(row[0]), []).append(row)
    yield from (parts[key] for key in sorted(parts))


def _layer(name: str) -> int:
    """Decoder layer of a name; draft modules and vision towers have layers of their own."""
    found = None if name.startswith("mtp.") or "vision" in name else _LAYER.search(name)
    return int(found[1]) if found else _OUTSIDE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(FAMILY_OF))
    parser.add_argument("out", type=Path, help="new folder")
    args = parser.parse_args()
    make_replica(args.model, args.out)


if __name__ == "__main__":
    main()
