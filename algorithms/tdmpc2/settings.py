"""Settings of TD-MPC2, and of the pessimism that is ours for data without an environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offrl.algorithm import Grid
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.nn.simnorm import GROUP
from offrl.settings.field import defaults, setting
from offrl.world_models.planning import MPPISettings, check_plan, check_plan_memory

BINS = 101  # of rewards and values


@dataclass
@defaults(plan_horizon=3, plan_population=256, plan_elites=64, plan_iterations=6)
class TDMPC2Config(MPPISettings):
    """Settings of TD-MPC2; the defaults are its authors' for 5M parameters, but where the help gives theirs: that is
    our pessimism.
    """

    name: str = "tdmpc2"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    encoder_rate: float = setting(0.3, "the encoder's learning rate, as a share of the others'", low=0.0)
    clip_norm: float = setting(
        20.0, "largest norm of the gradient of encoder, model and critics together, and of the policy's", above=0.0,
        structural=True
    )  # fmt: skip
    batch_size: int = setting(256, "windows in a batch", low=1)
    discount: float | None = setting(
        None,
        "discount factor; null: 1 - 5 / T, at least 0.95 and at most 0.995, T the most steps of an episode",
        low=0.0,
        high=1.0,
    )
    discounts: list[float] = setting(
        [], "that of each of several tasks, by the most steps of its episodes", filled=True
    )
    polyak: float = setting(
        0.01, "share of the online critics that enters their targets in each update, and of a batch's spread of values "
              "that enters the scale", low=0.0, high=1.0,
    )  # fmt: skip
    horizon: int = setting(3, "steps that latents are predicted ahead while the model learns", low=1)
    rho: float = setting(0.5, "weight of a loss, for each step ahead", low=0.0, high=1.0)
    consistency_weight: float = setting(20.0, "weight of the squared error of predicted latents", low=0.0)
    reward_weight: float = setting(0.1, "weight of the loss of rewards", low=0.0)
    value_weight: float = setting(0.1, "weight of the critics' loss", low=0.0)
    termination_weight: float = setting(1.0, "weight of the loss of terminals", low=0.0)
    entropy_weight: float = setting(1e-4, "weight of the policy's entropy against scaled values", low=0.0)
    episodic: bool | None = setting(None, "learn where episodes end in terminals; null: where the data have some")
    encoder_hidden: list[int] = setting([256], "widths of the encoder's hidden layers", low=1)
    hidden: list[int] = setting([512, 512], "widths of the hidden layers of all other networks", low=1)
    latent: int = setting(512, f"numbers of a latent state, a multiple of {GROUP}", low=GROUP)
    critics: int = setting(5, "how many critics", low=1)
    critic_dropout: float = setting(
        0.01, "dropout rate of the critics' first layers while they and the policy learn", low=0.0, high=0.99,
        structural=True
    )  # fmt: skip
    target_critics: int = setting(
        0, "targets take the smallest value of so many critics, drawn for each batch; 0: all (TD-MPC2: 2)", low=0
    )
    bc_weight: float = setting(
        1.0,
        "weight of the policy's squared distance from the data's actions, in units in which 1 is TD3+BC's (TD-MPC2: 0)",
        low=0.0,
    )
    planning: bool = setting(True, "act by planning around the policy; false: by the policy alone", acting=True)
    plan_start: str = setting(
        "policy",
        "plans are drawn around the policy's own, or around the previous step's, shifted (TD-MPC2)",
        choices=("policy", "previous"),
        acting=True,
    )
    plan_proposals: int = setting(
        64, "of the plans tried, those that the policy draws (TD-MPC2: 24)", low=0, acting=True
    )
    plan_distance_weight: float = setting(
        1.0,
        "weight of a plan's squared distance from the policy's actions, in units in which 1 is TD3+BC's (TD-MPC2: 0)",
        low=0.0,
        acting=True,
    )
    plan_temperature: float = setting(
        5.0, "inverse temperature of the elites' weights in units of returns (TD-MPC2: 0.5)", low=0.0, acting=True
    )


def check_settings(config: TDMPC2Config, action_dim: int) -> None:
    """Raise UserError for settings that contradict one another, or that only data decide where there are none."""
    if config.planning:
        check_plan(config)
        check_plan_memory(config, action_dim, max(config.latent, *config.hidden, BINS))
    if config.discount is None or config.episodic is None:
        raise UserError(
            "without data nothing says how long episodes are and whether they end in terminals: set algo.discount "
            "(1 - 5 / T for T steps) and algo.episodic=true or false"
        )
    if config.latent % GROUP:
        raise UserError(f"algo.latent={config.latent} is no multiple of {GROUP}, the numbers of a simplex of SimNorm")
    if config.target_critics > config.critics:
        raise UserError(f"algo.target_critics={config.target_critics} is more than algo.critics={config.critics}")
    if config.planning and config.plan_proposals > config.plan_population:
        raise UserError(
            f"algo.plan_proposals={config.plan_proposals} is more than algo.plan_population={config.plan_population}"
        )


def fitted(config: TDMPC2Config, dataset: Dataset, grid: Grid = None) -> TDMPC2Config:
    """`config` with what the data decide: the discount, of several tasks each one's, and whether ends are learnt."""
    task, longest = dataset.spec.task, int(dataset.episode_lengths().max())
    steps = (task.max_episode_steps if task else None) or longest
    if task is not None and task.parts and config.discount is None and "discount" not in (grid or {}):
        config = replace(config, discounts=[discount_for(count) for count in steps_by_task(dataset)])
        steps = max(steps_by_task(dataset))
    return replace(
        config,
        discount=discount_for(steps) if config.discount is None else config.discount,
        episodic=bool(dataset.columns["terminations"].any()) if config.episodic is None else config.episodic,
    )


def steps_by_task(dataset: Dataset) -> list[int]:
    """The most steps of an episode of each task of multi-task data: its limit, or else the longest of the data."""
    assert dataset.spec.task is not None
    number = dataset.columns["observations"][dataset.episode_start, -1]
    lengths = dataset.episode_lengths()
    return [
        part.task.max_episode_steps or max(lengths[number == k].tolist(), default=1)
        for k, part in enumerate(dataset.spec.task.parts)
    ]


def discount_for(steps: int) -> float:
    """The discount factor of episodes of at most so many steps: (T/5 - 1) / (T/5) within [0.95, 0.995]."""
    return min(max(1.0 - 5.0 / steps, 0.95), 0.995)
