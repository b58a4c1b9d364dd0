"""Behaviour cloning by a diffusion model of the action (DDPM: Ho et al., 2020, arXiv 2006.11239), which keeps apart
what the data do in one state at different times, where a mean would lie between. As the behaviour policy of MBRCSL's
code (arXiv 2310.19308); of chunks of actions as in Diffusion Policy (arXiv 2303.04137)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, Sampler, TrainState, Traits, Tree, Update
from offrl.data.samplers.chunks import VALID, ChunkSampler, valid_mean
from offrl.families.generative.chunks import ChunkActor, action_steps_field, length_field
from offrl.nn import diffusion
from offrl.nn.diffusion import Denoiser
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class DiffusionBCConfig:
    """Settings of diffusion behaviour cloning; the defaults are those of MBRCSL's code but for the network, where its
    runs have a U-net, and the learning rate, which is constant here."""

    name: str = "diffusion_bc"
    learning_rate: float = setting(1e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(1e-6, "AdamW's decay of all parameters", low=0.0, structural=True)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    length: int = length_field(1)
    action_steps: int = action_steps_field()
    hidden: list[int] = setting([512, 512, 512], "widths of the residual blocks", low=1)
    denoising_steps: int = setting(10, "steps from noise to an action (T)", low=1, high=1000)
    embedding: int = setting(256, "width of the embedding of a denoising step", low=4)
    polyak: float = setting(
        1e-4, "rate at which the averaged network, which acts, follows the trained one; at first 9 / (10 + updates), "
              "where that is more",
        low=0.0, high=1.0,
    )  # fmt: skip
    greedy: str = setting(
        "mean",
        "acting without exploration, as when scored: mean: all noise is 0, which ends near the heaviest mode; sample: "
        "an action is drawn",
        choices=("mean", "sample"),
    )


class DiffusionActor(ChunkActor):
    """Policy that denoises actions, or chunks of them, with the averaged network."""

    algorithm: DiffusionBC

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        noise = key if explore or self.algorithm.config.greedy == "sample" else None
        chunk = self.algorithm.denoise(self.state.extra["average"], observations, noise)
        return chunk.unflatten(1, (self.algorithm.config.length, -1))


@register("algo", "diffusion_bc")
class DiffusionBC(Algorithm[DiffusionBCConfig]):
    """Learn to predict the noise in a noisy action, or in a noisy chunk of actions; act by denoising one."""

    traits = Traits(actions=("continuous",), observations="encoded")
    actor_class = DiffusionActor

    @property
    def width(self) -> int:
        """D: numbers in a chunk."""
        return int(self.config.length) * self.spec.action_dim

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {"actor": Denoiser(s.observation_dim, self.width, c.hidden, c.embedding // 2 * 2)}

    def sampler(self) -> Sampler:
        return ChunkSampler(self.config.length) if self.config.length > 1 else super().sampler()

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.learning_rate, weight_decay=self.config.weight_decay)

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"average": {name: value.clone() for name, value in params["actor"].items()}}

    # ---- learning

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |e - eps(sqrt(abar_t) a + sqrt(1 - abar_t) e, t, s)|^2 over actions or chunks a, steps t and noise e
        (equation 14).
        """
        actions = batch["actions"].flatten(1)
        noisy, step, noise = diffusion.noised(actions, self.config.denoising_steps, rng.split(key))
        error = (self.apply("actor", actor, noisy, step, batch["observations"]) - noise).square()
        chunked = self.config.length > 1  # what lies after the episode's end does not count
        loss = valid_mean(error.unflatten(1, (self.config.length, -1)), batch[VALID]) if chunked else error.mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = self.descend(state, "actor", self.actor_loss, batch, key)
        average = diffusion.update_average(
            state.extra["average"], state.params["actor"], state.step, self.config.polyak
        )
        return state.with_extra(average=average), metrics

    # ---- acting

    def denoise(self, actor: Params, observations: Tensor, key: Tensor | None) -> Tensor:
        """Actions or chunks [B, D] in [-1, 1] for observations [B, O], from noise (arXiv 2006.11239, algorithm 2);
        None: all of it is 0.

        The action that each step predicts is cut off at the range, as in the appendix's code.
        """
        steps, shape = self.config.denoising_steps, (observations.shape[0], self.width)
        keys = None if key is None else rng.split(key, steps + 1)
        x = observations.new_zeros(shape) if keys is None else rng.normal(keys[steps], shape)

        def guess(noisy: Tensor, step: Tensor) -> Tensor:
            return self.apply("actor", actor, noisy, step, observations)

        return diffusion.reverse_process(
            guess, x, None if keys is None else (lambda t: rng.normal(keys[t], shape)), steps
        )
