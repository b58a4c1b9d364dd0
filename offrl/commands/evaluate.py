"""`offrl evaluate`: score the policies of a run again."""

from __future__ import annotations

from offrl.errors import UserError, nearest

USAGE = "usage: offrl evaluate RUN [episodes=10] [seed=0] [env=ID] [max_steps=N] [parallel=64]"


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(USAGE)
    from offrl.compose import parse
    from offrl.logging import interval_text, print_table
    from offrl.replicas import by_cell, number
    from offrl.runs import Run
    from offrl.stats import mean_interval

    given = parse([f"eval.{a}" if a.startswith("env=") else a for a in arguments[1:]])
    values = {k.removeprefix("eval."): v for k, v in given.items()}
    allowed: dict[str, type] = {"episodes": int, "seed": int, "env": str, "parallel": int, "max_steps": int}
    for key, value in values.items():
        if key not in allowed:
            raise UserError(f"offrl evaluate has no setting '{key}'.{nearest(key, allowed)} Settings: {', '.join(allowed)}")
        wrong = type(value) is not allowed[key]
        if wrong or (key in ("episodes", "parallel", "max_steps") and value < 1):
            raise UserError(f"{key}={value} must be {'a whole number' + (' of at least 1' if key != 'seed' else '')}")
    trained = Run(arguments[0])
    result = trained.evaluate(**values)
    headers = [*trained.grid, "seed", "score", "return", "std over episodes", "length", "success"]
    keys = ["score", "return", "return_std", "length", "success"]
    rows = [
        [*(number(v) for _, v in replica.values), str(replica.seed), *("" if row[k] is None else f"{row[k]:.2f}" for k in keys)]
        for replica, row in zip(trained.replicas, result.rows(), strict=True)
    ]
    keep = [i for i in range(len(headers)) if any(row[i] != "" for row in rows)]
    print_table([headers[i] for i in keep], [[row[i] for i in keep] for row in rows], f"{trained.algorithm}: {result.label}")
    means, unit = result.per_seed(), "score" if result.scores is not None else "return"
    for where in by_cell(trained.replicas).values():
        cell = trained.replicas[where[0]].cell
        print(f"{unit} over seeds{cell and f', {cell}'}: {interval_text(mean_interval(means[where]))}")
    return 0
