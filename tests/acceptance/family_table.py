"""The READMEs' table of families, made from the records and from what the tests of every family expect.

python -m tests.acceptance.family_table        # prints both; paste between the marks of the READMEs
"""

from __future__ import annotations

from collections import defaultdict

from quantkit.archs import registry
from tests.families import FAMILIES
from tests.runtime.test_engine import UNPAGED
from tests.runtime.test_parallel import DENSE
from tests.transforms.test_float_model import REFUSED

EVIDENCE = {
    "tests/calibrate/test_stream.py": "test_logits_are_bit_identical",
    "tests/convert/test_engine_rules.py": "test_every_family",
    "tests/convert/test_meshes.py": "test_gathering_gives_the_unsharded_model",
    "tests/runtime/test_converted.py": "test_every_family_runs_in_int8",
    "tests/runtime/test_parallel.py": "test_every_family_on_every_mesh",
    "tests/transforms/test_float_model.py": "test_float_model_is_unchanged_or_the_family_says_why",
}
"""File -> the test there that runs on every family; the table's columns lean on them."""

WORDS = {
    "en": {
        "head": ("model types", "calibrate", "checkpoint", "shards", "runtime", "rotation"),
        "yes": "yes",
        "no": "refused",
        "paged": "paged cache",
        "whole": "transformers' cache",
        "alias": "by the same records, without a test model of their own",
    },
    "zh": {
        "head": ("model_type", "校准", "检查点", "分片", "运行时", "旋转"),
        "yes": "支持",
        "no": "拒绝",
        "paged": "分页 KV 缓存",
        "whole": "transformers 自带缓存",
        "alias": "使用同样的架构记录，没有单独的测试模型",
    },
}


def rows() -> dict[tuple[bool, bool, bool], list[str]]:
    """(has experts, paged cache, may be rotated) -> model types."""
    found = defaultdict(list)
    for name, family in FAMILIES.items():
        key = (name not in DENSE, name not in UNPAGED, (name, "rotate") not in REFUSED)
        found[key].append(family.retype or family.model_type)
    return dict(found)


def aliases() -> list[str]:
    """Model types of the registry that no family of the tests has."""
    return sorted(set(registry.FAMILIES) - {model_type for types in rows().values() for model_type in types})


def table(language: str) -> str:
    words = WORDS[language]
    lines = ["| " + " | ".join(words["head"]) + " |", "|---" * len(words["head"]) + "|"]
    for (experts, paged, rotates), types in rows().items():
        names = ", ".join(f"`{name}`" for name in types)
        cells = [names, words["yes"], words["yes"], "tp, pp, dp, ep" if experts else "tp, pp, dp"]
        cells += [words["paged" if paged else "whole"], words["yes" if rotates else "no"]]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"| {', '.join(f'`{name}`' for name in aliases())} | {words['alias']} | | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("en"), table("zh"), sep="\n\n")
