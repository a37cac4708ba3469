"""Two processes that share the batches leave the bytes of one, and fail together."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml

from quantkit.calibrate.data import Batch
from quantkit.calibrate.passes import LayerRun
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.run import calibrate
from quantkit.calibrate.stream import LayerStream
from quantkit.errors import InputError
from tests.calibrate.conftest import small_recipe
from tests.calibrate.test_run import contents

ROOT = Path(__file__).parents[2]


def shared(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """`torchrun ... quantkit calibrate`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "quantkit", "calibrate", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_two_processes_leave_the_bytes_of_one(minimax: Path, tmp_path: Path) -> None:
    """All passes: decisions, statistics with an odd number of batches, check; experts that starve are fed."""
    recipe = small_recipe(samples=13, held_out=7, starving_experts="all_tokens", batch_tokens=96)
    values = {**recipe.model_dump(mode="json"), "auto_keep": {"kl": 0.01}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    done = shared(str(minimax), "-o", str(tmp_path / "two"), "--recipe", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("coverage 100.0%") == 1
    calibrate(minimax, tmp_path / "one", type(recipe).model_validate(values))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "two" / ".quantkit-work").iterdir()) == ["lock", "options.json"]


def test_what_one_refuses_all_refuse() -> None:
    """The second process meets a bad sample in its first batch; the first one, which met none, raises the same."""
    error = pickle.loads(pickle.dumps(InputError("sample 1 is bad", "leave it out", items=["a"])))

    class Second(Ranks):
        def shared(self, values: Sequence[Any]) -> list[Any]:
            return [*values, error]

    batches = [Batch(torch.zeros(1, 4, dtype=torch.int64), 0, (index,), ("",)) for index in range(3)]
    with ThreadPoolExecutor(1) as pool:
        run = LayerRun(cast("LayerStream", ()), 0, batches, [], pool, 2, lambda _: None, Second(0, 2))
        found = run.look(lambda index, _: index)
        assert next(found) == (0, 0)
        with pytest.raises(InputError, match="sample 1 is bad") as caught:
            next(found)
    assert (caught.value.hint, caught.value.items) == ("leave it out", ("a",))
