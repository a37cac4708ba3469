"""Imported by the server that test processes are forked from: every family's modelling code, once for all of them."""

import transformers

from tests.families import FAMILIES

for family in FAMILIES.values():
    getattr(transformers, family.model_class)
