"""Settings of recurrent latent models, and of imagination in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offrl.data.dataset import Dataset
from offrl.errors import UserError, warn
from offrl.settings.field import setting

SMALL_REWARD = 0.01  # mean size


@dataclass
class LatentConfig:
    """Settings of a recurrent latent model and of imagination in it; the defaults are DreamerV3's for vectors (its
    size1m), but where the help gives its value: that is our pessimism.
    """

    learning_rate: float = setting(4e-5, "LaProp's learning rate", low=0.0)
    warmup_steps: int = setting(1000, "updates in which the learning rate rises from 0", low=0)
    adaptive_clip: float = setting(
        0.3, "largest norm of each tensor's gradient, as a share of the tensor's own", above=0.0
    )
    batch_size: int = setting(16, "windows in a batch", low=1)
    length: int = setting(64, "states of a window", low=2)
    burn_in: int = setting(
        0, "first states of a window that only fill the memory: neither learnt from nor begun at (ours)", low=0
    )
    discount: float = setting(1.0 - 1.0 / 333.0, "discount factor", low=0.0, high=1.0)
    core: str = setting(
        "gru",
        "the recurrent network: gated units in blocks, or layers of Mamba-2 (Drama), whose posterior sees the "
        "observation alone, so that all states of a window are computed at once",
        choices=("gru", "scan"),
    )
    recurrent_width: int = setting(512, "numbers of the recurrent state", low=1)
    blocks: int = setting(
        8, "blocks of the recurrent network (heads of the scan), of which none reads another's state", low=1
    )
    scan_layers: int = setting(2, "core=scan: layers", low=1)
    scan_states: int = setting(16, "core=scan: numbers that are kept of each of twice recurrent_width", low=1)
    latents: str = setting(
        "classes",
        "what a latent sample is made of: classes of several groups (DreamerV2), or normal numbers (PlaNet, DreamerV1)",
        choices=("classes", "gaussian"),
    )
    groups: int = setting(32, "latents=classes: categorical variables of a latent state", low=1)
    classes: int = setting(4, "latents=classes: values of each of them", low=2)
    latent: int = setting(30, "latents=gaussian: numbers of a latent sample", low=1)
    width: int = setting(64, "width of all other layers", low=1)
    depth: int = setting(
        4, "images: unit of the channels of the encoder dreamer and of the decoder (DreamerV3's size12m: 16)", low=1
    )
    objective: str = setting(
        "reconstruction",
        "what trains the model beside rewards and terminations: reconstruction of observations (DreamerV3), a "
        "bottleneck of what it sees of them (RePo), to tell observations apart, and actions from what changed "
        "(InfoPower), or nothing: a probe reconstructs observations, which trains the decoder alone",
        choices=("reconstruction", "bottleneck", "information", "none"),
    )
    dynamics_weight: float = setting(1.0, "weight of the KL divergence that trains the prior", low=0.0)
    representation_weight: float = setting(
        0.1, "weight of the KL divergence that trains the posterior, beside that which trains the prior", low=0.0
    )
    free_bits: float = setting(
        1.0,
        "objective=reconstruction|information|none: a state's KL divergence below this, in nats, trains nothing",
        low=0.0,
    )
    free_bits_of: str = setting(
        "state",
        "objective=reconstruction|information|none: whether that bound is of each state, or of the mean over a batch "
        "(DreamerV2)",
        choices=("state", "mean"),
    )
    unimix: float = setting(
        0.01,
        "latents=classes: share of the uniform distribution in each categorical (DreamerV2: 0)",
        low=0.0,
        high=1.0,
    )
    kl_limit: float = setting(
        3.0, "objective=bottleneck: largest mean KL divergence of posterior and prior, in nats a state", low=0.0
    )
    kl_weight: float = setting(
        1e-5,
        "objective=bottleneck: weight of the KL divergence at the start, which rises while it is above its limit",
        above=0.0,
    )
    multiplier_learning_rate: float = setting(
        1e-4,
        "objective=bottleneck|information: Adam's rate for the logarithm of kl_weight or contrast_weight",
        low=0.0,
    )
    contrast_limit: float = setting(
        2.0, "objective=information: largest mean contrastive loss, in nats a state (ours)", low=0.0
    )
    contrast_weight: float = setting(
        1.0,
        "objective=information: weight of the contrastive loss at the start, which rises while it is above its limit",
        above=0.0,
    )
    horizon: int = setting(5, "imagined steps from each state of a batch (DreamerV3: 15)", low=1)
    decay: float = setting(0.95, "decay of later values in an imagined return (lambda)", low=0.0, high=1.0)
    polyak: float = setting(0.02, "share of the critic that enters its slow copy in each update", low=0.0, high=1.0)
    members: int = setting(
        5, "heads that predict the next latent state, of which each step uses one (DreamerV3: 1)", low=1
    )
    penalty: float = setting(
        1.0,
        "of members=2 or more: their disagreement, in the units of penalty_unit, times this is "
        "subtracted from imagined rewards (ours, after Offline DreamerV2; DreamerV3: 0)",
        low=0.0,
    )
    penalty_unit: str = setting(
        "mean",
        "members>1: unit of the disagreement: its mean over the data's states (ours), or one, as Offline DreamerV2's",
        choices=("mean", "one"),
    )
    model_updates: int = setting(
        0, "updates after which the model stays as it is, and actor and critic go on; 0: never (DreamerV3)", low=0
    )


def check_settings(config: LatentConfig) -> None:
    """Raise UserError for settings that contradict one another."""
    if config.length - config.burn_in < 2:
        raise UserError(
            f"algo.length={config.length} leaves fewer than 2 states after algo.burn_in={config.burn_in}: take a "
            "longer window, or less burn-in"
        )
    if config.recurrent_width % config.blocks:
        raise UserError(f"algo.recurrent_width={config.recurrent_width} is no multiple of algo.blocks={config.blocks}")
    if config.objective == "bottleneck" and config.dynamics_weight == config.representation_weight == 0.0:
        raise UserError("algo.objective=bottleneck needs algo.dynamics_weight or algo.representation_weight above 0")


def check_data(config: LatentConfig, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None) -> None:
    """Warn of rewards too small for a bottleneck. Raises UserError for data without rewards, and for a penalty that
    nothing measures.
    """
    if not bool(dataset.columns["rewards"].any()):
        raise UserError(
            f"{dataset.spec.name}: all rewards are 0, so that no imagined step is better than another; "
            "dataset.reward_labels=... gives some"
        )
    if config.objective == "bottleneck":
        warn_of_small_rewards(dataset)
    if config.members == 1 and any((grid or {}).get("penalty", (config.penalty,))):
        raise UserError("algo.penalty needs heads that can disagree: algo.members=5, say")


def warn_of_small_rewards(dataset: Dataset) -> None:
    """Warn where rewards are so small that the model need not see anything to tell them."""
    size = float(dataset.columns["rewards"].abs().mean())
    if size < SMALL_REWARD:
        scale = float(f"{1.0 / size:.1g}")
        warn(
            f"{dataset.spec.name}: rewards of a mean size of {size:.1g} are worth little beside the divergence that "
            f"algo.objective=bottleneck keeps small: multiply dataset.reward_scale by {scale:g}"
        )
