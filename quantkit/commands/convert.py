"""`quantkit convert`: quantize, fuse, split and write, as a checkpoint or as rank shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json, quoted, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from quantkit.convert.execute import Runner
    from quantkit.convert.parts import Part
    from quantkit.convert.run import Prepared
    from quantkit.spec.manifest import Manifest
    from quantkit.spec.mesh import Mesh

_FOLDER = click.Path(path_type=Path)

_EPILOG = """\b
Examples:
  quantkit convert MODEL -o OUT                       INT8 checkpoint that vLLM and SGLang load
  quantkit convert MODEL -o OUT --calibration CAL     with the scales of a calibration
  quantkit convert MODEL -o OUT --format sharded --tp 4 --ep 4
                                                      shards of 4 ranks for quantkit-runtime
  quantkit convert MODEL -o OUT --dry-run             show the plan, write nothing
  quantkit convert MODEL -o OUT --part 3/16           third of 16 machines; `quantkit merge-manifest` ends it
  quantkit convert MODEL -o OUT --ray HOST:6379       on the machines of a Ray cluster
Killed or out of space: run the same command again, finished files are kept.
"""


@click.command("convert", epilog=_EPILOG)
@click.argument("model", type=_FOLDER)
@click.option("-o", "--out", type=_FOLDER, required=True, help="New or empty folder, outside MODEL.")
@click.option("--recipe", default="w8a8", show_default=True, metavar="NAME|FILE", help="Shipped name or YAML file.")
@click.option("--calibration", type=_FOLDER, help="Folder that `quantkit calibrate` wrote.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["checkpoint", "sharded"]),
    default="checkpoint",
    show_default=True,
    help="checkpoint: compressed-tensors, for engines. sharded: by rank, for quantkit-runtime.",
)
@click.option("--tp", type=click.IntRange(1), default=1, help="Ranks that split every dense GEMM.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline stages.")
@click.option(
    "--ep", type=click.IntRange(1), default=1, help="Groups that the routed experts are spread over; divides tp * dp."
)
@click.option("--dp", type=click.IntRange(1), default=1, help="Replicas of the dense part; they share its files.")
@click.option(
    "--pp-policy", type=click.Choice(["middle", "last"]), default="middle", show_default=True, help="Remaining layers."
)
@click.option("--pp-layers", help="Layers of each stage, as in 15,15,16,15; instead of --pp-policy.")
@click.option(
    "--ep-policy",
    type=click.Choice(["first", "last", "round_robin"]),
    default="first",
    show_default=True,
    help="Remaining experts.",
)
@click.option(
    "--expert-map", type=_FOLDER, help="JSON file: a list of experts for each ep rank; instead of --ep-policy."
)
@click.option(
    "--layout",
    default="plain",
    show_default=True,
    help="Order of the INT8 weights of a shard: plain, aiter_16x16 (gfx9xx) or marlin_k64 (DCU).",
)
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: the cores, at most 8.")
@click.option(
    "--part",
    metavar="i/n",
    help="Do part i (from 1) of n and no manifest: one call for each machine, at the same time or not, with the same "
    "MODEL, OUT and options on a file system that all share. After the last: quantkit merge-manifest.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Do the work on a running Ray cluster whose machines see MODEL and OUT under the same paths: host:port of its "
    "head, or auto. Call it on one of them. Needs quantkit[cluster] on all.",
)
@click.option(
    "--sign-key",
    "--sign",
    metavar="KEY",
    type=_FOLDER,
    help="Sign the result with this private key (PEM, elliptic curve P-256, P-384 or P-521): model.sig beside the "
    "manifest, checked by `quantkit verify --public-key`. Every other file is the same without it; an ECDSA signature "
    "itself is never twice the same. Needs quantkit[sign].",
)
@click.option("--max-shard-size", default="1GiB", show_default=True, help="Bound on a weight file: bytes, MB, MiB, ...")
@click.option("--ignore-index", is_flag=True, help="Trust the files' headers instead of a stale index.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@json_option
def command(
    model: Path,
    out: Path,
    recipe: str,
    calibration: Path | None,
    form: Any,
    layout: str,
    jobs: int | None,
    max_shard_size: str,
    ignore_index: bool,
    part: str | None,
    ray: str | None,
    sign_key: Path | None,
    dry_run: bool,
    as_json: bool,
    **mesh_options: Any,
) -> None:
    """Convert the checkpoint MODEL to INT8.

    Several machines give the same bytes as one: with --part each does its share, with --ray a cluster does the work.
    """
    from quantkit.convert.parts import Part
    from quantkit.convert.run import prepare, run
    from quantkit.heap import return_large_blocks
    from quantkit.outdir import check_place
    from quantkit.recipe import load_recipe

    return_large_blocks()
    _check_together(part, ray, jobs, sign_key)
    chosen = Part.parse(part) if part else None
    runner = _cluster(ray)
    sign = _signer(sign_key)
    check_place(out, model)
    prepared = prepare(
        model,
        load_recipe(recipe),
        calibration=calibration,
        form=form,
        mesh=_mesh(**mesh_options),
        max_shard_bytes=_bytes(max_shard_size),
        ignore_index=ignore_index,
        layout=layout,
    )
    for warning in prepared.plan.warnings:
        say(f"warning: {warning}")
    if dry_run:
        _show_plan(prepared, as_json)
        return
    if chosen is not None:
        _do_part(prepared, out, chosen, jobs or 0, as_json)
        return
    manifest = run(prepared, out, jobs or 0, runner=runner)
    if sign is not None:
        sign(out)
    _show_result(manifest, out, prepared, as_json)


def _check_together(part: str | None, ray: str | None, jobs: int | None, sign_key: Path | None) -> None:
    from quantkit.errors import UsageError

    if part and sign_key:
        raise UsageError("--part and --sign-key exclude each other", "a part is no result yet: sign in merge-manifest")

    if part and ray:
        raise UsageError("--part and --ray exclude each other", "a Ray cluster shares the work out itself")
    if ray and jobs:
        raise UsageError("--jobs and --ray exclude each other", "a Ray cluster does one file for each of its CPUs")


def _cluster(address: str | None) -> Runner | None:
    if address is None:
        return None
    from quantkit.convert.cluster import cluster

    return cluster(address)


def _signer(key: Path | None) -> Callable[[Path], Path] | None:
    """Loads the key, so that a wrong one is told before hours of work."""
    if key is None:
        return None
    from quantkit.convert.signing import signer

    return signer(key)


def _do_part(prepared: Prepared, out: Path, part: Part, jobs: int, as_json: bool) -> None:
    from quantkit.convert.parts import run_part

    result = run_part(prepared, out, part, jobs)
    if as_json:
        summary = {"out": str(out), "part": str(part), "units": result.units, "bytes": result.nbytes}
        print_json({**summary, "left": result.left})
        return
    shown = console()
    shown.print(f"{out}: part {part} is done, {result.units:,} units, {result.nbytes:,} bytes", markup=False)
    left = f"when the other parts are done ({result.left:,} units are left)" if result.left else "all parts are done"
    shown.print(f"next: {left}: quantkit merge-manifest {out} --source {prepared.source.root}", markup=False)


def _mesh(
    tp: int,
    pp: int,
    ep: int,
    dp: int,
    pp_policy: Any,
    pp_layers: str | None,
    ep_policy: Any,
    expert_map: Path | None,
) -> Mesh:
    from quantkit.spec.mesh import Mesh

    layers = tuple(_numbers(pp_layers)) if pp_layers else ()
    return Mesh(
        tp=tp,
        pp=pp,
        ep=ep,
        dp=dp,
        pp_policy="explicit" if layers else pp_policy,
        pp_layers=layers,
        ep_policy="map" if expert_map else ep_policy,
        expert_map=_expert_map(expert_map) if expert_map else (),
    )


def _numbers(text: str) -> list[int]:
    from quantkit.errors import UsageError

    try:
        return [int(field) for field in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--pp-layers {text!r} is no list of numbers", "write it as 15,15,16,15") from error


def _expert_map(path: Path) -> tuple[tuple[int, ...], ...]:
    import json

    from quantkit.errors import UsageError
    from quantkit.spec.files import read_whole

    try:
        rows = json.loads(read_whole(path, pipes=True))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}", "give a file like [[0, 1], [2, 3, 0]]") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(type(item) is int for item in row) for row in rows
    ):
        raise UsageError(f"{path} is no list of lists of experts", "give a file like [[0, 1], [2, 3, 0]]")
    return tuple(tuple(row) for row in rows)


def _bytes(text: str) -> int:
    """Bytes of "2GiB", "500MB" or a plain number."""
    import re

    from quantkit.errors import UsageError

    found = re.fullmatch(r"([0-9]{1,18})\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    power = "KMGT".index(found[2].upper()) + 1 if found and found[2] else 0
    size = int(found[1]) * (1024 if found[3] else 1000) ** power if found else 0
    if size < 1:
        raise UsageError(f"--max-shard-size {text!r} is no size", "write it as 2GiB, 500MB or a number of bytes")
    return size


def _show_plan(prepared: Prepared, as_json: bool) -> None:
    plan = prepared.plan
    summary = {
        "form": plan.form,
        "files": [{"name": f.name, "bytes": f.nbytes, "tensors": len(f.tensors)} for f in plan.files],
        "copied": list(plan.copies),
        "generated": sorted(plan.texts),
        "dropped": [row.model_dump() for row in plan.dropped],
        "ignore": list(plan.ignore),
        "quantized": plan.quantized,
        "kept": plan.kept,
        "parameters": plan.parameters,
        "source_bytes": plan.source_bytes,
        "weight_bytes": plan.weight_bytes,
        "ranks": [row.model_dump(mode="json") for row in plan.ranks],
        "warnings": list(plan.warnings),
    }
    if as_json:
        print_json(summary)
        return
    from rich.table import Table

    table = Table("file", "tensors", "bytes", title=f"plan: {plan.form}, recipe {prepared.recipe.name}")
    for column in table.columns[1:]:
        column.justify = "right"
    for file in plan.files:
        table.add_row(file.name, f"{len(file.tensors):,}", f"{file.nbytes:,}")
    shown = console()
    shown.print(table)
    shown.print(
        f"quantized {plan.quantized:,} tensors, kept {plan.kept:,}, dropped {len(plan.dropped):,}", markup=False
    )
    for row in plan.dropped:
        shown.print(f"  dropped {row.name}: {row.rule}", markup=False)
    shown.print(f"copied: {', '.join(plan.copies) or 'nothing'}", markup=False)
    shown.print(f"weights {plan.source_bytes:,} -> {plan.weight_bytes:,} bytes; nothing was written", markup=False)


def _show_result(manifest: Manifest, out: Path, prepared: Prepared, as_json: bool) -> None:
    plan = prepared.plan
    summary = {
        "out": str(out),
        "form": manifest.form,
        "options_digest": manifest.options_digest,
        "tensors": len(manifest.tensors),
        "quantized": plan.quantized,
        "kept": plan.kept,
        "dropped": [row.model_dump() for row in manifest.dropped],
        "parameters": manifest.parameters,
        "source_bytes": plan.source_bytes,
        "output_bytes": sum(file.size for file in manifest.files),
        "warnings": list(plan.warnings),
    }
    if as_json:
        print_json(summary)
        return
    shown = console()
    shown.print(
        f"{out}: {manifest.form}, {plan.quantized:,} tensors in INT8, {plan.kept:,} kept, "
        f"{len(plan.dropped):,} dropped",
        markup=False,
    )
    for row in manifest.dropped:
        shown.print(f"  dropped {row.name}: {row.rule}", markup=False)
    shown.print(f"weights {plan.source_bytes:,} -> {plan.weight_bytes:,} bytes", markup=False)
    shown.print(
        f"next: quantkit verify {quoted(out)} --source {quoted(prepared.source.root)}", markup=False, soft_wrap=True
    )
