"""The model card of an exported policy: README.md, whose front matter the Hugging Face Hub reads, and the policy's own
file beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from offrl.data.dataset import ColumnSpec, DataSpec
from offrl.errors import one_line
from offrl.evaluation.policy import TrainedPolicy
from offrl.system import files

CARD, POLICY = "README.md", "policy.safetensors"
SHOWN = 40  # columns and choices
MARK = "library_name: offrl"  # in the front matter of every card of ours


def write(folder: Path, policy: TrainedPolicy, description: Mapping[str, Any]) -> list[Path]:
    """Write README.md and policy.safetensors into `folder`; returns what was written. A README.md of somebody else
    stays as it is.

    description: what the JSON file of an export holds.
    """
    policy.save(folder / POLICY)
    card = folder / CARD
    if card.exists() and MARK not in card.read_text(encoding="utf-8", errors="replace")[:2000]:
        return [folder / POLICY]
    files.write_text(card, text(policy, description))
    return [card, folder / POLICY]


def text(policy: TrainedPolicy, description: Mapping[str, Any]) -> str:
    """The card: front matter with the scores as results of a model index, and how to use the policy."""
    algorithm = str(description.get("algorithm") or policy.algorithm.config.name)
    data = _plain((description.get("dataset") or {}).get("name") or policy.algorithm.spec.name)
    task = policy.algorithm.spec.task
    environment = _plain((task.env_id if task is not None else None) or data)
    scores = list(description.get("scores") or [])
    head: dict[str, Any] = {
        "library_name": "offrl",
        "pipeline_tag": "reinforcement-learning",
        "tags": [
            "offrl",
            "reinforcement-learning",
            "offline-reinforcement-learning",
            _tag(algorithm),
            _tag(environment),
        ],
    }
    if metrics := _metrics(scores):
        of = {"name": environment, "type": _tag(environment)}
        result = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement learning"},
            "dataset": of,
            "metrics": metrics,
        }
        head["model-index"] = [{"name": f"{_tag(algorithm)}-{_tag(data)}", "results": [result]}]
    steps = int(policy.state.step)
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {_plain(algorithm)} on {data}",
        "",
        f"A policy of the algorithm `{_tag(algorithm)}`, trained by [offrl](https://pypi.org/project/offrl) on the "
        f"logged data `{data}` with {steps:,} updates, seed {policy.seed}.",
        "",
        *_columns(policy.algorithm.spec),
        *_table(scores),
        *_chunks(description),
        *_shield(description),
        "```python",
        "import offrl",
        "",
        'policy = offrl.load_policy("hf://USER/REPOSITORY", revision="COMMIT")   # or the path of policy.safetensors',
        "action, _ = policy.predict(observation, deterministic=True)",
        "```",
        "",
        "`policy.safetensors` holds numbers and settings, and no code; `policy.json` says what goes in and comes out, "
        "and in which units.",
        "",
    ]
    return "\n".join(lines)


def _columns(spec: DataSpec) -> list[str]:
    """What goes in and comes out, where the data had names for it."""
    lines = []
    for verb, columns in (("observes", spec.observation_columns), ("acts on", spec.action_columns)):
        shown = [f"{_plain(c.name)}{f' in {_plain(c.unit)}' if c.unit else ''}{_scaling(c)}" for c in columns[:SHOWN]]
        if shown:
            lines.append(f"It {verb}: {', '.join(shown)}{', ...' if len(columns) > SHOWN else ''}.")
    if spec.action_labels:
        choices = ", ".join(
            f"{i + spec.first_choice} {_plain(label)}" for i, label in enumerate(spec.action_labels[:SHOWN])
        )
        lines.append(f"Its choices: {choices}{', ...' if len(spec.action_labels) > SHOWN else ''}.")
    return [*lines, ""] if lines else []


def _scaling(column: ColumnSpec) -> str:
    """How the policy's number is made of the recorded one; "" where it is that one."""
    times = f" times {column.scale:g}" if column.scale != 1.0 else ""
    return times + (f" {'plus' if column.offset > 0 else 'minus'} {abs(column.offset):g}" if column.offset else "")


def _chunks(description: Mapping[str, Any]) -> list[str]:
    """How to play an exported file's chunks of actions, where it gives some."""
    output = (description.get("outputs") or [{}])[0]
    if "action_steps" not in output:
        return []
    _, length, width = output["shape"]
    return [
        f"The exported files map observations to chunks of {length} actions, `[batch, {length}, {width}]`: play the "
        f"first {output['action_steps']} of them, one at each step, before the next chunk is asked for, and begin each "
        "episode with a new one.",
        "`policy.safetensors` keeps the queue by itself: `policy.act(observation)`, and `policy.reset()` where an "
        "episode begins.",
        "",
    ]


def _shield(description: Mapping[str, Any]) -> list[str]:
    """What corrects an exported file's actions, where something does."""
    if "shield" not in description["policy"]:
        return []
    name = _tag(Path(str(description["policy"]["shield"])).name)
    return [f"The exported files correct their actions by the shield `{name}`; `policy.safetensors` does not.", ""]


def _metrics(scores: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a model index: means with the ends of their 95% intervals in their names."""
    metrics = []
    for row in scores:
        subject = "this policy" if "episodes" in row else f"{len(row.get('seeds', ()))} seeds"
        for kind, key in (("mean_reward", "return_mean"), ("normalized_score", "score"), ("success_rate", "success")):
            if isinstance(value := row.get(key), (int, float)):
                name = f"{kind.replace('_', ' ')}, {subject}{_interval(row, key)}"
                metrics.append({"type": kind, "value": round(float(value), 4), "name": name, "verified": False})
    return metrics


def _table(scores: list[Mapping[str, Any]]) -> list[str]:
    if not scores:
        return []
    lines = [
        f"Scored in {_plain(scores[0]['environment'])}:",
        "",
        "| Of | Episodes | Return | Normalised score |",
        "|---|---|---|---|",
    ]
    for row in scores:
        cells = [
            f"{row[k]:.1f}{_interval(row, k)}" if isinstance(row.get(k), (int, float)) else ""
            for k in ("return_mean", "score")
        ]
        lines.append(f"| {_plain(row['what'])} | {row.get('episodes', '')} | {' | '.join(cells)} |")
    return [*lines, ""]


def _interval(row: Mapping[str, Any], key: str) -> str:
    ends = row.get(f"{key.removesuffix('_mean')}_95_percent")
    if not ends or None in ends or ends[0] != ends[0]:
        return ""
    return f" [{ends[0]:.1f}, {ends[1]:.1f}]"


def _plain(value: Any) -> str:
    """A text from a run's files as text of a page: no markup, no line of its own."""
    return re.sub(r"[<>|`\[\]]", "", one_line(str(value)))


def _tag(value: Any) -> str:
    return re.sub(r"[^\w.-]+", "-", str(value)).strip("-")
