"""`quantkit merge`: rank shards back to a checkpoint, bit for bit, without requantizing."""

from __future__ import annotations

from pathlib import Path

from quantkit.convert.plan import DEFAULT_SHARD_BYTES
from quantkit.convert.run import convert
from quantkit.errors import InputError
from quantkit.recipe import recorded
from quantkit.spec.files import exists
from quantkit.spec.manifest import SHARDED_NAME, Manifest, read_manifest


def merge(folder: Path, out: Path, *, jobs: int = 0, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> Manifest:
    """Write the checkpoint that the shards in `folder` were cut from, INT8 where they are.

    The weight files equal those of a direct conversion to a checkpoint with the same recipe, byte for byte.

    Raises:
        InputError: `folder` does not exist, holds no rank shards, or they do not make a whole model.
    """
    if not exists(folder / SHARDED_NAME):
        found = "no such folder" if not exists(folder) else f"no {SHARDED_NAME} in it"
        raise InputError(
            f"{folder} is no folder of rank shards: {found}", "give a folder of `convert --format sharded`"
        )
    manifest = read_manifest(folder / SHARDED_NAME)
    if manifest.form != "sharded":
        raise InputError(f"{folder} is no folder of rank shards", "give a folder of `convert --format sharded`")
    recipe = recorded(manifest.recipe)
    return convert(folder, out, recipe, form="checkpoint", jobs=jobs, max_shard_bytes=max_shard_bytes)
