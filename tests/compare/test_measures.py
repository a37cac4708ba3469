"""The measures themselves: divergence, fingerprints, limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.compare.distributions import at_same_tokens, cosine, divergence, edges, keep
from quantkit.compare.fingerprint import explain, of_matrix, of_rows, of_weight, relative_error, row_projections, signs
from quantkit.compare.limits import load_limits
from quantkit.compare.taps import per_token, spread
from quantkit.errors import UsageError


def two_distributions(positions: int = 33, vocabulary: int = 301) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    p = 4 * torch.randn(positions, vocabulary, generator=generator)
    q = p + 0.5 * torch.randn(positions, vocabulary, generator=generator)
    following = torch.randint(vocabulary, (positions,), generator=generator)
    return p.log_softmax(-1), q.log_softmax(-1), following


def test_divergence_is_exact_with_every_token_and_a_lower_bound_with_some() -> None:
    p, q, following = two_distributions()
    exact = (np.exp(p.double().numpy()) * (p.double().numpy() - q.double().numpy())).sum(-1)
    before = np.zeros(len(exact))
    for k in (2, 16, 300):
        source = keep(p, following, k)
        found = divergence(source, at_same_tokens(q, source, following)).numpy()
        assert (found <= exact + 1e-6).all()
        assert (found >= before - 1e-6).all()  # more tokens, a tighter bound
        before = found
    source = keep(p, following, 301)
    other = at_same_tokens(q, source, following)
    np.testing.assert_allclose(divergence(source, other).numpy(), exact, atol=2e-6)
    a, b = np.exp(p.double().numpy()), np.exp(q.double().numpy())
    want = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(cosine(source, other).numpy(), want, atol=1e-6)
    assert divergence(source, source).max() == 0


def test_of_equal_tokens_the_lower_id_is_kept_first() -> None:
    logprobs = torch.zeros(1, 7).log_softmax(-1)
    assert keep(logprobs, torch.tensor([3]), 3).top_ids.tolist() == [[0, 1, 2]]


def test_buckets_break_at_the_limits_of_the_model() -> None:
    assert edges((100,), 500) == (0, 64, 100, 200, 256, 500)
    assert edges((), 30) == (0, 30)


def test_signs_are_those_of_every_machine() -> None:
    """Baselines are compared on other machines, with other versions of numpy: the bits are part of the format."""
    assert signs(3, 4).tolist() == [[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, 1]]
    assert signs(2, 3, 1).tolist() == [[1, -1, 1], [-1, -1, 1]]
    assert set(signs(500, 64).unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs(500, 64).mean())) < 0.02


@pytest.mark.parametrize("error", [0.01, 0.3, 1.0])
def test_fingerprints_keep_distances(error: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, noise = (torch.randn(100, 331, generator=generator) for _ in range(2))
    found = (of_rows(x + error * noise) - of_rows(x)).norm() / of_rows(x).norm()
    assert float(found) == pytest.approx(error, rel=0.1)
    estimates = []
    for _ in range(40):
        w, noise = (torch.randn(130, 97, generator=generator) for _ in range(2))
        estimates.append(relative_error(of_matrix(w), of_matrix(w + error * noise)))
    assert float(np.sqrt(np.mean(np.square(estimates)))) == pytest.approx(error, rel=0.15)
    assert min(estimates) > error / 2


def test_what_became_of_a_weight() -> None:
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(4, 30, 20, generator=generator) for _ in range(2))
    router, norm = torch.randn(7, 20, generator=generator), 0.1 * torch.randn(20, generator=generator)
    source = {
        "weight.gate.weight": of_weight(gate),
        "weight.up.weight": of_weight(up),
        "weight.router.weight": of_weight(router),
        "rows.router.weight": row_projections(router),
        "weight.norm.weight": of_weight(norm),
    }

    def said(name: str, expert: int | None = None, **found: Tensor) -> tuple[str, str]:
        changes = {f"weight.{key}.weight": of_weight(value) for key, value in found.items()}
        if "router" in found:
            changes["rows.router.weight"] = row_projections(found["router"])
        return tuple(explain(f"weight.{name}.weight", source, {**source, **changes}, expert))  # type: ignore[return-value]

    halved = torch.cat((gate[:2], gate[2:3] / 2, gate[3:]))
    assert said("gate", 2, gate=halved) == ("factor", "0.5")
    assert said("gate", 1, gate=gate[[0, 3, 2, 1]]) == ("other", "gate.3")
    assert said("up", 0, up=gate) == ("other", "gate.0")
    assert said("router", router=router[[0, 2, 1, 3, 4, 5, 6]]) == ("rows", "1 ← 2, 2 ← 1")
    assert said("norm", norm=norm - 1) == ("offset", "-1")
    assert said("router", router=torch.randn(7, 20, generator=generator)) == ("", "")


def test_rows_of_tokens_are_found_in_every_layout() -> None:
    x = torch.arange(24.0).reshape(3, 8)
    assert torch.equal(per_token(x, 3), x)  # type: ignore[arg-type]
    assert torch.equal(per_token((None, x[None]), 3), x)  # type: ignore[arg-type]
    heads = x.reshape(3, 2, 4).transpose(0, 1)[None]
    assert torch.equal(per_token(heads, 3), x)  # type: ignore[arg-type]
    assert per_token(torch.ones(5, 8), 3) is None
    assert spread(5, 3).tolist() == [0, 2, 4]
    assert spread(2, 8).tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------------------- limits


def test_a_file_replaces_single_limits(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("int8:\n  kl_mean: 0.2\n")
    assert load_limits("int8", path) == load_limits("int8").model_copy(update={"kl_mean": 0.2})
    assert load_limits("float", path) == load_limits("float")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("int8:\n  kl_meen: 0.2\n", "int8.kl_meen"),
        ("int4:\n  kl_mean: 0.2\n", "int4"),
        ("float:\n  layer_cosine: 2\n", "float.layer_cosine"),
        ("float:\n  kl_mean: much\n", "float.kl_mean"),
        ("- 1\n", "file"),
        ("int8: [1\n", "not YAML"),
    ],
)
def test_wrong_limits_are_refused_in_either_section(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_limits("int8", path)
    assert named in str(caught.value)


def test_limits_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_limits("int8", tmp_path / "none.yaml")
