"""transformers' own model class as a skeleton, and its parameters by key.

The skeleton has every module of the model but no weights: parameters lie on `meta`, buffers that the class computes
(rotary frequencies) are real. Calibration fills it layer by layer, the runtime grafts INT8 modules into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs.base import Architecture, Dims, text_config
from quantkit.archs.registry import architecture_for
from quantkit.archs.roles import Key
from quantkit.errors import InputError, first_line
from quantkit.spec.files import is_file
from quantkit.spec.index import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_config(root: Path) -> Any:
    """transformers' config object of a checkpoint's language model, without its `quantization_config`.

    Of a vision-language checkpoint it is the text part. A model type that is another one's under a new name
    (`Architecture.class_of`) gets that one's config.

    Raises:
        InputError: this transformers does not know the model type, or sizes contradict one another: those of the file,
            and what transformers takes for what it lacks.
    """
    from transformers import AutoConfig

    raw = read_json(root / "config.json")
    arch = architecture_for(raw)
    same_as = arch.class_of.get(str(raw.get("model_type")))
    try:
        if same_as:
            known = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
            config = AutoConfig.for_model(same_as, **known)
        else:
            config = AutoConfig.from_pretrained(root, trust_remote_code=False)
        config = config.get_text_config()
        defaults = config.to_dict()
    except Exception as error:  # each config class has checks of its own, with whatever errors those raise
        raise InputError(
            f"transformers cannot read {root / 'config.json'}: {first_line(error)}",
            "install a transformers that knows this model type, or correct the config",
        ) from error
    given = {key: value for key, value in text_config(raw).items() if value is not None}
    arch.dims({**defaults, **given}).require_consistent(root / "config.json")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def load_tokenizer(root: Path) -> Any:
    """transformers' tokenizer of a folder.

    Raises:
        InputError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    if not any(is_file(root / name) for name in TOKENIZER_FILES):
        raise InputError(
            f"{root} holds no tokenizer", "copy the tokenizer files of the source model there", choices=TOKENIZER_FILES
        )
    with _tokenizer_failures(f"transformers cannot read the tokenizer of {root}"):
        # said, because transformers asks at the terminal otherwise
        found = AutoTokenizer.from_pretrained(root, trust_remote_code=False)
        found("a")  # values that loading does not look at fail here
    return found


def token_ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens when `special`.

    Raises:
        InputError: the tokenizer fails on this text.
    """
    with _tokenizer_failures("the tokenizer cannot encode a text"):
        # lengths are ours to check, so that the tokenizer does not warn about texts beyond the model's window
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def text_of(tokenizer: Any, ids: Iterable[int], *, special: bool = True) -> str:
    """Text of token ids, with special tokens when `special`.

    Raises:
        InputError: the tokenizer fails on these ids.
    """
    with _tokenizer_failures("the tokenizer cannot decode tokens"):
        return str(tokenizer.decode(list(ids), skip_special_tokens=not special))


@contextmanager
def _tokenizer_failures(what: str) -> Iterator[None]:
    """An InputError for whatever the tokenizers library raises on files that it took: plain Exceptions, and panics of
    its Rust code, which are no Exceptions and whose class has no module to import it from."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{what}: {first_line(error)}", "copy the tokenizer files of the source model there again"
        ) from error


def require_embedded(ids: Iterable[int], vocab: int) -> None:
    """Refuse token ids that the model has no embedding for: a card answers such an id with a fault of its own.

    Args:
        vocab: rows of the embedding table.

    Raises:
        InputError: the first such id.
    """
    beyond = next((number for number in ids if not 0 <= number < vocab), None)
    if beyond is not None:
        raise InputError(
            f"the tokenizer gives the id {beyond:,}, the model's vocabulary has {vocab:,}",
            "use the tokenizer that belongs to these weights; `quantkit inspect` lists the tokens beyond their end",
        )


def build_skeleton(config: Any, *, dtype: torch.dtype, experts: str = "", attention: str = "") -> nn.Module:
    """The causal language model of `config` with parameters on `meta`, in eval mode.

    Args:
        config: from `load_config`; it is not changed.
        dtype: of parameters and of the computation.
        experts: name in transformers' `ALL_EXPERTS_FUNCTIONS`; "" leaves transformers' choice.
        attention: attention implementation; "" leaves transformers' choice.

    Raises:
        InputError: transformers cannot build it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    options: dict[str, str] = {}
    if experts:
        options["experts_implementation"] = experts
    if attention:
        options["attn_implementation"] = attention
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except Exception as error:  # a class meets values that it cannot work with in its own ways
        raise InputError(
            f"transformers cannot build the model of this config ({type(config).__name__}): "
            f"{type(error).__name__}: {first_line(error)}",
            "correct config.json, or install a transformers that has this model",
        ) from error
    assert isinstance(model, nn.Module)
    return model.eval()


def decoder_layers(arch: Architecture, model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of a model's decoder layers, from the first parameter that parses to a layer.

    Raises:
        InputError: it has none.
    """
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        key = arch.parse(name)
        if key is not None and key.layer is not None:
            prefix = name.split(f".{key.layer}.", 1)[0]
            layers = model.get_submodule(prefix)
            if isinstance(layers, nn.ModuleList):
                return prefix, layers
    raise InputError(f"{type(model).__name__} has no list of decoder layers", "give a decoder language model")


def parameter_key(arch: Architecture, name: str) -> Key:
    """Key of a parameter of transformers' model.

    Raises:
        InputError: no rule knows the name.
    """
    key = arch.parse(name)
    if key is None:
        raise InputError(
            f"no rule of the architecture record {arch.name} knows transformers' parameter {name}",
            "add a layer rule to the record in quantkit/archs",
        )
    return key


def parameter_value(arch: Architecture, dims: Dims, name: str, get: Callable[[Key], Tensor]) -> Tensor:
    """Value of a parameter of transformers' model, in the orientation that its module wants.

    Args:
        name: full parameter name (`model.layers.3.mlp.experts.gate_up_proj`).
        get: tensor of a key in canonical orientation, for example `Source.get`.

    Raises:
        InputError: what should hold all experts does not have their sizes.
    """
    key = parameter_key(arch, name)
    tensor = get(key)
    if not (arch.role(key.role).per_expert and key.expert is None):
        return tensor
    interleaved = arch.gate_up_interleaved and key.role == "expert.gate_up"
    sizes = 2 if key.part == "bias" else 3
    if tensor.ndim != sizes or (interleaved and tensor.shape[1] != 2 * dims.moe_intermediate):
        rows = f", the second of them {2 * dims.moe_intermediate}" if interleaved else ""
        raise InputError(
            f"{name} has shape {list(tensor.shape)} in the checkpoint, the model wants {sizes} sizes{rows}",
            "config.json does not describe these weights",
        )
    if interleaved:
        halves = tensor.unflatten(1, (2, dims.moe_intermediate))
        tensor = halves.transpose(1, 2).flatten(1, 2)
    if arch.experts_transposed and key.part == "weight":
        tensor = tensor.transpose(1, 2)
    return tensor.contiguous()


def canonical_value(arch: Architecture, key: Key, tensor: Tensor) -> Tensor:
    """The way back: a tensor stored as transformers' module holds it, in canonical orientation.

    Only stacked experts differ: transposed, or with gate and up rows interleaved.
    """
    if not (arch.role(key.role).per_expert and key.expert is None):
        return tensor
    if arch.experts_transposed and tensor.ndim == 3:
        tensor = tensor.transpose(1, 2)
    if arch.gate_up_interleaved and key.role == "expert.gate_up":
        tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
    return tensor


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer of `model` (on `meta` or not) by `value`, which is not copied."""
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    old = module._parameters.get(leaf)
    wanted = old if old is not None else module._buffers[leaf]
    if wanted is not None and wanted.shape != value.shape:
        raise InputError(
            f"{name} has shape {list(value.shape)} in the checkpoint, the model wants {list(wanted.shape)}",
            "config.json does not describe these weights",
        )
    if old is not None:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value
