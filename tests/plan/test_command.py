"""`quantkit plan`: what it prints, refuses and never loads."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner, Result

from quantkit.cli import main
from quantkit.plan.devices import DEVICES
from quantkit.plan.report import PlanReport
from tests.plan.facts import CONFIGS

TINY = Path(__file__).parents[1] / "models" / "tiny-minimax-m2"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["MiniMax-M2.7"]))
    return path


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def as_report(*arguments: object) -> PlanReport:
    return PlanReport.model_validate_json(plan(*arguments, "--json").stdout)


def test_text_has_every_part(config: Path) -> None:
    done = plan(config, "--device", "K100_AI")
    assert done.exit_code == 0
    for text in (
        "minimax_m2: 229 B parameters, 214 GiB (F8_E4M3 + F32 scale)",
        "253,952 B a token",
        "cards of K100_AI, 64.0 GiB (as the driver reports it): fewest 6, recommended 8 (1.2 to",
        "weights: experts",
        "reserve",
        "1,000,000",
        "beyond positions",
        f"next: quantkit convert {config.parent} -o OUT --format sharded --tp 8",
    ):
        assert text in done.output, text


def test_sizes_that_make_no_model_are_refused(config: Path) -> None:
    config.write_text(json.dumps({**CONFIGS["MiniMax-M2.7"], "num_experts_per_tok": 1000}))
    done = plan(config, "--device", "K100_AI")
    assert (done.exit_code, "routes each token to 1000 of 256 experts" in done.stderr) == (3, True)


def test_experts_of_a_token_are_those_of_the_class_where_the_config_is_silent(config: Path) -> None:
    whole = CONFIGS["MiniMax-M2.7"]
    assert whole["num_experts_per_tok"] == transformers.MiniMaxM2Config().num_experts_per_tok
    before = as_report(config, "--device", "K100_AI")
    config.write_text(json.dumps({key: value for key, value in whole.items() if key != "num_experts_per_tok"}))
    assert as_report(config, "--device", "K100_AI") == before


def test_experts_of_which_nobody_says_how_many_a_token_has_are_refused(config: Path) -> None:
    silent = {"num_experts_per_tok", "intermediate_size", "model_type"}
    kept = {key: value for key, value in CONFIGS["MiniMax-M2.7"].items() if key not in silent}
    config.write_text(json.dumps({**kept, "model_type": "of_tomorrow"}))
    done = plan(config, "--device", "K100_AI")
    assert (done.exit_code, str(config) in done.stderr) == (3, True)
    assert "how many of its 256 experts each token is routed to: add num_experts_per_tok" in done.stderr
    assert "how wide each of its 256 experts is: add moe_intermediate_size" in done.stderr


def test_layers_without_tensors_are_told(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in TINY.iterdir():
        (model / path.name).symlink_to(path)
    found = {**json.loads((TINY / "config.json").read_text()), "num_hidden_layers": 24}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(found))
    done = plan(model, "--device", "K100_AI", "--cards", 8)
    assert done.exit_code == 0
    assert "stages without weights" in plan(model, "--device", "K100_AI", "--cards", 8, "--json").stdout


def test_cards_of_a_request_are_planned_for(config: Path) -> None:
    found = as_report(config, "--device", "k100-ai", "--cards", 16, "--concurrency", 4)
    assert {row.tp * row.pp * row.dp for row in found.proposals} == {16}
    assert any(
        "tp=16 would leave the node of 8 cards" in row.reason and "tp16 pp1 dp1 ep1" in row.examples
        for row in found.rejected
    )
    wide = as_report(config, "--device", "K100_AI", "--cards", 16, "--cards-per-node", 16)
    assert not any("node" in row.reason for row in wide.rejected)


def test_rejections_use_the_words_of_convert(tmp_path: Path) -> None:
    """6 cards: 48 heads divide, 8 kv heads do not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Mixtral-8x7B"]))
    found = as_report(path, "--card-memory", 64, "--cards", 6)
    reasons = " ".join(row.reason for row in found.rejected)
    assert "tp=6 does not divide attn.k with 8 kv_heads" in reasons or "tp=6 does not divide attn" in reasons
    assert "tp=3 does not divide" in reasons


def test_int8_cache_lets_more_in(config: Path) -> None:
    plain = as_report(config, "--device", "K100_AI", "--cards", 8).proposals[0]
    keys = as_report(config, "--device", "K100_AI", "--cards", 8, "--kv-keys", "int8").proposals[0]
    both = as_report(config, "--device", "K100_AI", "--cards", 8, "--kv-keys", "int8", "--kv-values", "int8").proposals[
        0
    ]
    assert plain.largest_batch < keys.largest_batch < both.largest_batch
    assert plain.longest_context < keys.longest_context < both.longest_context


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_a_cache_of_one_tensor_is_of_one_dtype(family: str, tiny: Callable[[str], Path]) -> None:
    path = tiny(family)
    done = plan(path, "--device", "K100_AI", "--kv-keys", "int8")
    assert (done.exit_code, "--kv-keys and --kv-values alike" in done.output) == (2, True)
    assert plan(path, "--device", "K100_AI", "--kv-keys", "int8", "--kv-values", "int8").exit_code == 0


def test_what_fits_is_the_limit(config: Path) -> None:
    """The longest context fits, one token more does not; so for the batch."""
    best = as_report(config, "--device", "K100_AI", "--cards", 8).proposals[0]
    fits = ("--device", "K100_AI", "--cards", 8, "--json")

    def same_mesh_fits(*arguments: object) -> bool:
        found = PlanReport.model_validate_json(plan(config, *fits, *arguments).stdout)
        return any(
            (row.tp, row.pp, row.dp) == (best.tp, best.pp, best.dp) and best.ep in (row.ep, *row.other_ep)
            for row in found.proposals
        )

    assert same_mesh_fits("--context", best.longest_context)
    assert not same_mesh_fits("--context", best.longest_context + 1)
    assert same_mesh_fits("--concurrency", best.largest_batch)
    assert not same_mesh_fits("--concurrency", best.largest_batch + 1)


def test_what_would_fit_is_said_where_only_the_cache_is_too_large(tmp_path: Path) -> None:
    """Both remedies fit, and a little more of either does not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["MiniMax-M3"]))
    cards = (path, "--device", "K100_AI", "--cards", 8)
    done = plan(*cards)
    assert done.exit_code == 3
    found = re.search(r"fits on 8 cards \(.*\): (\d+) sequences of 32,768 tokens, or 8 of ([\d,]+)", done.output)
    assert found
    batch, context = int(found[1]), int(found[2].replace(",", ""))
    assert plan(*cards, "--concurrency", batch).exit_code == 0
    assert plan(*cards, "--context", context).exit_code == 0
    assert plan(*cards, "--context", context + 1).exit_code == 3


def test_nothing_fits_is_an_answer_with_code_3(config: Path) -> None:
    done = plan(config, "--card-memory", 16, "--cards", 2)
    assert done.exit_code == 3
    assert "nothing fits on 2 cards" in done.output
    assert "the weights of one card alone are larger than its memory less the reserve" in done.output
    assert "fewest 24" in done.output
    assert "with less work" not in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "no card was given"),
        (["--device", "H9000"], 2, "choices: K100_AI"),
        (["--device", "Z100"], 2, "pass --card-memory GiB too"),
        (["--card-memory", "64", "--recipe", "none-such"], 2, "no recipe"),
    ],
)
def test_bad_use(arguments: list[str], code: int, text: str, config: Path) -> None:
    done = plan(config, *arguments)
    assert done.exit_code == code
    assert text in done.stderr


def test_wrong_path(tmp_path: Path) -> None:
    done = plan(tmp_path / "nothing", "--card-memory", 64)
    assert done.exit_code == 3
    assert "neither a folder nor a config.json" in done.stderr


def test_latents_have_one_dtype(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Kimi-K2"]))
    done = plan(path, "--device", "K100_AI", "--kv-keys", "int8")
    assert done.exit_code == 2
    assert "latents" in done.stderr


def test_an_unknown_model_type_and_a_vision_tower_are_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["Llama-3-70B"], "model_type": "novel", "vision_config": {"depth": 2}}))
    warnings = " ".join(as_report(path, "--card-memory", 64).warnings)
    assert "novel has no record of its own" in warnings
    assert "vision tower" in warnings


def test_no_speed_is_claimed_of_any_card() -> None:
    assert all(set(vars(row)) == {"name", "arch", "mib", "note"} for row in DEVICES)


@pytest.mark.parametrize("model", [str(TINY), "config"])
def test_torch_is_not_imported(model: str, config: Path) -> None:
    path = str(config) if model == "config" else model
    code = (
        "import sys; from quantkit.cli import main\n"
        f"main(['plan', {path!r}, '--device', 'K100_AI', '--json'], standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


_GROUPS = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": "many"},
        {"num_nextn_predict_layers": -1},
        {"num_nextn_predict_layers": 2**31},
        {"first_k_dense_replace": 2.5},
        {"num_hidden_layers": 0},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": []}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}},
        {"quantization_config": {"quant_method": "fp8", "ignore": 5}},
        {"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}},
        {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [{"name": 1}]}},
        {"quantization_config": {**_GROUPS, "config_groups": {"g": {"weights": {"num_bits": "x"}}}}},
        {"quantization_config": {**_GROUPS, "config_groups": {"g": {"weights": {"num_bits": float("inf")}}}}},
        {"quantization_config": {**_GROUPS, "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": [2]}}}}},
        {"quantization_config": {**_GROUPS, "config_groups": {"g": 0.5}}},
        {"intermediate_size": 0},
        {"rope_scaling": {"type": "yarn", "factor": 10**400, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**400}},
        {"layer_types": 3, "mlp_only_layers": 7, "rope_scaling": "much"},
    ],
)
def test_strange_configs_get_no_traceback(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Mixtral-8x7B"] | change))
    for command in (["plan", str(path), "--card-memory", "64"], ["inspect", str(path)]):
        done = CliRunner().invoke(main, command)
        assert done.exit_code in (0, 3)
        assert done.exception is None or isinstance(done.exception, SystemExit)


def test_the_printed_commands_name_the_recipe_as_it_was_given(config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("name: mine\ndescription: of a user\n")
    found = as_report(config, "--device", "K100_AI", "--recipe", recipe)
    assert found.recipe == "mine"
    assert all(f"--recipe {recipe}" in line for line in found.commands)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_memory_that_is_no_number(value: str, config: Path) -> None:
    done = plan(config, f"--card-memory={value}")
    assert done.exit_code == 2
    assert "--card-memory" in done.output


def test_the_next_step_can_be_copied_whatever_the_paths_are(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "config.json").write_text(config.read_text())
    assert f"next: quantkit convert '{folder}' -o OUT" in plan(folder, "--device", "K100_AI").output
    out = tmp_path / "it's converted, and stands in a folder whose path is longer than any terminal is wide"
    done = CliRunner().invoke(main, ["convert", str(TINY), "-o", str(out)])
    last = done.output.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(last) == ["quantkit", "verify", str(out), "--source", str(TINY)]
