"""Perplexity, defined once, so that a source model and its INT8 version are measured alike.

Definition: every text is tokenized without added special tokens and preceded by the tokenizer's begin-of-text token
(its end-of-text token where it has no other); the documents follow each other in order; the stream is cut into
windows of `length` tokens that do not overlap, and what is left over at the end is dropped (one shorter window is
kept when there is no full one). Within a window each token but the first is predicted from those before it. The
perplexity is exp(mean negative log-likelihood over all predicted tokens), the log-softmax taken in float32. The
standard error is exp(mean) times the standard error of the mean over windows (delta method).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.archs.modeling import token_ids
from quantkit.compare.distributions import standard_error
from quantkit.errors import InputError


class Perplexity(NamedTuple):
    """A perplexity with its standard error (0 for a single window) and the number of predicted tokens."""

    value: float
    error: float
    tokens: int


def windows(tokenizer: Any, texts: Iterable[str], length: int = 512) -> Tensor:
    """Token windows int64 `[W, length]` of documents, by the definition above.

    Raises:
        InputError: fewer than two tokens.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    stream: list[int] = []
    for text in texts:
        stream += [] if first is None else [first]
        stream += token_ids(tokenizer, text, special=False)
    if len(stream) < 2:
        raise InputError("the texts have fewer than two tokens", "give more text")
    length = min(length, len(stream))
    count = len(stream) // length
    return torch.tensor(stream[: count * length]).view(count, length)


def perplexity(model: nn.Module, token_windows: Tensor, batch: int = 1) -> Perplexity:
    """Perplexity of a causal language model on windows int64 `[W, L]`.

    Raises:
        InputError: the loss is not finite.
    """
    return from_losses(window_losses(model, token_windows, batch), token_windows.shape[1])


def window_losses(
    model: nn.Module, token_windows: Tensor, batch: int = 1, advance: Callable[[int], None] = lambda windows: None
) -> Tensor:
    """Mean negative log-likelihood of each window, float64 `[W]`, from windows int64 `[W, L]`.

    Args:
        advance: called with the number of windows that were done, for a progress bar.
    """
    device = next(model.parameters()).device
    means = []
    with torch.no_grad():
        for part in token_windows.split(batch):
            ids = part.to(device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            means.append(losses.view(ids.shape[0], -1).double().mean(dim=1).cpu())
            advance(len(part))
    return torch.cat(means)


def from_losses(losses: Tensor, length: int) -> Perplexity:
    """Perplexity of windows of `length` tokens from their mean losses `[W]`.

    Raises:
        InputError: a loss is not finite.
    """
    mean, count = float(losses.mean()), len(losses)
    if not math.isfinite(mean):
        raise InputError("the loss is not finite", "load the model with --dtype float32 and compare")
    return Perplexity(math.exp(mean), math.exp(mean) * standard_error(losses), count * (length - 1))


def change(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Relative change of the perplexity in percent and its standard error, from losses `[W]` of the same windows.

    Windows differ far more from each other than a window does from itself before and after, so the error is that of
    the paired differences.
    """
    ratio = math.exp(float((after - before).mean()))
    return 100 * (ratio - 1), 100 * ratio * standard_error(after - before)
