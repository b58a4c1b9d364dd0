"""The shape of the code base: sizes, names and depths that keep it readable.

`shape.json` lists what exceeds them, and may only shrink: a new or larger fault fails, and so does an entry that is out
of date. `python tests/unit/test_shape.py` brings entries down; it adds none.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import json
import os
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from offrl import registry
from offrl.algorithm import Algorithm

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("shape.json")
FOLDERS = ("offrl", "algorithms", "world_models", "envs")
MODULES = 16  # of a package, at most
FLAT = ("algorithms", "envs", "envs/text", "offrl")  # one file for each paper or environment; offrl's are the contract
# Tokens, without comments, layout and docstrings: they measure what there is to read, whatever the length of a line.
TOKENS, PAPER_TOKENS, PACKAGE_TOKENS = 2600, 1700, 30_000  # of a module, of an algorithm's, of a package
# What shape.json says beyond it was raised once, by the 37,600 tokens of images and robot data, two thirds of them
# readers and writers of other programs' files.
LIBRARY_TOKENS = 610_000
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
# settings of networks and planners that stand with the family's others, though papers alone read them
PLUMBING = ("backward_hidden", "denoising_steps", "greedy", "inputs_hidden", "plan_horizon", "plan_particles")
MEMBERS = 25  # public ones of `Algorithm`
# pronouns, participles and question words as names of variables
BANNED = (
    *("them", "told", "said", "mine", "whole", "theirs", "ours", "found"),
    *("place", "places", "words", "about", "own", "made", "what", "left", "every", "given", "others", "seen", "rest"),
    *("lost", "why", "held", "drawn", "kept", "wanted", "began", "asked", "named", "there", "here", "which", "far"),
)

SOURCES = {
    str(Path(folder, name).relative_to(ROOT)): Path(folder, name).read_text(encoding="utf-8")
    for top in FOLDERS
    for folder, _, names in os.walk(ROOT / top)  # which does not follow links
    for name in sorted(names)
    if name.endswith(".py")
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in SOURCES.items()}


@functools.cache
def tokens() -> dict[str, int]:
    """The number of tokens of each module, without comments, layout and docstrings."""
    counts = {}
    for name, text in SOURCES.items():
        kinds = [t.type for t in tokenize.generate_tokens(io.StringIO(text).readline)]
        docstrings = sum(
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None
            for node in ast.walk(trees()[name])
        )
        counts[name] = sum(kind not in LAYOUT for kind in kinds) - docstrings
    return counts


def modules() -> dict[str, int]:
    """Packages with too many modules."""
    packages = collections.Counter(str(Path(name).parent) for name in SOURCES if not name.endswith("__init__.py"))
    return {p: n for p, n in packages.items() if p not in FLAT and n > MODULES}


def module_tokens() -> dict[str, int]:
    """Modules of too many tokens."""
    limit = {name: PAPER_TOKENS if name.startswith("algorithms/") else TOKENS for name in SOURCES}
    return {name: n for name, n in tokens().items() if n > limit[name]}


def package_tokens() -> dict[str, int]:
    """Packages, with all below them, and the library of too many tokens."""
    counts: collections.Counter[str] = collections.Counter()
    for name, n in tokens().items():
        first, *rest = name.split("/")
        counts["library"] += n
        counts["/".join([first, *rest[:-1]][: 2 if first == "offrl" else 1])] += n
    limits = {"offrl": TOKENS * 6, "library": LIBRARY_TOKENS}
    return {name: n for name, n in counts.items() if n > limits.get(name, PACKAGE_TOKENS)}


def depth() -> dict[str, int]:
    """Papers with more than one class between them and the contract."""

    def classes(kind: type) -> int:
        return max(
            (1 + classes(base) for base in kind.__bases__ if issubclass(base, Algorithm) and base is not Algorithm),
            default=0,
        )

    return {name: classes(kind) for name, kind in registry.names("algo").items() if classes(kind) > 1}


def class_names() -> dict[str, int]:
    """Public classes that share their name, and the number of modules that define it."""
    places = collections.defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    return {name: len(where) for name, where in places.items() if len(where) > 1}


def words() -> dict[str, int]:
    """Variables and parameters that are pronouns or participles, and how often they are bound."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    bound = collections.Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    bound.update(n.arg for n in nodes if isinstance(n, ast.arg))
    return {word: bound[word] for word in BANNED if bound[word]}


def settings_read(name: str) -> set[str]:
    """Names of the settings that a module reads."""
    return {
        node.attr
        for node in ast.walk(trees()[name])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("c", "config")
    }


def undeclared_settings() -> dict[str, int]:
    """Papers that read settings which no shared code reads, and which their own files do not declare."""
    shared = set(PLUMBING).union(*(settings_read(name) for name in SOURCES if not name.startswith("algorithms/")))
    counts = {}
    for name, kind in registry.names("algo").items():
        path = kind.__module__.removeprefix("offrl.").replace(".", "/") + ".py"
        folder = str(Path(path).parent)
        paper = [path] if folder == "algorithms" else [file for file in SOURCES if file.startswith(f"{folder}/")]
        parents = [parent for parent in kind.Config.__mro__ if not parent.__module__.startswith("offrl.algorithms.")]
        inherited = {field for parent in parents for field in vars(parent).get("__annotations__", ())}
        declared = {ast.unparse(n.target) for f in paper for n in ast.walk(trees()[f]) if isinstance(n, ast.AnnAssign)}
        counts[name] = len(set().union(*map(settings_read, paper)) & inherited - declared - shared)
    return {name: n for name, n in counts.items() if n}


RULES: tuple[Callable[[], dict[str, int]], ...] = (
    *(modules, module_tokens, package_tokens, depth, class_names, words),
    undeclared_settings,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_nothing_new_exceeds_a_limit(rule: Callable[[], dict[str, int]]) -> None:
    faults, known = rule(), json.loads(LIST.read_text())[rule.__name__]
    new = {name: size for name, size in faults.items() if size > known.get(name, 0)}
    assert not new, f"{rule.__doc__} {new}: split or rename; tests/unit/shape.json only shrinks"
    stale = {name: faults.get(name, 0) for name, size in known.items() if faults.get(name, 0) < size}
    assert not stale, f"better than tests/unit/shape.json says: `python tests/unit/test_shape.py` lowers {stale}"


def test_members_of_the_contract() -> None:
    public = [name for name in {*vars(Algorithm), *Algorithm.__annotations__} if not name.startswith("_")]
    assert len(public) <= MEMBERS, sorted(public)


def test_every_paper_shows_its_losses() -> None:
    def states(kind: type) -> bool:
        return any(name in ("update", "fit", "judged") or name.endswith("_loss") for name in vars(kind))

    assert not [name for name, kind in registry.names("algo").items() if not states(kind)]


if __name__ == "__main__":
    listed = json.loads(LIST.read_text())
    current = {rule.__name__: rule() for rule in RULES}
    lower = {
        k: {n: min(size, current[k][n]) for n, size in sorted(v.items()) if n in current[k]} for k, v in listed.items()
    }
    LIST.write_text(json.dumps(lower, indent=1) + "\n")
