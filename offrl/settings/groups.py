"""Groups of the settings that many algorithms share: `critic_hidden` is `algo.critic.hidden`. Imports nothing heavy.

The settings themselves are flat; a group is how commands, lists and pages name them. Those in no group are the paper's
own, or are chosen for every run, such as `batch_size`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

# group -> its content
CONTENT = {
    "critic": "networks that estimate values",
    "actor": "the policy's network and its training",
    "entropy": "the weight of the policy's entropy",
    "cost": "how a limit of costs is kept",
    "network": "layers that all networks of an algorithm share",
    "optimizer": "learning rates and gradients",
    "model": "the world model and the rollouts in it",
    "plan": "plans that are made when acting",
    "goals": "the goals that values and policies are trained on",
    "lora": "adapters of a language model",
    "generation": "how a language model writes actions",
}
# group -> its settings by their flat names, in the order of lists
GROUPS = {
    "critic": (
        "critic_hidden critic_network critic_lm critic_learning_rate target_critics layer_norm critic_dropout "
        "spectral_norm lipschitz lipschitz_radius value_head value_bins value_quantiles value_range value_sigma "
        "value_min value_max value_bias value_hidden value_layers value_layer_norm value_learning_rate"
    ),
    "actor": (
        "actor_hidden actor_network actor_layer_norm actor_learning_rate actor_schedule actor_polyak actor_value"
    ),
    "entropy": (
        "entropy_weight max_entropy_weight target_entropy target_entropy_scale entropy_in_target entropy_learning_rate"
    ),
    "cost": "cost_horizon cost_discount cost_pessimism cost_after_end cost_states multiplier multiplier_rate",
    "network": (
        "hidden inputs_hidden backward_hidden width layers decoder_layers heads feed_forward depth blocks base "
        "multiples core recurrent_width scan_layers scan_states latents groups classes representation "
        "representation_horizon latent embedding max_timestep padding tokenizer activation init dropout residual "
        "layer_norm_epsilon norm_tanh"
    ),
    "optimizer": (
        "learning_rate schedule warmup_steps decay_steps weight_decay clip_norm gradient_limit gradient_norm "
        "adaptive_clip accumulate checkpointing"
    ),
    "model": (
        "members model_hidden model_dropout model_learning_rate model_steps rollouts rollout_every rollout_retain "
        "range_margin lookahead lookahead_penalty sample_dropout repeats dynamics_weight representation_weight "
        "free_bits free_bits_of unimix kl_limit contrast_limit contrast_weight"
    ),
    "plan": (
        "plan_horizon plan_every plan_context plan_max_length plan_iterations plan_population plan_elites "
        "plan_particles plan_members plan_start plan_proposals plan_action plan_alpha plan_discount "
        "plan_distance_weight plan_temperature plan_std_min plan_std_max"
    ),
    "goals": (
        "value_current value_trajectory value_random value_geometric "
        "actor_current actor_trajectory actor_random actor_geometric"
    ),
    "lora": "rank lora_alpha lora_layers",
    "generation": "decoding sampling_temperature action_tokens append_end legal",
}


def _short(name: str, group: str) -> str:
    """A setting's name in its group: `max_entropy_weight` is `max_weight` in `entropy`."""
    return "_".join(word for word in name.split("_") if word != group)


GROUPED = {name: f"{group}.{_short(name, group)}" for group, names in GROUPS.items() for name in names.split()}
FLAT = {grouped: name for name, grouped in GROUPED.items()}


def flat_name(name: str) -> str:
    """`algo.critic.hidden` as `algo.critic_hidden`, whatever stands before the group; a name without one as it is."""
    *prefix, group, last = ["", *name.split(".")]
    return ".".join([*prefix[1:], FLAT[f"{group}.{last}"]]) if f"{group}.{last}" in FLAT else name


def grouped_name(name: str) -> str:
    """`critic_hidden` as `critic.hidden`, and a setting of no group as it is."""
    return GROUPED.get(name, name)


def by_group(names: Iterable[str]) -> dict[str, list[str]]:
    """group -> those of the flat `names` in it, in the order of `GROUPS`; under "" those in none, in their own order.

    A group of one setting is none: it would only hide it.
    """
    remaining = dict.fromkeys(names)
    groups = {group: [name for name in members.split() if name in remaining] for group, members in GROUPS.items()}
    groups = {group: members for group, members in groups.items() if len(members) > 1}
    for name in itertools.chain(*groups.values()):
        del remaining[name]
    return {"": [*remaining], **groups}
