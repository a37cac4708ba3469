"""Converted folders of both forms, written without `quantkit convert`: a second opinion on what the runtime reads.

Weights are quantized by `tests.reference`, files are written by the safetensors package, and the manifest is filled in
from what was written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.archs import Architecture, Key, architecture_for
from quantkit.spec.manifest import Manifest, OutputFile, RankFiles, TensorRecord, manifest_bytes
from quantkit.spec.mesh import Mesh
from quantkit.spec.tensorfile import dtype_name, read_header
from tests.reference import quantized_weight

MODELS = Path(__file__).resolve().parents[1] / "models"
Scheme = Callable[[Key], str]
Tensors = dict[Key, Tensor]


def w8a8(key: Key) -> str:
    return "w8a8"


def grouped(key: Key) -> str:
    """Groups everywhere: 128 divides few widths of the tiny models, so groups of other sizes are met too."""
    return "w8a8-group128"


def kept(key: Key) -> str:
    return "keep"


def architecture(folder: Path) -> Architecture:
    return architecture_for(json.loads((folder / "config.json").read_text()))


def read_source(source: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(source.glob("*.safetensors")) for name, t in load_file(path).items()}


def quantize(arch: Architecture, tensors: dict[str, Tensor], scheme: Scheme) -> dict[str, tuple[Key, Tensor, str]]:
    """Name -> (key, tensor, scheme); quantized weights become int8 with a `weight_scale` beside them."""
    out = {}
    for name, key, tensor in one_by_one(arch, tensors):
        chosen = scheme(key) if arch.role(key.role).quantize and key.part == "weight" else "keep"
        if chosen == "keep":
            out[name] = (key, tensor, chosen)
            continue
        q, scale = quantized_weight(tensor)
        out[name] = (key, q.to(torch.int8), chosen)
        scale_name = f"{name.removesuffix('.weight')}.weight_scale"
        out[scale_name] = (key.with_part("weight_scale"), scale.float(), "keep")
    return out


def one_by_one(arch: Architecture, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Key, Tensor]]:
    """(name, key, tensor), with experts that the source stacks taken apart: `[N, K]` each, gate and up rows apart."""
    for name, tensor in tensors.items():
        key = arch.parse(name)
        assert key is not None, name
        if not (arch.role(key.role).per_expert and key.expert is None):
            yield name, key, tensor
            continue
        for expert, matrix in enumerate(tensor):
            rows = matrix.T if arch.experts_transposed and key.part == "weight" else matrix
            halves = (rows[0::2], rows[1::2]) if arch.gate_up_interleaved else rows.chunk(2)
            parts = zip(arch.role(key.role).parts, halves, strict=True) if arch.role(key.role).parts else [("", rows)]
            for role, part in parts:
                one = key._replace(expert=expert, role=role or key.role)
                short = {"expert.gate": "gate_proj", "expert.up": "up_proj"}.get(role, "down_proj")
                prefix = name.partition("experts.")[0]
                yield f"{prefix}experts.{expert}.{short}.{key.part}", one, part.contiguous()


def write_checkpoint(source: Path, out: Path, scheme: Scheme = w8a8, *, manifest: bool = True) -> Path:
    """The checkpoint form, in two files; a weight and its scales stand in one."""
    copy_rest(source, out)
    rows = quantize(architecture(source), read_source(source), scheme)
    modules = sorted({name.removesuffix("weight").removesuffix("weight_scale") for name in rows})
    halves = [set(modules[::2]), set(modules[1::2])]
    names = [
        [n for n in sorted(rows) if n.removesuffix("weight").removesuffix("weight_scale") in half] for half in halves
    ]
    files = {f"model-0000{number}-of-00002.safetensors": half for number, half in enumerate(names, 1)}
    for file, members in files.items():
        save_file({name: rows[name][1] for name in members}, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in files.items() for name in members}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if manifest:
        write_manifest(out, "checkpoint", rows)
    return out


def write_sharded(source: Path, out: Path, scheme: Scheme = w8a8, mesh: Mesh | None = None) -> Path:
    """The sharded form of one rank: fused and stacked, tensors named by their key."""
    copy_rest(source, out)
    arch = architecture(source)
    rows = quantize(arch, read_source(source), scheme)
    by_key = {key: (tensor, chosen) for key, tensor, chosen in rows.values()}
    for key in list(by_key):  # experts first: parts are fused within an expert, then experts are stacked
        fused = arch.role(key.role).fuse
        parts = [key._replace(role=part) for part in arch.role(fused).parts] if fused else []
        if parts and all(part in by_key for part in parts):
            joined = [by_key.pop(part) for part in parts]
            by_key[key._replace(role=fused)] = (torch.cat([tensor for tensor, _ in joined]), joined[0][1])
    stacks: dict[Key, dict[int, tuple[Tensor, str]]] = {}
    for key in [key for key in by_key if key.expert is not None]:
        stacks.setdefault(key._replace(expert=None), {})[key.expert] = by_key.pop(key)
    for key, experts in stacks.items():
        by_key[key] = (torch.stack([experts[e][0] for e in sorted(experts)]), experts[0][1])
    named = {key.shard_name: (key, tensor, chosen) for key, (tensor, chosen) in by_key.items()}
    dense = {name: row[1] for name, row in named.items() if not arch.role(row[0].role).per_expert}
    save_file(dense, out / "dense.safetensors")
    routed = {name: row[1] for name, row in named.items() if arch.role(row[0].role).per_expert}
    if routed:
        save_file(routed, out / "experts.safetensors")
    write_manifest(out, "sharded", named, mesh)
    return out


def copy_rest(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(path, out / path.name)


def write_manifest(out: Path, form: str, rows: dict[str, tuple[Key, Tensor, str]], mesh: Mesh | None = None) -> None:
    """A manifest of every *.safetensors file of `out` as it lies there."""
    config = json.loads((out / "config.json").read_text())
    config = config.get("text_config", config) | {"model_type": config["model_type"]}
    files, tensors = [], []
    for path in sorted(out.glob("*.safetensors")):
        data = path.read_bytes()
        files.append(OutputFile(name=path.name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
        for name, info in read_header(path).tensors.items():
            key, tensor, scheme = rows[name]
            assert info.dtype == dtype_name(tensor.dtype)
            tensors.append(
                TensorRecord(
                    name=name,
                    sources=(),
                    role=key.role,
                    layer=key.layer,
                    experts=tuple(range(info.shape[0])) if tensor.ndim == 3 else (),
                    part=key.part,
                    file=path.name,
                    offset=info.start,
                    nbytes=info.nbytes,
                    dtype=info.dtype,
                    shape=info.shape,
                    global_shape=info.shape,
                    scheme=scheme,
                    scale=scale if (scale := f"{name.removesuffix('weight')}weight_scale") in rows else "",
                    xxh3=xxhash.xxh3_128_hexdigest(data[info.start : info.end]),
                )
            )
    layers = tuple(range(config["num_hidden_layers"]))
    rank = RankFiles(rank=0, files=tuple(file.name for file in files), layers=layers)
    manifest = Manifest(
        form="sharded" if form == "sharded" else "checkpoint",
        tool_version="0",
        options_digest="",
        architecture="",
        model_type=config["model_type"],
        recipe={},
        mesh=mesh or Mesh(),
        vocab_size=config["vocab_size"],
        tied_embeddings=False,
        source_files=(),
        files=tuple(files),
        tensors=tuple(tensors),
        ranks=(rank,) if form == "sharded" else (),
        parameters=0,
    )
    name = "manifest.json" if form == "sharded" else "quantkit_manifest.json"
    (out / name).write_bytes(manifest_bytes(manifest))
