"""The files behind scores: YAML read entry by entry is YAML read whole, and thinned tables keep what decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from offrl.runs.parse import whole_rows, yaml_mapping

TEXTS = (
    "steps: 20\nalgo:\n  name: bc\n  hidden:\n  - 8\n  - 8\nseeds:\n- 0\n- 1\ngiven: {}\n",
    "a: 1\na: 2\n",  # the last one counts
    "a: &x [1, 2]\nb: *x\n",
    'a: "two\n  lines"\nb: |\n  text: with\n  colons: inside\n',
    'a: "begins\nb: and ends"\nc: 3\n',
    "# a remark\na: 1\n\n# another\nb: 2\n",
    "yes: 1\non: 2\n",  # names that YAML takes for true
    '{"steps": 20, "given": {"algo": "bc"}}',
    "- 1\n- 2\n",
    "a: 1\nb\n",
    "a: 1\n---\nb: 2\n",
    "steps: 20\nev",
    "a: [1,\nb: 2\n",
    "a:\n  - b: 1\n    c: 2\nd: null\n",
    "",
)


@pytest.mark.parametrize("text", TEXTS)
def test_yaml_entry_by_entry(text: str) -> None:
    try:
        expected = yaml.safe_load(text)
    except yaml.YAMLError:
        with pytest.raises(yaml.YAMLError):
            yaml_mapping(text)
    else:
        result = yaml_mapping(text)
        assert result == expected and (not isinstance(expected, dict) or list(result) == list(expected))


def test_thinned_rows_keep_the_final_and_the_last(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = [
        f"{step},{seed},{'true' if step == 8 and seed == 0 else 'false'}" for step in range(1, 12) for seed in (0, 1)
    ]
    path.write_text("\n".join(["step,seed,final", *rows, "12,0"]) + "\n")
    problems: list[str] = []
    kept = list(whole_rows(path, problems.append, ("seed",), 3))
    # the last ones at the end; a short line as it is
    assert [int(r["step"]) for r in kept if r["seed"] == "0"] == [3, 6, 8, 9, 12, 11]
    assert [int(r["step"]) for r in kept if r["seed"] == "1"] == [3, 6, 9, 11]
    assert kept[[r["step"] for r in kept].index("12")] == {"step": "12", "seed": "0", "final": None}
    assert len(list(whole_rows(path, problems.append))) == 23 and not problems
