"""`offrl export`: a trained policy as a file that runs without offrl."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from offrl.errors import UserError, nearest, say
from offrl.export import ExportConfig
from offrl.runs.paths import check_run
from offrl.settings.field import describe

if TYPE_CHECKING:
    from offrl.export.write import Exported


USAGE = """\
usage: offrl export RUN [name=value ...]

Writes a policy as one file that runs without offrl, compares it with the Python policy on 1,000 observations, and writes a JSON
file beside it that documents inputs, outputs, units, scores and versions. In a run with a grid, FIELD=VALUE chooses the cell.

{0}"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    return USAGE.format("\n".join(describe(ExportConfig())))


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(
            "usage: offrl export RUN [format=onnx] [seed=0] [out=PATH] [stochastic=true]; offrl export --help says more"
        )
    check_run(arguments[0])
    from offrl.runs.run import SavedRun
    from offrl.settings.compose import fill, parse
    from offrl.settings.groups import flat_name
    from offrl.settings.replicas import number

    values = parse(arguments[1:])
    trained = SavedRun(arguments[0])
    cell = {k.removeprefix("grid."): v for k, v in values.items() if k.removeprefix("grid.") in trained.grid}
    export_values = {flat_name(k): v for k, v in values.items() if k.removeprefix("grid.") not in trained.grid}
    known = [f.name for f in fields(ExportConfig)]
    for name in export_values:
        if name.partition(".")[0] not in known:
            grid = f", and its grid's {', '.join(trained.grid)}" if trained.grid else ""
            raise UserError(
                f"offrl export has no setting '{name}'.{nearest(name, [*known, *trained.grid])} Settings: "
                f"{', '.join(known)}{grid}"
            )
    config = fill(ExportConfig(), export_values, "export")
    for name, values_there in trained.grid.items():
        choices = " or ".join(f"{name}={number(v)}" for v in values_there)
        if name not in cell and len(values_there) > 1:
            raise UserError(f"{trained.dir} has a policy for each {name}; say which: {choices}")
        if name in cell and cell[name] not in values_there:
            raise UserError(f"{trained.dir} has no policy with {name}={cell[name]}; choose {choices}")
    from offrl.evaluation.shield_kinds import shield_of
    from offrl.export.write import export_run

    shield = shield_of(config.shield, config.safe_action, config.constraint, config.world_model)
    written = config.format, config.seed, cell, config.out, config.stochastic, config.opset
    result = export_run(trained, *written, shield, config.acting)
    say(*_report(result))
    return 0


def _report(result: Exported) -> list[str]:
    from offrl.export.check import BATCHES, ROUNDING, TOLERANCE

    check = result.check

    def shape(value: dict) -> str:
        return f"{value['name']} [{', '.join(map(str, value['shape']))}] {value['dtype']}"

    sizes = f"{result.path.stat().st_size / 1e3:,.0f} kB"
    batches = ", ".join(f"{n:,}" for n in sorted(BATCHES))
    if result.metadata["outputs"][0]["dtype"] == "int64":
        outcome = f"the same actions{f', but for {check.ties} ties' if check.ties else ''}"
    else:
        allowance = f", {ROUNDING:g} times float32's own error in this policy" if check.allowed > TOLERANCE else ""
        outcome = (
            f"largest difference {check.largest:.1e} of half an action's range (allowed: "
            f"{check.allowed:.2g}{allowance})"
        )
    inputs, output = ", ".join(map(shape, result.metadata["inputs"])), shape(result.metadata["outputs"][0])
    return [
        f"{result.path} ({sizes}): {inputs} -> {output}",
        f"checked with {check.runtime} against the Python policy in batches of {batches}: {outcome}",
        f"{result.description}: what goes in and comes out, units, scores, versions",
        *(
            [
                f"{result.path.parent} is a repository for the Hub: {', '.join(p.name for p in result.card)} are there "
                "too"
            ]
            if result.card
            else []
        ),
    ]
