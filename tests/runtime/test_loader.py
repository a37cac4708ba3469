"""What can be wrong with files: each failure is found, named and of its own class; nothing is ever left unset."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.archs import Key
from quantkit.errors import InputError, UsageError
from quantkit.spec.layout import LAYOUTS
from quantkit.spec.manifest import manifest_bytes, read_manifest
from quantkit.spec.mesh import Mesh
from quantkit_runtime import graft
from quantkit_runtime.errors import BrokenShard, OutOfMemory, ShapeMismatch, UnsupportedDtype
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.loader import open_model
from tests.runtime import outputs

MODEL = "tiny-minimax-m2"
Load = Callable[..., LoadedModel]
MANIFESTS = {"checkpoint": "quantkit_manifest.json", "sharded": "manifest.json"}


@pytest.fixture(params=["checkpoint", "sharded"])
def folder(request: pytest.FixtureRequest, converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A converted folder of either form that a test may damage."""
    return Path(shutil.copytree(converted(MODEL, request.param), tmp_path / "out"))


def largest_file(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and sign it again, as a faulty tool would."""
    path = next(folder / name for name in MANIFESTS.values() if (folder / name).exists())
    manifest = read_manifest(path)
    fields = manifest.model_dump()
    change(fields)
    path.write_bytes(manifest_bytes(type(manifest).model_validate(fields)))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a folder and drop its manifest, so that only the model can tell what is wrong."""
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    change(tensors)
    for name in (*MANIFESTS.values(), "model.safetensors.index.json"):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(converted: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted(MODEL, "checkpoint"), tmp_path / "out"))


# ------------------------------------------------------------------------------------------ sound files


def test_every_tensor_is_read_and_checked_once(folder: Path, load: Load) -> None:
    loaded = load(folder)
    manifest = read_manifest(next(folder / n for n in MANIFESTS.values() if (folder / n).exists()))
    assert loaded.checked.names == {record.name for record in manifest.tensors}
    assert loaded.checked.nbytes == sum(record.nbytes for record in manifest.tensors)
    assert len(loaded.checked.files) == 2


def test_no_verify_checks_nothing(folder: Path, load: Load) -> None:
    assert not load(folder, verify=False).checked.names


def test_planned_weights_are_the_bytes_in_memory(folder: Path, load: Load) -> None:
    loaded = load(folder)
    # views of one fused buffer have one storage; in the plan each part counts its own rows
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.model.state_dict().values()}
    assert sum(held.values()) == sum(loaded.memory.weights.values()) + loaded.memory.scales


def test_few_file_handles_suffice(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is open at a time."""
    open_now: set[int] = set()
    real_open, real_close = os.open, os.close
    most = 0

    def counting_open(path: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal most
        fd = real_open(path, *args, **kwargs)
        if str(path).endswith(".safetensors"):
            open_now.add(fd)
            most = max(most, len(open_now))
        return fd

    def counting_close(fd: int) -> None:
        open_now.discard(fd)
        real_close(fd)

    monkeypatch.setattr(os, "open", counting_open)
    monkeypatch.setattr(os, "close", counting_close)
    load(folder)
    assert 0 < most <= 8  # headers may be read in parallel; tensors are not
    assert not open_now


# ---------------------------------------------------------------------------------- missing or corrupt shards


def test_a_flipped_bit_names_file_and_tensor(folder: Path, load: Load) -> None:
    path = largest_file(folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BrokenShard, match="checksum of tensor") as error:
        load(folder)
    assert path.name in str(error.value)
    assert "--no-verify" in error.value.hint
    load(folder, verify=False)


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_a_truncated_or_longer_file_is_found_before_reading(folder: Path, load: Load, change: int) -> None:
    path = largest_file(folder)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    with pytest.raises(BrokenShard, match=path.name):
        load(folder)


def test_a_missing_file_is_named(folder: Path, load: Load) -> None:
    path = largest_file(folder)
    path.unlink()
    with pytest.raises(BrokenShard, match=path.name):
        load(folder)


def test_a_missing_file_without_a_manifest_is_named(checkpoint: Path, load: Load) -> None:
    (checkpoint / MANIFESTS["checkpoint"]).unlink()
    path = largest_file(checkpoint)
    path.unlink()
    with pytest.raises(BrokenShard, match=path.name):
        load(checkpoint)


def test_swapped_files_of_equal_size_are_found(folder: Path, load: Load) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)

    def same_size(fields: dict[str, Any]) -> None:
        for file in fields["files"]:
            file["size"] = (folder / file["name"]).stat().st_size

    edit_manifest(folder, same_size)
    with pytest.raises(InputError, match=r"disagree|do not lie in the file"):  # the second where a file got shorter
        load(folder)


def test_missing_tensors_are_named_all_at_once(checkpoint: Path, load: Load) -> None:
    lost = ("model.layers.1.block_sparse_moe.experts.7.w2.weight", "model.layers.3.self_attn.o_proj.weight")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in lost:
            del tensors[name]

    with pytest.raises(BrokenShard, match="lacks tensors") as error:
        load(rewrite(checkpoint, drop))
    assert "layers.1.mlp.experts.down_proj" in str(error.value)
    assert "lacks experts 7" in str(error.value)
    assert "layers.3.self_attn.o_proj" in str(error.value)


def test_a_missing_scale_is_an_error(checkpoint: Path, load: Load) -> None:
    with pytest.raises(BrokenShard, match=r"q_proj.weight \(weight_scale\)"):
        load(rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight_scale")))


def test_an_unexpected_tensor_is_named(checkpoint: Path, load: Load) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)

    with pytest.raises(InputError, match=r"no place for[\s\S]*q_proj.bias"):
        load(rewrite(checkpoint, add))


def test_layers_beyond_the_model_are_left_unread_and_listed(checkpoint: Path, load: Load) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.6.self_attn.q_proj.weight"] = tensors["model.layers.5.self_attn.q_proj.weight"].clone()

    loaded = load(rewrite(checkpoint, add))
    assert loaded.unused == ("model.layers.6.self_attn.q_proj.weight",)
    assert not any(name.startswith("layers.6") for name in loaded.account.expected)


# ------------------------------------------------------------------------------------------ shapes and dtypes


def test_a_wrong_shape_names_tensor_and_both_shapes(checkpoint: Path, load: Load) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        tensors["model.layers.0.self_attn.o_proj.weight"] = tensors["model.layers.0.self_attn.o_proj.weight"][:, :-3]

    with pytest.raises(ShapeMismatch) as error:
        load(rewrite(checkpoint, cut))
    assert "[159] in the files (model.norm.weight), the model wants [160]" in str(error.value)
    assert "[160, 125]" in str(error.value)


def test_one_expert_of_another_shape_is_named(checkpoint: Path, load: Load) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w1.weight"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:, :-1]

    with pytest.raises(ShapeMismatch, match=rf"{name} \[96, 159\] \(others \[96, 160\]\)"):
        load(rewrite(checkpoint, cut))


def test_scales_along_the_wrong_axis_are_refused(checkpoint: Path, load: Load) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight_scale"] = torch.ones(1, 128)

    with pytest.raises(ShapeMismatch, match=r"weight_scale\): \[1, 128\] in the files .* wants \[160, 1\]"):
        load(rewrite(checkpoint, turn))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_an_unsupported_dtype_is_named(checkpoint: Path, load: Load, dtype: torch.dtype) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)

    with pytest.raises(UnsupportedDtype, match=r"lm_head.weight: stored as"):
        load(rewrite(checkpoint, cast))


def test_experts_that_are_partly_int8_are_refused(checkpoint: Path, load: Load) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w1.weight"

    def keep_one(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].bfloat16()
        del tensors[f"{name}_scale"]

    with pytest.raises(UnsupportedDtype, match=r"BF16 \(1 tensors\) and I8 \(31 tensors\)"):
        load(rewrite(checkpoint, keep_one))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"format": "int-quantized", "config_groups": 5}, "config_groups: activations"),
        ({"format": "int-quantized", "config_groups": {"g": [1]}}, "g: activations"),
        ({"format": "int-quantized", "config_groups": {"g": {"input_activations": "token"}}}, "g: activations"),
    ],
)
def test_a_scheme_of_another_tool_is_refused(
    declared: dict[str, object], words: str, checkpoint: Path, load: Load
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = declared
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / MANIFESTS["checkpoint"]).unlink()
    with pytest.raises(UnsupportedDtype, match=words):
        load(checkpoint)


def test_a_hardware_layout_is_refused(folder: Path, load: Load) -> None:
    layout = LAYOUTS["marlin_k64"]

    def pack(fields: dict[str, Any]) -> None:
        records = (row for row in fields["tensors"] if row["dtype"] == "I8")
        record = next(row for row in records if not layout.misfits(*row["shape"][-2:]))
        record.update(layout=layout.name, target=layout.target, shape=layout.packed_shape(record["shape"]))

    edit_manifest(folder, pack)
    with pytest.raises(UnsupportedDtype, match="marlin_k64"):
        load(folder)


# --------------------------------------------------------------------------------------------- mesh, memory


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"ep": 2, "tp": 2}])
def test_a_mesh_of_several_ranks_is_refused(folder: Path, load: Load, mesh: dict[str, int]) -> None:
    edit_manifest(folder, lambda fields: fields.update(mesh=Mesh(**mesh).model_dump()))
    with pytest.raises(UsageError, match=r"a mesh of \d rank\(s\); 1 process\(es\) run"):
        load(folder)


def test_what_cannot_fit_is_refused_before_reading(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_runtime.device.Device.free_memory", lambda self: 1 << 20)
    monkeypatch.setattr("quantkit_runtime.shards.ModelFiles.fetch", lambda *a, **k: pytest.fail("a tensor was read"))
    with pytest.raises(OutOfMemory, match="weights: experts"):
        load(folder)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("HIP out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_an_allocation_that_fails_shows_the_plan(
    folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("quantkit_runtime.shards.ModelFiles.fetch", fail)
    with pytest.raises(OutOfMemory, match=r"an allocation failed[\s\S]*KV cache"):
        load(folder)


def test_another_runtime_error_keeps_its_traceback(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("quantkit_runtime.shards.ModelFiles.fetch", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        load(folder)


# ------------------------------------------------------------------------------------- nothing stays unset


def test_every_parameter_is_overwritten(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The skeleton's stored buffers are poisoned; what the loader does not set would show as NaN."""
    real = graft.build_skeleton

    def poisoned(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = real(*args, **kwargs)
        stored = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.fill_(float("nan"))
        return model

    monkeypatch.setattr(graft, "build_skeleton", poisoned)
    for name, value in load(folder).model.state_dict().items():
        assert not value.is_meta, name
        assert bool(torch.isfinite(value.float()).all()), name


def test_a_parameter_without_a_value_is_an_error(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    real = graft.Planner.run

    def forgetful(self: Any) -> Any:
        planned, unused = real(self)
        return [row for row in planned if row.name != "model.norm.weight"], unused

    monkeypatch.setattr(graft.Planner, "run", forgetful)
    with pytest.raises(InputError, match=r"left without a value[\s\S]*model.norm.weight"):
        load(folder)


# ----------------------------------------------------------------------------------------------- not a folder


@pytest.mark.parametrize(("name", "message"), [("nothing", "does not exist"), ("config.json", "is a file")])
def test_a_wrong_path(checkpoint: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_model(checkpoint / name)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        open_model(tmp_path)


def test_a_changed_manifest_is_refused(folder: Path) -> None:
    path = next(folder / name for name in MANIFESTS.values() if (folder / name).exists())
    path.write_text(path.read_text().replace('"vocab_size": 4096', '"vocab_size": 4095'))
    with pytest.raises(InputError, match="changed or damaged"):
        open_model(folder)


def test_stored_keys_are_those_of_the_files(converted: Callable[..., Path]) -> None:
    with open_model(converted(MODEL, "sharded")) as files:
        assert files.has(Key(3, "attn.qkv"))
        assert files.has(Key(3, "expert.gate_up", part="weight_scale"))
    with open_model(outputs.MODELS / MODEL) as files:
        assert files.has(Key(3, "expert.gate", 7))
