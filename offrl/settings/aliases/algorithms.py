"""What people call algorithms: another spelling, the name in the paper or in another library, and what offrl does not
have.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# spelled as `plain` leaves them
OTHER_NAMES = {
    "behaviorcloning": "bc",
    "behaviourcloning": "bc",
    "behavioralcloning": "bc",
    "anybc": "bc",
    "imitation": "bc",
    "10bc": "percent_bc",
    "bc10": "percent_bc",
    "top10bc": "percent_bc",
    "filteredbc": "percent_bc",
    "fbc": "percent_bc",
    "implicitqlearning": "iql",
    "conservativeqlearning": "cql",
    "calibratedql": "cal_ql",
    "calibratedqlearning": "cal_ql",
    "fasttd3": "fast_td3",
    "biggerregularizedcategorical": "brc",
    "td3plusbc": "td3_bc",
    "minimalistoffline": "td3_bc",
    "advantageweightedactorcritic": "awac",
    "decisiontransformer": "dt",
    "elasticdecisiontransformer": "edt",
    "qlearningdecisiontransformer": "qdt",
    "trajectorytransformer": "tt",
    "valueguideddecisiontransformer": "vadt",
    "metadecisiontransformer": "meta_dt",
    "decisionpretrainedtransformer": "dpt",
    "extremeqlearning": "xql",
    "diffusionpolicy": "diffusion_bc",
    "diffusionbc": "diffusion_bc",
    "flowmatching": "flow_bc",
    "flowbc": "flow_bc",
    "actionchunkingtransformer": "act",
    "actionchunkingwithtransformers": "act",
    "forwardbackward": "fb",
    "quasimetricrl": "qrl",
    "contrastiverl": "crl",
    "worldmodel": "dynamics",
    "ensembledynamics": "dynamics",
    "probabilisticensemble": "dynamics",
    "dualrl": "recoil",
    "rvsr": "rvs",
    "rvsg": "rvs",
    "sacn": "sac_n",
    "sac_n": "sac_n",
    "simbav2bc": "simba_bc",
    "proximalpolicyoptimization": "ppo",
    "proximalpolicyoptimisation": "ppo",
}
# what people ask for that is not here, and what is nearest in kind
NOT_HERE = {
    "bcq": "iql or td3_bc, which also stay near the data's actions",
    "bear": "iql, td3_bc or rebrac, which also stay near the data's actions",
    "brac": "rebrac, its successor, or td3_bc",
    "plas": "iql or diffusion_bc",
    "crr": "awac or iql, which also clone actions by their advantage",
    "prdc": "rebrac or td3_bc",
    "tacr": "dt or rebrac",
    "por": "iql or hiql",
    "sql": "xql or iql",
    "eql": "xql or iql",
    "idql": "iql or diffusion_bc",
    "dql": "diffusion_bc or iql",
    "sac": "sac_n with algo.critics=2, which is SAC on logged data; SAC in an environment is what offrl collect trains",
    "td3": "td3_bc; from an environment alone, offrl collect trains SAC",
    "ddpg": "td3_bc",
    "dqn": "iql, bc or cql, some of which take discrete actions: offrl list",
    "doubledqn": "iql, bc or cql, some of which take discrete actions: offrl list",
    "simba": "simbav2, its successor",
    "a2c": "ppo, which learns from what it plays: offrl finetune algo=ppo env=ID",
    "gail": "bc or recoil, which imitate from data",
    "dreamer": "mopo, mobile or pets, which learn in or plan with a model",
    "coplanner": "mbpo with algo.candidates=5, whose exploration is COPlanner's",
}


def plain(name: str) -> str:
    """Lower case, without what spellings differ in: `TD3+BC`, `td3-bc` and `Td3_bc` are `td3bc`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def meant(name: str, known: Collection[str]) -> str | None:
    """The one of `known` that `name` is another spelling or another library's name of, or None."""
    short = plain(name)
    by_spelling = {plain(k): k for k in known}
    for text in (
        short,
        short.removeprefix("algo"),
        short.removeprefix("discrete"),
        short.removesuffix("config"),
        short.removesuffix("agent"),
    ):
        if text in by_spelling:
            return by_spelling[text]
        if OTHER_NAMES.get(text) in known:
            return OTHER_NAMES[text]
    return None


def instead(name: str) -> str:
    """` It is not here; ...` for an algorithm that offrl does not have, or an empty text."""
    return f" offrl does not have it; nearest in kind: {NOT_HERE[plain(name)]}." if plain(name) in NOT_HERE else ""
