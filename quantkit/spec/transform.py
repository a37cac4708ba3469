"""What was done to the weights before they were rounded: exact changes that leave the float model as it is, but one.

A transform is a list of steps, applied in order. The float model is unchanged because every step has two sides that
cancel: what is done to the outputs of one set of tensors is undone at the inputs of all tensors that read them. Which
tensors these are follows from the role table; `quantkit.checkpoint.transformed` carries the steps out. The exception is
`correct_bias`, the last step where it is there: it makes the quantized model better and the float model worse.

Vectors of `scale_pair` steps that cannot be computed from the weights alone stand in `transforms.safetensors`, named
`VECTORS.SHARD_NAME` (`ScalePair.vectors` and `Key.shard_name` of the producer), F32 `[channels]`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quantkit.spec.document import Strict

VECTORS_NAME = "transforms.safetensors"

RESIDUAL_NORMS = ("norm.input", "norm.pre_mlp", "norm.final")
"""Norms through which the blocks and the output head read the residual stream."""


class FoldNorm(Strict):
    """Norm weights move into the columns of all matrices that the norm feeds; the norm multiplies by one.

    Attributes:
        norms: roles.
    """

    step: Literal["fold_norm"] = "fold_norm"
    norms: tuple[str, ...] = RESIDUAL_NORMS


class RotateResidual(Strict):
    """The residual stream h becomes h Q with Q = `quantkit.rotation.Rotation(hidden, seed)`.

    An RMS norm without weights commutes with Q, so `fold_norm` must come before.

    Attributes:
        seed: of the signs.
    """

    step: Literal["rotate_residual"] = "rotate_residual"
    seed: int = 0


class RotateHeads(Strict):
    """Values of every head are rotated by one matrix of the head's size, and rotated back where the output
    projection reads them: attention averages values over tokens, head by head, which commutes.

    Attributes:
        seed: of the signs.
    """

    step: Literal["rotate_heads"] = "rotate_heads"
    seed: int = 0


class ScalePair(Strict):
    """Output channel j of a producer is divided by s_j, and input column j of all its consumers multiplied by s_j.

    Attributes:
        producer: role whose output is scaled: a norm, "attn.v" (also for the values of latent attention), or an "up".
            The consumers are the roles that the table says it feeds.
        vectors: name of the set of vectors; a producer without a vector in it is left as it is.
    """

    step: Literal["scale_pair"] = "scale_pair"
    producer: str
    vectors: str


class CorrectBias(Strict):
    """Biases of quantized GEMMs make up for the mean of the GEMMs' errors; a bias without a vector is left as it is.

    Attributes:
        vectors: name of the set of vectors, which are whole biases, in the dtype in which they are written.
    """

    step: Literal["correct_bias"] = "correct_bias"
    vectors: str = "bias"


Step = Annotated[FoldNorm | RotateResidual | RotateHeads | ScalePair | CorrectBias, Field(discriminator="step")]


class Transforms(Strict):
    """All steps, in the order in which they are applied."""

    steps: tuple[Step, ...] = ()


class MethodOptions(Strict):
    """An entry of a recipe's `methods:`; every method has a subclass with its own options.

    Attributes:
        name: row of `quantkit.calibrate.methods.METHODS`.
    """

    name: str
