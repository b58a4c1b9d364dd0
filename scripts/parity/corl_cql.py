"""CORL's CQL and Cal-QL (corl-team/CORL)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parity.align import rows_first
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    Ours,
    Outcome,
    batches,
    case,
    fill,
    imported,
    linears,
    pair_layers,
    shared_noise,
)
from parity.corl import ABSENT, COMMIT, CORL, adam, columns, fill_critics, pair, pair_critics

ACTIONS = 4  # for each state and source


def conservative(
    checkout: Path, name: str, module: str, kind: str, extra: tuple[str, ...] = (), **settings: Any
) -> Outcome:
    """CQL or Cal-QL. settings: ours; `action_gap` switches the multiplier on."""
    ours = Ours(name, actions=ACTIONS, conservative_weight=5.0, actor_learning_rate=1e-4, **settings)
    outcome, gap, config = Outcome(), settings.get("action_gap"), ours.algorithm.config
    with imported(checkout, module, ABSENT) as corl:
        actor = corl.TanhGaussianPolicy(OBSERVATION, ACTION, 1.0, log_std_multiplier=1.0, orthogonal_init=True).double()
        first, second = (corl.FullyConnectedQFunction(OBSERVATION, ACTION, True, 3) for _ in range(2))
        fill(linears(actor), ours.mlp("actor"))
        fill_critics(ours, first, second)
        reference = getattr(corl, kind)(
            first,
            adam(first, rate=3e-4),
            second,
            adam(second, rate=3e-4),
            actor,
            adam(actor, rate=1e-4),
            target_entropy=-float(ACTION),
            discount=0.99,
            backup_entropy=config.entropy_in_target,
            policy_lr=1e-4,
            qf_lr=3e-4,
            bc_steps=0,
            cql_n_actions=ACTIONS,
            cql_importance_sample=config.importance,
            cql_lagrange=gap is not None,
            cql_target_action_gap=gap or 0.0,
            cql_alpha=5.0,
            cql_max_target_backup=config.max_target_actions > 1,
        )
    reference.log_alpha.double()
    reference.log_alpha_prime.double()
    returns = {name: (lambda g: g.normal(size=BATCH)) for name in extra}
    for batch in batches(**returns):
        with shared_noise(), rows_first(BATCH, ACTIONS, ACTION):
            losses, expected = ours.update(batch), reference.train(columns(batch, *extra))
        penalty = expected["cql_min_qf1_loss"] + expected["cql_min_qf2_loss"]
        outcome.losses.append(
            {
                "critic": (losses["critic/loss"], expected["qf1_loss"] + expected["qf2_loss"]),
                "penalty": (losses["cql/penalty"], penalty),
                "actor": (losses["actor/loss"], expected["policy_loss"]),
                "alpha": (losses["entropy/weight"], expected["alpha"]),
            }
        )
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor)) | pair_critics(ours, first, second)
    params = ours.state.params
    outcome.parameters["alpha"] = pair(params["entropy"]["log"], reference.log_alpha.constant)
    outcome.parameters["scale"] = pair(params["actor"]["scale"], actor.log_std_multiplier.constant)
    outcome.parameters["shift"] = pair(params["actor"]["shift"], actor.log_std_offset.constant)
    if gap is not None:
        outcome.parameters["multiplier"] = pair(params["lagrange"]["log"], reference.log_alpha_prime.constant)
    return outcome


@case("cql", CORL, COMMIT)
def cql(checkout: Path) -> Outcome:
    return conservative(checkout, "cql", "algorithms.offline.cql", "ContinuousCQL")


@case("cql, lagrange", CORL, COMMIT)
def cql_lagrange(checkout: Path) -> Outcome:
    return conservative(
        checkout, "cql", "algorithms.offline.cql", "ContinuousCQL", action_gap=0.8, entropy_in_target=True
    )


@case("cql, max_target_actions and no importance", CORL, COMMIT)
def cql_maximum(checkout: Path) -> Outcome:
    return conservative(
        checkout, "cql", "algorithms.offline.cql", "ContinuousCQL", max_target_actions=ACTIONS, importance=False
    )


@case("cal_ql", CORL, COMMIT, remains="initial weights: CQL's here, orthogonal of gain 1.41 throughout there")
def cal_ql(checkout: Path) -> Outcome:
    return conservative(checkout, "cal_ql", "algorithms.finetune.cal_ql", "CalQL", ("returns_to_go",))
