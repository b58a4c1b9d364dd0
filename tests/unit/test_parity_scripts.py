"""The comparisons with reference implementations: what they need, what their page holds, and, where checkouts are, that
they hold.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offrl import registry, rng

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
parity = importlib.import_module("parity.__main__")
common = importlib.import_module("parity.common")
for module in parity.MODULES:
    importlib.import_module(f"parity.{module}")
REFERENCES = os.environ.get("OFFRL_REFERENCES", "")
TEXT = "before\n<!-- parity: python scripts/parity -->\n\nold\n\n<!-- end of parity -->\nafter\n"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["parity", *words])
    dtype = torch.get_default_dtype()
    try:
        return int(parity.main())
    finally:
        torch.set_default_dtype(dtype)


def test_comparisons_are_of_methods_that_exist() -> None:
    names = [case.method for case in parity.CASES]
    assert len(set(zip(names, (c.repository for c in parity.CASES), strict=True))) == len(names) > 20
    for case in parity.CASES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", case.repository) and re.fullmatch(r"[0-9a-f]{40}", case.commit), (
            case.method
        )
        assert "|" not in case.aligned + case.remains, case.method  # they are cells of a table
        if case.method != "rlpd":  # a preset of sac_n
            registry.get("algo", case.method.split(",")[0])


def test_without_a_checkout_it_says_which_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    assert run(monkeypatch, "--checkouts", str(tmp_path), "--out", str(page), "td3_bc", "mopo") == 1
    printed = capsys.readouterr().err
    for repository, commit in (("corl-team/CORL", "eeeeef2"), ("yihaosun1124/OfflineRL-Kit", "e3ce697")):
        assert re.search(rf"fetch https://github.com/{repository} at {commit}\w+ into {tmp_path}", printed)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    table, _, rest = text.partition("Not compared for this table:")
    assert (
        "| td3_bc |" not in table
        and "- td3_bc beside corl-team/CORL: fetch https://github.com/corl-team/CORL at eeeeef2" in rest
    )
    assert str(tmp_path) not in text


def test_a_case_that_fails_or_lacks_a_package_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(checkout: Path) -> None:
        raise RuntimeError("no such class")

    good = parity.Outcome(
        losses=[{"loss": (2.0, 1.0)}], parameters={"w": (torch.ones(2).numpy(), torch.ones(2).numpy())}
    )
    cases = [
        parity.Case("bad", "some/one", "0" * 40, "", "", (), fail),
        parity.Case("jax", "some/one", "0" * 40, "", "", ("surely_not_installed",), fail),
        parity.Case("far", "some/one", "0" * 40, "", "all", (), lambda checkout: good),
    ]
    monkeypatch.setattr(parity, "CASES", cases)
    (tmp_path / "some+one").mkdir()
    assert run(monkeypatch, "--checkouts", str(tmp_path)) == 1
    out = capsys.readouterr()
    assert "| far | [some/one]" in out.out and "| 1.0e+00 | 0.0e+00 | nothing | all |" in out.out
    assert "| bad |" not in out.out and "| jax |" not in out.out
    assert (
        "no such class" in out.err
        and "jax beside some/one: pip install surely_not_installed" in out.err
        and "far: above" in out.err
    )


# one process for each repository: modules of different checkouts have the same names
@pytest.mark.nightly
@pytest.mark.parametrize("repository", sorted({case.repository for case in parity.CASES}))
def test_updates_equal_the_reference(repository: str) -> None:
    if not REFERENCES:
        pytest.skip("OFFRL_REFERENCES names no folder of checkouts")
    if parity.checkout_of(Path(REFERENCES), repository) is None:
        pytest.skip(f"no checkout of {repository} under OFFRL_REFERENCES={REFERENCES}")
    cases = [case for case in parity.CASES if case.repository == repository]
    methods = sorted({case.method for case in cases if not parity.absent(case)})
    if not methods:
        pytest.skip(f"needs {', '.join(parity.absent(cases[0]))}")
    command = [sys.executable, str(SCRIPTS / "parity"), "--checkouts", REFERENCES, "--repository", repository, *methods]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_draw_used_twice_is_noticed() -> None:
    """An algorithm's sum of two draws is the reference's, unless one key stands in the place of two."""

    def ours() -> torch.Tensor:
        actor, critic = rng.split(rng.make_key(0))
        return rng.normal(actor, (2, 3)) + rng.normal(critic, (2, 3))

    with common.shared_noise():
        assert torch.equal(ours(), torch.randn(2, 3) + torch.randn_like(torch.zeros(2, 3)))
    with common.shared_noise(), common.reused_draws():
        assert (ours() - torch.randn(2, 3) - torch.randn(2, 3)).abs().max() > 0.1


def test_draws_of_both_sides_have_the_same_numbers() -> None:
    draws, keys = common.Draws(), rng.split(rng.make_key(0), 3)
    mine = [draws.ours(key, (2, 3)).numpy() for key in (*keys, keys[0])]
    theirs = [draws.theirs((3, 2)).reshape(2, 3) for _ in range(3)]
    assert all((a == b).all() for a, b in zip(mine, [*theirs, theirs[0]], strict=True))
    assert len({float(x[0, 0]) for x in theirs}) == 3 and float(draws.theirs((6,), "uniform")[0]) not in theirs[0]
    draws.restart({6: (1, common.UNUSED, 0)})
    assert [float(draws.theirs((6,))[0]) for _ in range(3)][::2] == [float(theirs[n][0, 0]) for n in (1, 0)]
