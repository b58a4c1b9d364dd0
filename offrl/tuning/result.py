"""What a tune found, as a file (result.json), as lines on the screen, and as the winner's exchangeable document
(results.json).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import say, some
from offrl.runs import exchange
from offrl.runs.tables import interval_text
from offrl.settings.field import shown_value
from offrl.statistics.intervals import mean_interval
from offrl.statistics.maxima import expected_maximum
from offrl.system import files
from offrl.tuning.judging import short_judge
from offrl.tuning.page import write_page
from offrl.tuning.plan import GROUP
from offrl.tuning.search.rungs import cost
from offrl.tuning.verdict import TuneResult, default_doubt, limit_kept

if TYPE_CHECKING:
    from offrl.tuning.engine import TuningSearch

FILE, EXCHANGE = "result.json", "results.json"
OURS = ("logger", "quiet", "device", "threads", "group", "compile", "algo", "dataset")


def write_result(
    search: TuningSearch, by_data: Mapping[str, Any], final: Mapping[str, Any], retrained: Mapping[str, str]
) -> dict[str, Any]:
    """Write the result and its page, and say the outcome."""
    work, config = search.work, search.config
    outcome: dict[str, Any] = {
        "data": {
            "name": work.judged_on.spec.name,
            "episodes": work.judged_on.num_episodes,
            "fingerprint": work.judged_on.fingerprint,
            "returns": [float(work.judged_on.raw_returns.min()), float(work.judged_on.raw_returns.max())],
        },
        "split": config.split,
        "veto": config.veto,
        "algos": list(work.spaces),
        "spaces": {a: [_dimension(d) for d in s.dimensions] for a, s in work.spaces.items()},
        "budget": list(config.configs_and_steps()),
        "seeds": {"search": work.seeds, "final": work.final_seeds if retrained else []},
        "judge": list(config.judge),
        "criteria": list(config.criteria),
        "cost_limit": config.cost_limit,
        "short": short_judge(
            config.ope, config.data_judges, any(len(rungs) > 1 for rungs in search.trained) or len(search.trained) > 1
        ),
        "proposer": config.proposer,
        "rule": config.rule,
        "brackets": [[[r.settings, r.updates] for r in rungs] for rungs in search.trained],
        "updates": {
            "made": sum(cost(rungs, config.seeds) for rungs in search.trained),
            "full": len(search.trials) * config.configs_and_steps()[1] * config.seeds,
        },
        "rows": search.rows,
        "settings": {name: {"algo": algo, "values": dict(values)} for name, (algo, values) in search.trials.items()},
        "by_data": dict(by_data),
        "chosen": dict(final),
        "command": command(search, str(final["setting"])),
        "truth": _truth(search, by_data, final),
        "retrained": {role: _retrained(search, role, name) for role, name in retrained.items()},
        "optimism": _optimism(search),
    }
    outcome = json.loads(json.dumps(outcome))
    files.write_text(work.folder / FILE, json.dumps(outcome, indent=1) + "\n")
    if "winner" in retrained and outcome["retrained"]["winner"]["score"] is not None:
        first_last = " to ".join(dict.fromkeys(map(str, (work.seeds[0], work.seeds[-1]))))
        tuned = {
            "by": f"offrl tune judge={','.join(config.judge)} proposer={config.proposer}",
            "candidates": len(search.trials),
            "judge": ",".join(config.judge),
            "episodes_used": int(final.get("episodes", 0)),
            "split": f"searched with seeds {first_last} on {config.split:.0%} of the episodes, "
            "judged on the rest; seeds and episodes reported here chose nothing",
        }
        exchange.write(
            work.folder / EXCHANGE,
            [
                exchange.document(
                    work.folder / "winner", tuned=tuned, created=search.work.created or None, hardware=False
                )
            ],
        )
    page = write_page(work.folder, outcome)
    tell(outcome, default_doubt(TuneResult(outcome)))
    say(f"table: {work.folder / 'trials.csv'}; page: {page}")
    return outcome


def _dimension(d: Any) -> dict[str, Any]:
    values = [list(v) if isinstance(v, tuple) else v for v in d.values]
    ends = {} if values else {"low": d.low, "high": d.high, "log": d.log}
    return {"name": d.name, "values": values, **ends}


def command(search: TuningSearch, name: str) -> str:
    """The line that trains a setting on all data, without the search."""
    algo, values = search.trials[name]
    base = {k: v for k, v in search.work.base[algo].items() if k not in OURS and not (k == "group" and v == GROUP)}
    settings = {
        "algo": algo,
        "dataset": search.work.base[algo]["dataset"],
        **base,
        **{f"algo.{k}": v for k, v in values.items()},
    }
    settings |= {"steps": search.config.configs_and_steps()[1], "seeds": search.work.final_seeds}
    if search.config.env != "auto":
        settings["eval.env"] = search.config.env
    if search.config.cost_limit is not None:
        settings["eval.cost_limit"] = search.config.cost_limit
    return " ".join(
        [
            "offrl train",
            *(shlex.quote(f"{k}={shown_value(list(v) if isinstance(v, tuple) else v)}") for k, v in settings.items()),
        ]
    )


def _retrained(search: TuningSearch, role: str, name: str) -> dict[str, Any]:
    """The reported score of a setting: seeds trained anew, episodes that nothing chose by; the unit is the seed."""
    rows = search.stage(f"retrained-{role}", dict)["rows"]
    scores = [r["score"] if r.get("score") is not None else r["return_mean"] for r in rows]
    normalised = bool(rows) and rows[0].get("score") is not None
    interval = None if not scores else [float(x) for x in mean_interval(np.array(scores, float))]
    costs = [r["cost"] for r in rows if r.get("cost") is not None]
    return {
        "setting": name,
        "run": role,
        "score": interval,
        "seeds": scores,
        "normalised": normalised,
        "cost": [float(x) for x in mean_interval(np.array(costs, float))] if costs else None,
        "rows": rows,
    }


def _truth(search: TuningSearch, by_data: Mapping[str, Any], final: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the choice cost: true mean returns of the finalists, and the regret of the choice."""
    if not search.config.truth:
        return None
    record = search.stage("truth", dict)
    settings: dict[str, list[float]] = {}
    for row in record["policies"]:
        settings.setdefault(row["setting"], []).append(float(np.mean(row["returns"])))
    means = {name: float(np.mean(values)) for name, values in settings.items()}
    best = max(means, key=lambda n: means[n])
    spread = max(means.values()) - float(np.mean(list(means.values())))

    def regret(name: str) -> float | None:
        return None if name not in means else (means[best] - means[name]) / spread if spread > 0.0 else 0.0

    return {
        "environment": record["environment"],
        "episodes": record["episodes"],
        "seeds": settings,
        "means": means,
        "best": best,
        "regret": {"by_data": regret(str(by_data["setting"])), "chosen": regret(str(final["setting"]))},
        "lost": means[best] - means[str(final["setting"])] if str(final["setting"]) in means else None,
    }


def _optimism(search: TuningSearch) -> float | None:
    """By how much the largest of so many equal estimates exceeds their mean, were they all equal: in units of the
    judge.
    """
    rows = [r for r in search.rows if r["rung"] == "final" and r["error"] is not None]
    if len(rows) < 2:
        return None
    error = float(np.median([r["error"] for r in rows]))
    return error * float(expected_maximum(len(rows)))


def tell(outcome: Mapping[str, Any], doubt: str) -> None:
    """The outcome in a few lines. doubt: what the judge cannot tell, or ""."""
    chosen, by_data, limited = outcome["chosen"], outcome["by_data"], outcome["cost_limit"] is not None
    name = chosen["setting"]
    values = " ".join(f"{k}={v}" for k, v in outcome["settings"][name]["values"].items())
    say(f"chosen: {name} ({outcome['settings'][name]['algo']} {values}): {chosen['why']}")
    if sentence := limit_kept(TuneResult(outcome)):
        say(sentence)
    if len(by_data["members"]) > 1:
        say(f"the data cannot tell these apart: {some(by_data['members'])}")
    if doubt:
        say(doubt)
    for role in ("winner", "default"):
        if (entry := outcome["retrained"].get(role)) and entry["score"] is not None:
            kind = "score" if entry["normalised"] else "return"
            detail = f"{len(entry['seeds'])} new seeds, new episodes"
            cost = f", cost {interval_text(tuple(entry['cost']))}" if limited and entry["cost"] else ""
            score = interval_text(tuple(entry["score"]))
            say(f"{role} {entry['setting']}, trained anew: {kind} {score}{cost} ({detail})")
    if "winner" in outcome["retrained"] and "default" not in outcome["retrained"]:
        say("the default settings are the winner")
    if (truth := outcome["truth"]) is not None and truth["lost"] is not None:
        regret = truth["regret"]["chosen"]
        detail = f"{truth['lost']:.4g} against the best finalist, {truth['best']} (regret {regret:.2f}; 1: at random)"
        say(f"true returns: the choice loses {detail}")
    say(f"to train it yourself: {outcome['command']}")
