"""What can be chosen by name, printed for people."""

from __future__ import annotations

from offrl import registry
from offrl.compose import _names
from offrl.errors import UserError, nearest
from offrl.logging import print_table
from offrl.settings import describe


def print_all() -> None:
    """Algorithms with their papers, and the experiments that belong to them."""
    rows = []
    for name, algorithm in registry.names("algo").items():
        module = __import__(algorithm.__module__, fromlist=["_"])
        title = (module.__doc__ or algorithm.__doc__ or "").strip().splitlines()[0]
        experiments = ", ".join(e.split("/", 1)[1] for e in _names("experiment") if e.startswith(f"{name}/"))
        rows.append([name, title, experiments])
    print_table(["algorithm", "what it is", "experiments"], rows)
    variants = [n for n in _names("algo") if n not in registry.names("algo")]
    if variants:
        print(f"\nwith other settings: {', '.join(variants)}")
    print("data sets: offrl data list; an algorithm's settings: offrl list algo=NAME")


def print_algorithm(name: str) -> None:
    """An algorithm's settings with their defaults. Raises UserError for an unknown name."""
    known = registry.names("algo")
    if name not in known:
        raise UserError(f"unknown algorithm '{name}'.{nearest(name, known)} Known: {', '.join(known)}")
    print("\n".join(describe(known[name].Config(), "algo.")))


def print_data_sets() -> None:
    """Names that `dataset=` takes without a path."""
    from offrl.data.sources import catalogue

    for family, names in catalogue().items():
        print(f"{family}:")
        for name in names:
            print(f"  {name}")
