"""`quantkit merge-manifest`: the end of a conversion that several machines did in parts."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.console import console, json_option, print_json, quoted

_FOLDER = click.Path(path_type=Path)

_EPILOG = """\b
Example (Slurm, 16 machines, one shared file system):
  sbatch --array=1-16 --wrap 'quantkit convert MODEL -o OUT --part $SLURM_ARRAY_TASK_ID/16'
  quantkit merge-manifest OUT --source MODEL
A part that was killed: run the same part again, finished files are kept.
"""


@click.command("merge-manifest", epilog=_EPILOG)
@click.argument("out", type=_FOLDER)
@click.option("--source", type=_FOLDER, required=True, help="The MODEL that the parts convert.")
@click.option("--calibration", type=_FOLDER, help="As given to the parts.")
@click.option("--ignore-index", is_flag=True, help="As given to the parts.")
@click.option("--sign-key", "--sign", metavar="KEY", type=_FOLDER, help="As in `quantkit convert`.")
@json_option
def command(
    out: Path, source: Path, calibration: Path | None, ignore_index: bool, sign_key: Path | None, as_json: bool
) -> None:
    """Write config, index and manifest of OUT once all parts of `quantkit convert --part i/n` are done.

    All other options are those that OUT has recorded. The plan is made again from the headers of MODEL, every unit of
    work is looked up, and the missing ones are listed by part (exit code 3). OUT then equals that of one machine, byte
    for byte; where the machines have other software, the manifest lists that of each.
    """
    from quantkit.convert.parts import merge_manifest, prepare_recorded
    from quantkit.convert.signing import signer
    from quantkit.spec.environment import mixed

    sign = signer(sign_key) if sign_key is not None else None
    prepared = prepare_recorded(out, source, calibration=calibration, ignore_index=ignore_index)
    manifest = merge_manifest(prepared, out)
    if sign is not None:
        sign(out)
    if as_json:
        sizes = {"tensors": len(manifest.tensors), "options_digest": manifest.options_digest}
        print_json({"out": str(out), **sizes, "mixed_versions": mixed(manifest.environments)})
        return
    shown = console()
    shown.print(f"{out}: {manifest.form} of {len(manifest.tensors):,} tensors, all parts are there", markup=False)
    for line in mixed(manifest.environments):
        shown.print(f"note: the machines of the parts differ: {line}; the manifest lists each", markup=False)
    shown.print(f"next: quantkit verify {quoted(out)} --source {quoted(source)}", markup=False, soft_wrap=True)
