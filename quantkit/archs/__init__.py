"""Architecture records: one file per family, found by `model_type`."""

from quantkit.archs.base import Architecture, Dims, text_config
from quantkit.archs.extra import roles_snippet, unused_patterns, with_roles
from quantkit.archs.registry import architecture_for, known_model_types
from quantkit.archs.roles import ROLES, Key, Kind, Role, Split, Stage

__all__ = [
    "ROLES",
    "Architecture",
    "Dims",
    "Key",
    "Kind",
    "Role",
    "Split",
    "Stage",
    "architecture_for",
    "known_model_types",
    "roles_snippet",
    "text_config",
    "unused_patterns",
    "with_roles",
]
