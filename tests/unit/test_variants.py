"""What tells runs apart: flat settings, their hash, their difference."""

from __future__ import annotations

from offrl.settings.diff import ABSENT, Variant, difference, digest, flatten, labels, value_text

OLD = {
    "algo": {"temperature": 3.0, "name": "iql", "hidden": [256, 256]},
    "dataset": {"fields": {}, "check": True},
    "seeds": [0, 1],
}


def test_flat_settings_have_the_name_first() -> None:
    assert list(flatten(OLD)) == [
        "algo.name",
        "algo.temperature",
        "algo.hidden",
        "dataset.fields",
        "dataset.check",
        "seeds",
    ]
    assert flatten(OLD)["dataset.fields"] == {} and flatten(OLD)["algo.hidden"] == [256, 256]


def test_difference() -> None:
    new = {
        "algo": {"name": "bc", "temperature": 3, "hidden": (256, 256), "dropout": 0.1},
        "dataset": {"fields": {}, "check": False},
    }
    assert difference(OLD, new) == {"algo.name": ("iql", "bc"), "dataset.check": (True, False)}
    assert difference(OLD, OLD) == {} and difference(flatten(OLD), new) == difference(OLD, new)
    every = difference(OLD, new, everything=True)
    assert every == {**difference(OLD, new), "seeds": ([0, 1], ABSENT), "algo.dropout": (ABSENT, 0.1)}
    assert next(iter(every)) == "algo.name"


def test_an_entry_of_an_empty_mapping_is_a_difference() -> None:
    new = {**OLD, "dataset": {"fields": {"actions": "a"}, "check": True}}
    assert difference(OLD, new) == {"dataset.fields.actions": (ABSENT, "a")}
    assert difference(new, OLD) == {"dataset.fields.actions": ("a", ABSENT)}


def test_true_is_not_one() -> None:
    assert difference({"a": True}, {"a": 1}) == {"a": (True, 1)}
    assert difference({"a": False}, {"a": 0.0}) == {"a": (False, 0.0)}
    assert digest({"a": True}) != digest({"a": 1})


def test_the_hash_is_of_the_meaning() -> None:
    assert digest({"a": 3, "b": [1.0]}) == digest({"b": (1,), "a": 3.0})
    assert digest({"a": 3}) != digest({"a": 3.5}) and digest({"a": 3}) != digest({"b": 3})
    assert len(digest({})) == 8 and int(digest({}), 16) >= 0
    assert digest({"a": 3}) == "779599ad"  # printf '{"a": 3}' | sha256sum: what older results.csv files hold


def test_values_are_written_as_in_a_command() -> None:
    texts = {3.0: "3", 0.7: "0.7", 1e-5: "1e-05", True: "true", None: "null", "cosine": "cosine"}
    assert {value: value_text(value) for value in texts} == texts and value_text([256, 256]) == "[256,256]"


def test_many_differences_are_cut_short_and_stay_apart() -> None:
    given = [{f"algo.x{i}": i + j for i in range(5)} for j in range(2)]
    variants = [Variant("d", "iql", tag, g, g) for tag, g in zip("ab", given, strict=True)]
    found = labels(variants)
    assert found == {
        ("d", "iql", "a"): "iql (x0=0, x1=1, x2=2, ... a)",
        ("d", "iql", "b"): "iql (x0=1, x1=2, x2=3, ... b)",
    }


def test_variants_of_which_nothing_is_known_stay_apart() -> None:
    found = labels([Variant("d", "iql", "aaaa"), Variant("d", "iql", "bbbb"), Variant("e", "iql", "aaaa")])
    assert found == {
        ("d", "iql", "aaaa"): "iql (aaaa)",
        ("d", "iql", "bbbb"): "iql (bbbb)",
        ("e", "iql", "aaaa"): "iql",
    }
