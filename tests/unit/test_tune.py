"""`offrl tune`: rungs, spaces, proposers, the store, and a search whose judge is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.ope.config import OPEConfig, short_fit
from offrl.settings.compose import compose
from offrl.system import files
from offrl.tuning import engine, plan
from offrl.tuning.config import TuneConfig
from offrl.tuning.judging import short_judge, summarise
from offrl.tuning.search import store
from offrl.tuning.search.propose import PROPOSERS, propose
from offrl.tuning.search.rungs import Rung, cost, halving, survivors
from offrl.tuning.search.space import Space, space_of
from offrl.tuning.tune import tune

# ---------------------------------------------------------------------------------------------------------------- rungs


def test_rungs_are_those_of_successive_halving() -> None:
    assert halving(27, 27, 3, 4) == [Rung(27, 1), Rung(9, 3), Rung(3, 9), Rung(1, 27)]
    assert cost(halving(27, 27, 3, 4)) == 81  # nothing is trained twice
    assert cost(halving(64, 64_000, 4, 4)) == 208_000
    assert halving(1, 100, 4, 1) == [Rung(1, 100)]
    assert halving(3, 10, 4, 2) == [Rung(3, 2), Rung(1, 10)], (
        "at least one goes on, and the last rung is exactly the full length"
    )
    assert cost([Rung(8, 10), Rung(2, 40)], seeds=3) == 3 * (80 + 60)


def test_survivors_are_the_best_one_of_each_algorithm_and_a_wild_card() -> None:
    values = [5.0, float("nan"), 4.0, 3.0, 1.0, 2.0]
    algos = ["a", "a", "a", "a", "b", "b"]
    assert survivors(values, 2, None, algos) == {0: "kept", 2: "kept", 5: "best of b"}
    assert survivors(values, 1, 1, ["a"] * 6) == {0: "kept", 3: "wild card"}  # the others by value: 2, 3, 5, 4
    assert survivors(values, 1, 0, ["a"] * 6, multiple=3) == {0: "kept", 2: "wild card", 3: "fills a program"}
    assert survivors(values, 1, 0, ["a"] * 6, always=[4]) == {0: "kept", 4: "wild card"}, (
        "the wild card of an earlier rung stays"
    )
    assert survivors([float("nan")] * 2, 1, 0, ["a", "a"]) == {}, "what diverged does not go on, as a wild card neither"


# --------------------------------------------------------------------------------------------------------------- spaces


def iql_space(kind: str = "wide", **own: Any) -> Space:
    return space_of("iql", compose({"algo": "iql", "experiment": "none"}).algo, kind, own)


def test_a_wide_space_goes_twice_beyond_the_published_values() -> None:
    temperature, expectile = iql_space().dimensions
    assert (temperature.low, temperature.high, temperature.log, temperature.safe) == (0.25, 20.0, True, "low")
    assert (expectile.low, expectile.high, expectile.log) == (0.5, 0.95, False)
    assert [d.values for d in iql_space("published").dimensions] == [(0.5, 3, 10), (0.5, 0.7, 0.9)]
    assert iql_space().default == {"temperature": 3.0, "expectile": 0.7}
    assert temperature.at(0.5) == pytest.approx(np.sqrt(0.25 * 20), rel=1e-3), "the middle of a logarithmic range"


def test_ranges_of_a_command() -> None:
    space = iql_space("none", temperature=[1, 4, "log"], hidden=[[8, 8], [16, 16]])
    temperature, hidden = space.dimensions
    assert temperature.tensor and (temperature.low, temperature.high) == (1.0, 4.0)
    assert not hidden.tensor and space.program({"temperature": 1.0, "hidden": [8, 8]}) == ((8, 8),)
    assert space.tensors == ("temperature",)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"tempature": [1, 2]}, "Did you mean 'temperature'"),
        ({"temperature": [3, 1, "log"]}, "must be below"),
        ({"temperature": [0, 1, "log"]}, "begins above 0"),
        ({"temperature": [-1, 1, "linear"]}, "out of range"),
        ({"expectile": [0.5, 1.5]}, "largest allowed value is 1.0"),
        ({"temperature": []}, "has no values"),
        ({"temperature": [1, 1]}, "twice"),
        ({"temperature": ["a", 1]}, "is no number"),
        ({"hidden": [1, 2, "log"]}, "name values"),
    ],
)
def test_a_space_that_is_none_is_refused(own: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        iql_space(**own)


def test_an_algorithm_without_published_ranges_needs_its_own() -> None:
    settings = compose({"algo": "bc", "experiment": "none"}).algo
    with pytest.raises(UserError, match="no published ranges are known"):
        space_of("bc", settings, "wide", {})
    assert space_of("bc", settings, "wide", {"learning_rate": [1e-4, 1e-2, "log"]}).tensors == ("learning_rate",)


@pytest.mark.parametrize(
    "file", [p.stem for p in sorted((Path(__file__).parents[2] / "configs" / "space").glob("*.yaml"))]
)
def test_every_published_space_fits_its_algorithm(file: str) -> None:
    settings = compose({"algo": file, "experiment": "none"}).algo
    for kind in ("wide", "published"):
        space = space_of(file, settings, kind, {})
        seen = [space.caution({d.name: d.at(share) for d in space.dimensions}) for share in (0.0, 0.99)]
        assert seen[0] != seen[1], "some end of it stays nearer to the data"


def test_the_cautious_end() -> None:
    space = iql_space()
    near, far = {"temperature": 0.5, "expectile": 0.7}, {"temperature": 5.0, "expectile": 0.7}
    assert space.caution(near) > space.caution(far), "a small temperature imitates"


# ------------------------------------------------------------------------------------------------------------ proposers


def loss(values: dict[str, Any]) -> tuple[float, ...]:
    return (-((np.log(values["temperature"]) - np.log(1.0)) ** 2) - 10 * (values["expectile"] - 0.6) ** 2,)


@pytest.mark.parametrize("proposer", [p for p in PROPOSERS if p != "nsga2"])
def test_proposals_begin_with_the_default_and_never_repeat(proposer: str) -> None:
    if proposer in ("tpe", "cmaes"):
        pytest.importorskip("optuna")
    space = iql_space()
    told: list[Any] = []
    for _ in range(3):
        new = propose(space, proposer, 6, told, 3)
        assert new == propose(space, proposer, 6, told, 3), "a function of its arguments"
        told += [(v, loss(v)) for v in new]
    values = [v for v, _ in told]
    assert values[0] == space.default
    assert len({tuple(v.values()) for v in values}) == len(values)
    assert all(0.25 <= v["temperature"] <= 20 and 0.5 <= v["expectile"] <= 0.95 for v in values)
    if proposer in ("random", "sobol"):
        assert propose(space, proposer, 6, [], 4)[1:] != propose(space, proposer, 6, [], 3)[1:], (
            "another seed, other settings"
        )


def test_tpe_learns_from_what_it_is_told() -> None:
    pytest.importorskip("optuna")
    space, better = iql_space(), 0
    for seed in range(5):
        told: list[Any] = []
        for _ in range(5):
            told += [(v, loss(v)) for v in propose(space, "tpe", 10, told, seed)]
        random = propose(space, "random", 50, [], seed)
        better += np.mean([loss(v)[0] for v, _ in told[30:]]) > np.mean([loss(v)[0] for v in random[1:]])
    assert better >= 4


def test_a_space_of_lists_is_used_up() -> None:
    space = iql_space("published")
    first = propose(space, "random", 30, [], 0)
    assert len(first) == 9, "three times three, and the default is one of them"
    assert propose(space, "random", 5, [(v, (0.0,)) for v in first], 0) == []


def test_a_grid_is_even_and_fits() -> None:
    levels = propose(iql_space(), "grid", 10, [], 0)
    assert (
        len(levels) == 10
        and len({v["temperature"] for v in levels[1:]}) == 3
        and len({v["expectile"] for v in levels[1:]}) == 3
    )


# ---------------------------------------------------------------------------------------------------------------- store


def test_the_store_survives_a_torn_line_and_refuses_another_tune(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    spaces = {"iql": iql_space()}
    told: dict[str, Any] = {"iql": [(v, loss(v)) for v in propose(spaces["iql"], "random", 4, [], 0)]}
    store.record(None, tmp_path, spaces, told, "me", 1)
    path = tmp_path / store.JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "wor')
    store.check(None, tmp_path, ["iql"], "me", 1)
    assert path.read_bytes() == whole
    told["iql"].append(({"temperature": 2.0, "expectile": 0.8}, None))
    store.record(None, tmp_path, spaces, told, "me", 1)
    store.record(None, tmp_path, spaces, told, "me", 1)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    trials = optuna.load_study(study_name="iql", storage=storage).trials
    assert [t.user_attrs["setting"] for t in trials] == [f"iql-{n}" for n in range(5)], "each once"
    assert trials[4].state == optuna.trial.TrialState.FAIL and trials[0].values == [loss(told["iql"][0][0])[0]]
    with pytest.raises(UserError, match="is of another tune"):
        store.check(None, tmp_path, ["iql"], "another data set", 1)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": "many"}, "SETTINGSxUPDATES"),
        ({"budget": "0x100"}, "at least one setting"),
        ({"budget": "2x100"}, "cannot be thinned out"),
        ({"budget": "8x3"}, "fewer than one for the first"),
        ({"judge": ["fqee"]}, "Did you mean 'fqe'"),
        ({"judge": []}, "nothing that chooses"),
        ({"judge": ["episodes"]}, "needs the number of real episodes"),
        ({"judge": ["fqe"], "episodes": 5, "env": "none"}, "needs an environment"),
        ({"judge": ["episodes"], "episodes": 5}, "rungs=1"),
        ({"judge": ["model"]}, "ope.world_model"),
        ({"criteria": ["distance"]}, "begins with return"),
        ({"criteria": ["return", "costs"]}, "unknown criterion 'costs'. Did you mean 'cost'"),
        ({"criteria": ["return", "cost"]}, "needs the limit .* cost_limit=20"),
        ({"cost_limit": 20.0}, r"with criteria=\[return,cost\]: add that"),
        ({"criteria": ["return", "cost"], "cost_limit": 20.0, "confidence": 0.9}, "confidence= looks at returns"),
        ({"proposer": "nsga2"}, "several criteria"),
        ({"algos": []}, "names no algorithm"),
        ({"split": 0.0}, "must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    config = TuneConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=words):
        config.validate()


# ----------------------------------------------------------------------------- a search whose judge is known beforehand


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 episodes of 5 rows."""
    g = np.random.default_rng(0)
    ends = np.arange(300) % 5 == 4
    path = tmp_path / "log.npz"
    np.savez(
        path,
        observations=g.normal(size=(300, 3)).astype(np.float32),
        actions=g.uniform(-1, 1, (300, 2)).astype(np.float32),
        rewards=g.normal(size=300).astype(np.float32),
        terminals=np.zeros(300, bool),
        timeouts=ends,
        costs=(np.arange(300) % 7 == 0).astype(np.float32),
    )
    return path


@pytest.fixture
def landscape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained; the judge's estimate is known: best at temperature 1, a little noise that fades with
    training.
    """

    def train_all(work: Any, runs: Any, words: str, show: Any) -> dict[str, Any]:
        return {"runs": [r.directory.name for r in runs]}

    def policies_of(runs: Any) -> dict[tuple[str, int], Any]:
        found = {}
        for run in runs:
            count = len(run.replicas) // len(run.trials)
            for place, replica in enumerate(run.replicas):
                grid = {k.removeprefix("grid."): v for k, v in run.settings.items() if k.startswith("grid.")}
                fixed = {k.removeprefix("algo."): v for k, v in run.settings.items() if k.startswith("algo.")}
                values = {k: v[place // count] for k, v in grid.items()} or fixed
                found[run.trials[place // count], replica.seed] = (values["temperature"], run.settings["steps"])
        return found

    def judge(policies: Any, data: Any, methods: Any, *rest: Any) -> dict[str, Any]:
        rows = []
        for (setting, seed), (temperature, steps) in policies.items():
            noise = np.random.default_rng([seed, int(1000 * temperature)]).normal() / np.sqrt(steps)
            value = -(np.log(temperature) ** 2) + noise
            rows.append(
                {"setting": setting, "seed": seed, "distance": 0.1, "fqe": value, "fqe_sd": 0.01, "exploded": ""}
            )
        return {"methods": list(methods), "policies": rows, "discount": 0.99, "data": [0, 0, 0], "episodes": 30}

    monkeypatch.setattr(engine, "train_all", train_all)
    monkeypatch.setattr(engine, "policies_of", policies_of)
    monkeypatch.setattr(engine, "judge", judge)


def command(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "dataset": str(data),
        "algos": "iql",
        "budget": "16x64",
        "retrain": False,
        "quiet": True,
        "out": str(out),
        "env": "none",
        "proposer": "random",
        "algo.expectile": 0.7,
        "algo.hidden": [4],
        "rule": "best",
        **more,
    }


Run = Callable[..., dict[str, Any]]


def test_the_winner_is_the_setting_that_is_best(data: Path, landscape: None, tmp_path: Path) -> None:
    found = tune(command(data, tmp_path / "t"))
    trained = {n: s["values"]["temperature"] for n, s in found["settings"].items()}
    best = min(trained, key=lambda n: abs(np.log(trained[n])))
    assert found["chosen"]["setting"] == best
    assert found["brackets"] == [[[16, 16], [6, 64]]], "as trained, the wild card among them"
    assert found["updates"] == {"made": 2 * (16 * 16 + 6 * 48), "full": 2 * 16 * 64}
    final = [r for r in found["rows"] if r["rung"] == "final"]
    assert len(final) == 6, "four, a wild card, and one more so that programs are full"
    assert {r["fate"] for r in found["rows"] if r["rung"] == "1"} == {"kept", "wild card", "fills a program", "dropped"}
    lines = (tmp_path / "t" / "trials.csv").read_text().splitlines()
    assert len(lines) == 1 + 16 + 6
    assert tune(command(data, tmp_path / "t")) == found, "the same command comes to the same"


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["random", "tpe"])
def test_a_tune_that_is_killed_at_every_file_ends_like_one_that_was_not(
    proposer: str, data: Path, landscape: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if proposer == "tpe":
        pytest.importorskip("optuna")
    one = command(data, tmp_path / "one", proposer=proposer, bracket=8)
    whole = tune(one)
    write, kills = files.write_text, 0

    class Killed(BaseException):
        pass

    def files_of(folder: Path) -> dict[str, bytes]:
        kept = [
            p
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name not in ("timing.jsonl", "journal.log", ".lock")
        ]
        return {str(p.relative_to(folder)): p.read_bytes().replace(str(folder).encode(), b"OUT") for p in kept}

    other = {**one, "out": str(tmp_path / "two")}
    for after in range(40):
        left = [after % 3, after]

        def dying(path: Path, text: str, survivor: str = "", left: list[int] = left) -> None:
            if left[0] == 0 and left[1] < 30:
                raise Killed
            left[0] -= 1
            write(path, text, survivor)

        monkeypatch.setattr(files, "write_text", dying)
        try:
            assert tune(other) == whole
            break
        except Killed:
            kills += 1
            if proposer == "tpe" and (journal := tmp_path / "two" / "journal.log").exists() and after % 2:
                journal.write_bytes(journal.read_bytes() + b'{"op_co')
        finally:
            monkeypatch.setattr(files, "write_text", write)
    assert kills >= 4
    mine, theirs = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert mine.keys() == theirs.keys()
    assert {k for k in mine if mine[k] != theirs[k]} == set()


def test_a_folder_of_another_tune_is_refused(data: Path, landscape: None, tmp_path: Path) -> None:
    tune(command(data, tmp_path / "t"))
    with pytest.raises(UserError, match=r"holds another tune \(seeds: 2 there, 3 here\)"):
        tune(command(data, tmp_path / "t", seeds=3))
    changed = tmp_path / "other.npz"
    with np.load(data) as arrays:
        np.savez(changed, **{**arrays, "rewards": arrays["rewards"] + 1})
    with pytest.raises(UserError, match="holds another tune"):
        tune(command(changed, tmp_path / "t"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(it has letter.txt\)"):
        tune(command(data, tmp_path / "full"))


def test_resume_takes_the_settings_of_the_folder(data: Path, landscape: None, tmp_path: Path) -> None:
    found = tune(command(data, tmp_path / "t"))
    assert tune({"resume": str(tmp_path / "t"), "quiet": True}) == found
    with pytest.raises(UserError, match="seeds= cannot change with resume="):
        tune({"resume": str(tmp_path / "t"), "seeds": 5})
    with pytest.raises(UserError, match="holds no tune"):
        tune({"resume": str(tmp_path / "nowhere")})
    (tmp_path / "t" / "tune.json").write_text("{")
    with pytest.raises(UserError, match=r"tune.json cannot be read"):
        tune({"resume": str(tmp_path / "t")})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperture": 3}, "has no setting 'temperture'"),
        ({"algo.temperatur": 3}, "Did you mean 'temperature'"),
        ({"space.td3_bc.alpha": [1, 2]}, "td3_bc is none of the algorithms"),
        ({"algo.temperature": 3.0}, "nothing of iql is left to search"),
        ({"space.temperature": [1, 2], "algo.temperature": 3.0}, "are both given"),
        ({"dataset.split": 0.3}, "split= is the share"),
        ({"algos": "iqll"}, "iql"),
        ({"space.hidden": [[n] for n in range(2, 12)], "algo.hidden": None}, "programs, of which each is compiled"),
    ],
)
def test_words_that_do_not_fit_are_refused_before_anything_is_trained(
    more: dict[str, Any], words: str, data: Path, landscape: None, tmp_path: Path
) -> None:
    values = {k: v for k, v in command(data, tmp_path / "t", **more).items() if v is not None}
    with pytest.raises(UserError, match=words):
        tune(values)


def test_a_data_set_of_one_episode_judges_nothing(landscape: None, tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    path = tmp_path / "one.npz"
    np.savez(
        path,
        observations=g.normal(size=(50, 3)).astype(np.float32),
        actions=g.uniform(-1, 1, (50, 2)).astype(np.float32),
        rewards=np.ones(50, np.float32),
        terminals=np.zeros(50, bool),
        timeouts=np.arange(50) == 49,
    )
    with pytest.raises(UserError, match=r"leaves a part of the 1 episodes"):
        tune(command(path, tmp_path / "t"))


# ----------------------------------------------------------------------------------------------------------- judgements


def test_a_judge_that_is_too_short_is_said_with_the_number_of_offrl_select() -> None:
    settings = OPEConfig(updates=39_999)
    assert short_fit(settings, ["fqe"]).startswith("updates=39,999 is too few") and "the first 40,000" in short_fit(
        settings, ["fqe"]
    )
    assert short_judge(settings, ["fqe"], False).startswith("ope.updates=39,999 is too few")
    assert not short_judge(settings, ["wis", "q"], True) and not short_judge(OPEConfig(updates=40_000), ["fqe"], False)
    assert short_judge(OPEConfig(updates=40_000), ["fqe"], True).startswith("half of ope.updates=20,000 is too few")
    assert not short_judge(OPEConfig(), ["fqe", "lstd"], True)


def test_the_error_of_an_estimate_pools_seeds_and_adds_the_fits() -> None:
    rows = [
        {"setting": "a", "seed": 0, "fqe": 1.0, "fqe_draws": [0.0, 2.0], "distance": 0.1, "exploded": ""},
        {"setting": "a", "seed": 1, "fqe": 3.0, "fqe_draws": [2.0, 4.0], "distance": 0.3, "exploded": ""},
        {"setting": "b", "seed": 0, "fqe": 5.0, "fqe_draws": [5.0, 5.0], "distance": 0.2, "exploded": "beyond rewards"},
        {"setting": "b", "seed": 1, "fqe": 5.0, "fqe_draws": [5.0, 5.0], "distance": 0.2, "exploded": ""},
    ]
    s = summarise({"methods": ["fqe"], "policies": rows}, ["a", "b", "c"], [0, 1])
    assert s.value[:2].tolist() == [2.0, 5.0] and np.isnan(s.value[2]), "a setting without any policy is NaN"
    # variance over seeds 2 and 0, pooled 1, of two seeds 0.5; the fits' means over seeds 1 and 3: variance 2
    assert s.error[:2].tolist() == pytest.approx([np.sqrt(0.5 + 2.0), np.sqrt(0.5)])
    assert s.worst[:2].tolist() == [1.0, 5.0] and s.exploded == ("", "beyond rewards", "")
    assert s.criteria(["return", "distance"])[0].tolist() == pytest.approx([2.0, -0.2])


def test_reported_seeds_and_episodes_are_none_of_those_that_chose(data: Path, tmp_path: Path) -> None:
    work = plan.prepare(command(data, tmp_path / "t"))
    assert not set(work.seeds) & set(work.final_seeds)
    starts = (plan.RETRAINED, plan.TRUTH, plan.PLAYED)
    assert all(abs(a - b) >= 1_000_000 for i, a in enumerate(starts) for b in starts[:i]), (
        "ranges of reset seeds that never meet"
    )
    assert json.loads((tmp_path / "t" / "tune.json").read_text())["given"]["budget"] == "16x64"


Costs = Callable[[float], float]


def with_costs(monkeypatch: pytest.MonkeyPatch, of: Costs) -> None:
    """The landscape's judge says costs, too: `of` a temperature, with a standard error of 0.1 of each fit."""
    plain = engine.judge

    def judge(policies: Any, *rest: Any) -> dict[str, Any]:
        assert rest[-1] is True
        record = plain(policies, *rest)
        for row, (temperature, _) in zip(record["policies"], policies.values(), strict=True):
            row |= {"cost": of(temperature), "cost_sd": 0.1}
        return record

    monkeypatch.setattr(engine, "judge", judge)


LIMITED = {"criteria": ["return", "cost"], "budget": "5x64", "proposer": "grid", "space.temperature": [0.2, 0.5, 1, 2]}


def test_the_best_return_of_those_that_keep_the_limit(
    data: Path, landscape: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Returns are best at temperature 1, and costs 10 times the temperature: 0.5 keeps a limit of 5.5, 1 does not."""
    with_costs(monkeypatch, lambda temperature: 10.0 * temperature)
    found = tune(command(data, tmp_path / "t", **LIMITED, rungs=1, cost_limit=5.5))
    chosen = found["chosen"]
    assert found["settings"][chosen["setting"]]["values"] == {"temperature": 0.5}
    assert chosen["why"] == "the largest estimate of what keeps the limit of 5.5 (2 of 5 finalists)"
    assert chosen["cost"] == pytest.approx([5.0, 5.0 - 0.1 * 1.959964, 5.0 + 0.1 * 1.959964])
    temperatures = {n: s["values"]["temperature"] for n, s in found["settings"].items()}
    assert [temperatures[n] for n in chosen["unsafe"]] == [1.0, 2.0, 3.0], "the nearest first"
    fates = {temperatures[r["setting"]]: r["fate"] for r in found["rows"]}
    assert fates == {0.5: "chosen", 0.2: "finalist", **dict.fromkeys((1.0, 2.0, 3.0), "may break the limit")}
    assert [r["cost"] for r in found["rows"] if r["setting"] == chosen["setting"]] == [5.0]
    assert "An episode of the choice costs 5 [4.804, 5.196] by fitted Q" in capsys.readouterr().out
    page = (tmp_path / "t" / "index.html").read_text()
    assert "keeps 5.5" in page and "3 finalists may break the limit" in page
    assert "The Pareto front: 3 finalists of 5" in page, "2 and 3 cost more than 1 and earn less"
    again = tune({"resume": str(tmp_path / "t"), "quiet": True})
    assert again == found


def test_where_none_keeps_the_limit_the_nearest_is_named(
    data: Path, landscape: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_costs(monkeypatch, lambda temperature: 10.0 * temperature)
    found = tune(command(data, tmp_path / "t", **LIMITED, cost_limit=1.5))
    assert found["settings"][found["chosen"]["setting"]]["values"] == {"temperature": 0.2}, "thinned out by the limit"
    assert found["chosen"]["why"] == "no finalist keeps the limit of 1.5, and it comes nearest"


def test_a_limit_needs_costs(data: Path, tmp_path: Path) -> None:
    with np.load(data) as arrays:
        np.savez(bare := tmp_path / "bare.npz", **{k: v for k, v in arrays.items() if k != "costs"})
    with pytest.raises(UserError, match="criteria=cost needs costs, and bare has none: name their column"):
        tune(command(bare, tmp_path / "t", **LIMITED, cost_limit=5))
    played = {"episodes": 4, "env": "Pendulum-v1", "judge": ["episodes"], "rungs": 1}
    with pytest.raises(UserError, match="Pendulum-v1 does not say what a step costs"):
        tune(command(bare, tmp_path / "t", **LIMITED | played, cost_limit=5))


def test_a_space_that_is_used_up_ends_the_search(data: Path, landscape: None, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = tune(command(data, tmp_path / "t", **{"space.temperature": [0.5, 1, 2, 3, 4]}, proposer="tpe", bracket=8))
    assert len(found["settings"]) == 5 and found["chosen"]["setting"] in found["settings"]
    assert found["settings"][found["chosen"]["setting"]]["values"] == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": "evil.py:Env"}, "evil"),
        ({"dataset.reward_labels": "evil.py:label"}, "dataset.reward_labels"),
        ({"iql.actor_network": "evil.py:Net"}, "actor_network"),
        ({"algo.actor_network": "evil.py:Net"}, "actor_network"),
        ({"out": "${oc.env:HOME}"}, "interpolation"),
    ],
)
def test_a_strangers_tune_names_no_code(
    change: dict[str, str], words: str, data: Path, landscape: None, tmp_path: Path
) -> None:
    tune(command(data, tmp_path / "t"))
    path = tmp_path / "t" / "tune.json"
    record = json.loads(path.read_text())
    record["given"] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=words):
        tune({"resume": str(tmp_path / "t"), "quiet": True})


def test_a_strangers_proposals_hold_what_is_searched_alone(data: Path, landscape: None, tmp_path: Path) -> None:
    tune(command(data, tmp_path / "t"))
    path = tmp_path / "t" / "state" / "bracket-0.json"
    record = json.loads(path.read_text())
    record["settings"]["iql-00"][1]["actor_network"] = "evil.py:Net"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="other settings than are searched"):
        tune({"resume": str(tmp_path / "t"), "quiet": True})
