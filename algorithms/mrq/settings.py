"""Settings of MR.Q, and of the cloning that is ours for data without an environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offrl.data.dataset import Dataset
from offrl.settings.field import setting


@dataclass
class MRQConfig:
    """Settings of MR.Q; the defaults are its authors', but where the help gives theirs."""

    name: str = "mrq"
    learning_rate: float = setting(3e-4, "AdamW's learning rate for critics and policy", low=0.0)
    encoder_learning_rate: float = setting(1e-4, "AdamW's learning rate for the encoders and the model", low=0.0)
    weight_decay: float = setting(1e-4, "AdamW's weight decay, of all networks", low=0.0, structural=True)
    clip_norm: float = setting(20.0, "largest norm of the critics' gradient; 0: any", low=0.0, structural=True)
    batch_size: int = setting(256, "windows in a batch", low=1)
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    n_step: int = setting(3, "targets sum the rewards of so many steps of the data before they bootstrap", low=1)
    horizon: int = setting(5, "steps that latents are predicted ahead while the encoders learn", low=1)
    target_every: int = setting(
        250, "updates between two copies of all targets, each followed by so many updates of the encoders", low=1
    )
    reward_weight: float = setting(0.1, "weight of the loss of rewards against that of latents", low=0.0)
    termination_weight: float = setting(0.1, "weight of the loss of terminals", low=0.0)
    episodic: bool | None = setting(None, "learn where episodes end in terminals; null: where the data have some")
    policy_noise: float = setting(0.2, "standard deviation of the target action's noise", low=0.0)
    noise_clip: float = setting(0.3, "largest target noise", low=0.0)
    output_weight: float = setting(1e-5, "weight of the policy's squared outputs before tanh", low=0.0)
    bc_weight: float = setting(
        0.25,
        "weight of the policy's squared distance from the data's actions, in units in which 1 is TD3+BC's (MR.Q: 0)",
        low=0.0,
    )
    hidden: list[int] = setting([512, 512], "widths of all networks' hidden layers; critics repeat the last", low=1)
    latent: int = setting(512, "numbers of a latent state, and of one with an action", low=1)
    action_latent: int = setting(256, "numbers that the encoder makes of an action", low=1)


def fitted(config: MRQConfig, dataset: Dataset) -> MRQConfig:
    """`config` that says whether the data have terminals."""
    ends = bool(dataset.columns["terminations"].any()) if config.episodic is None else config.episodic
    return replace(config, episodic=ends)
