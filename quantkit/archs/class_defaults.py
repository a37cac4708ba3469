"""What transformers takes where a config.json is silent: the defaults of its config class.

transformers is imported only when it is asked: that takes seconds, and almost every config.json says all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.archs.dims import text_config


def with_class_defaults(
    config: Mapping[str, Any], wanted: Iterable[tuple[str, ...]], class_of: Mapping[str, str]
) -> dict[str, Any]:
    """A parsed config.json with the sizes that its text part lacks, where the class of its model type has them.

    Args:
        wanted: alternative keys of each size, as in `DIM_KEYS`; a size is lacking when none of its keys is there.
        class_of: `Architecture.class_of`.
    """
    text = text_config(config)
    lacking = [keys for keys in wanted if not any(key in text for key in keys)]
    found = _defaults((text.get("model_type"), config.get("model_type")), class_of) if lacking else None
    taken: dict[str, int] = {}
    for keys in lacking:
        defaults = {key: value for key in keys if type(value := getattr(found, key, None)) is int}
        taken |= dict(list(defaults.items())[:1])
    return {**config, "text_config": {**text, **taken}} if text is not config else {**config, **taken}


def _defaults(model_types: Iterable[Any], class_of: Mapping[str, str]) -> Any:
    """transformers' config of the first of these model types that it knows, as it is without a config.json; or None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in model_types:
        known = class_of.get(str(name), str(name))
        if known in CONFIG_MAPPING:
            return CONFIG_MAPPING[known]().get_text_config()
    return None
