"""`quantkit inspect`: right figures, and planted faults named with their remedy."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from quantkit.cli import main
from quantkit.inspect import Inspection, inspect, inspect_line
from tests.inspect import sparse

MODELS = Path(__file__).parents[1] / "models"
TINY = ["tiny-minimax-m2", "tiny-deepseek-v3"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(MODELS / TINY[0], tmp_path / "model"))


def edit_config(root: Path, **changes: Any) -> None:
    path = root / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load, change and save the tensors with the safetensors library."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors")


def errors(found: Inspection) -> list[str]:
    return [problem.what for problem in found.problems if problem.level == "error"]


@pytest.mark.parametrize("name", TINY)
def test_figures_equal_those_of_the_file(name: str) -> None:
    found = inspect(MODELS / name)
    parameters = nbytes = tensors = 0
    with safe_open(MODELS / name / "model.safetensors", framework="pt") as file:
        for key in sorted(file.keys()):
            tensor = file.get_tensor(key)
            tensors, parameters, nbytes = tensors + 1, parameters + tensor.numel(), nbytes + tensor.nbytes
    assert [problem.what for problem in found.problems] == ["no licence stands beside the weights"]
    assert (found.tensors, found.parameters, found.nbytes) == (tensors, parameters, nbytes)
    assert sum(column.parameters for column in found.columns) == parameters
    assert sum(found.dtypes.values()) == nbytes


@pytest.mark.parametrize("name", TINY)
def test_active_parameters_equal_a_count_over_modules(name: str) -> None:
    """Every parameter of transformers' model, experts weighted by the share that a token meets."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODELS / name)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    counts = {key: value.numel() for key, value in model.named_parameters()}
    counts |= {key: value.numel() for key, value in model.named_buffers() if key.endswith("correction_bias")}
    experts = sum(count for key, count in counts.items() if ".experts." in key)
    found = inspect(MODELS / name)
    assert found.parameters == sum(counts.values())
    share = config.num_experts_per_tok / config.num_local_experts
    assert found.active_parameters == pytest.approx(found.parameters - experts * (1 - share))


@pytest.mark.parametrize(
    ("model", "billions", "active", "gib"),
    # MiniMax-M2's published 10 B active leave out the embedding tables (1.2 B)
    [(sparse.mixtral_8x7b, 46.7, 12.9, 87.0), (sparse.minimax_m2, 228.7, 9.8 + 1.2, 214.0)],
    ids=["mixtral-8x7b", "minimax-m2"],
)
def test_full_size_models_have_their_published_sizes(
    model: Callable[[], Any], billions: float, active: float, gib: float, tmp_path: Path
) -> None:
    found = inspect(sparse.write(tmp_path / "model", *model()))
    assert found.sound
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=0.01)
    assert found.nbytes / 2**30 == pytest.approx(gib, rel=0.005)
    assert found.quantized > 0.98 * found.parameters


def test_int8_size_is_one_byte_and_a_scale_for_each_row(tmp_path: Path) -> None:
    found = inspect(sparse.write(tmp_path / "model", *sparse.mixtral_8x7b()))
    rows = {column.name: column for column in found.columns}["experts"]
    assert rows.output_nbytes == rows.parameters + 4 * 32 * 8 * (2 * 14336 + 4096)
    bf16 = inspect(tmp_path / "model", "bf16")
    assert (bf16.quantized, bf16.output_nbytes) == (0, bf16.nbytes)


PLANTED_IN_CONFIG = {
    "heads": ({"num_attention_heads": 8}, "attn.q: 6 tensors have 128 rows, config.json says 256"),
    "kv heads": ({"num_key_value_heads": 4}, "attn.k: 6 tensors have 64 rows, config.json says 128"),
    "head size": ({"head_dim": 40}, "attn.o: 6 tensors have 128 columns, config.json says 160"),
    "hidden": ({"hidden_size": 192}, "attn.q: 6 tensors have 160 columns, config.json says 192"),
    "vocabulary": ({"vocab_size": 4097}, "embed: 1 tensors have 4096 rows, config.json says 4097"),
    "expert width": ({"intermediate_size": 128}, "expert.gate: 96 tensors have 96 rows, config.json says 128"),
    "fewer experts": ({"num_local_experts": 15}, "config.json counts 15 experts, the tensors hold 16"),
    "more experts": ({"num_local_experts": 17}, "config.json counts 17 experts, some are missing"),
    "more layers": ({"num_hidden_layers": 8}, "config.json counts 8 layers, 2 of them have no tensors: 6-7"),
    "fewer layers": ({"num_hidden_layers": 5}, "layers 5 lie beyond the 5 of config.json"),
}


@pytest.mark.parametrize("fault", PLANTED_IN_CONFIG)
def test_a_wrong_config_is_named(fault: str, tiny: Path) -> None:
    changes, expected = PLANTED_IN_CONFIG[fault]
    edit_config(tiny, **changes)
    found = inspect(tiny)
    assert any(expected in what for what in errors(found)), errors(found)
    assert not found.sound
    assert all(problem.remedy for problem in found.problems)


def test_mla_ranks_are_checked(tmp_path: Path) -> None:
    root = Path(shutil.copytree(MODELS / TINY[1], tmp_path / "model"))
    edit_config(root, kv_lora_rank=96, q_lora_rank=80)
    assert {what.split(":")[0] for what in errors(inspect(root))} >= {"mla.kv_a", "mla.q_a", "mla.kv_a_norm"}


def test_missing_expert_is_named(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.pop("model.layers.3.block_sparse_moe.experts.7.w2.weight"))
    problem = inspect(tiny).problems[0]
    assert problem.level == "error"
    assert problem.items == ("layer 3 expert.down: experts 7",)


def test_unclassified_names_are_listed(tiny: Path) -> None:
    import torch

    rewrite(tiny, lambda tensors: tensors.update({"model.layers.0.self_attn.novel.weight": torch.zeros(2)}))
    found = inspect(tiny)
    assert found.unclassified == ("model.layers.0.self_attn.novel.weight",)
    assert "no role" in errors(found)[0]


def test_orphan_scale_and_bare_int8_weight(tiny: Path) -> None:
    import torch

    def change(tensors: dict[str, Any]) -> None:
        name = "model.layers.0.self_attn.{}_proj.weight"
        tensors[name.format("q")] = tensors[name.format("q")].to(torch.int8)
        del tensors[name.format("k")]
        tensors[name.format("k") + "_scale"] = torch.ones(64, 1)

    rewrite(tiny, change)
    found = errors(inspect(tiny))
    assert "1 scales have no weight" in found
    assert "1 8-bit weights have no scale" in found


def test_stale_quantization_config_is_a_note(tiny: Path) -> None:
    edit_config(tiny, quantization_config={"quant_method": "fp8"})
    found = inspect(tiny)
    assert found.sound
    assert any("the weights are plain" in problem.what for problem in found.problems)


def test_bare_config_gives_the_structure(tmp_path: Path) -> None:
    shutil.copy(MODELS / TINY[0] / "config.json", tmp_path)
    found = inspect(tmp_path)
    assert found.sound
    assert "only config.json speaks" in found.problems[0].what
    assert (found.structure.layers, found.structure.experts, found.structure.moe_layers) == (6, 16, None)
    assert "16 experts, top 2" in inspect_line(found)


def test_truncated_shard_is_named_and_the_rest_described(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    found = inspect(tiny)
    assert found.problems[0].level == "error"
    assert "truncated" in found.problems[0].what
    assert found.structure.layers == 6


def test_index_that_names_a_missing_file(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        names = sorted(file.keys())
    weight_map = dict.fromkeys(names, "model.safetensors") | {names[0]: "model-00002-of-00002.safetensors"}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = inspect(tiny)
    assert found.problems[0].items == ("model-00002-of-00002.safetensors",)
    assert found.tensors == len(names)


def test_command_prints_problems_first_and_exits_3(tiny: Path) -> None:
    edit_config(tiny, num_attention_heads=8)
    done = CliRunner().invoke(main, ["inspect", str(tiny)])
    assert done.exit_code == 3
    assert done.output.startswith("error: attn.q: 6 tensors have 128 rows")
    assert "next: the tensors decide: correct num_attention_heads" in done.output


def test_json_is_one_document(tiny: Path) -> None:
    done = CliRunner().invoke(main, ["inspect", str(tiny), "--json"])
    assert done.exit_code == 0
    assert Inspection.model_validate_json(done.stdout) == inspect(tiny)


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_wrong_path(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "file":
        path.touch()
    done = CliRunner().invoke(main, ["inspect", str(path)])
    assert done.exit_code == 3
    assert str(path) in done.stderr
    assert "next: give the folder" in done.stderr


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from quantkit.inspect import inspect; import quantkit.commands.inspect"
    )
    code += f"; inspect(Path({str(MODELS / TINY[0])!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
