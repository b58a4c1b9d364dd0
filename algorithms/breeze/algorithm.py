"""BREEZE, behaviour-regularised zero-shot RL with expressive networks (NeurIPS 2025): a forward-backward representation
whose actions stay those of the data. Details as in the authors' code; differences are listed in docs/zero-shot.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Adam, Carry, Loss, Params, TrainState, Tree, Update
from offrl.algorithms.breeze.implicit_reward import implicit_reward
from offrl.algorithms.breeze.networks import AttentiveBackward, AttentiveForward
from offrl.algorithms.breeze.settings import BreezeConfig
from offrl.data.samplers.transitions import NEXT_ACTIONS, Batch, Sampler, TransitionSampler
from offrl.families.forward_backward import ZeroShot, ZeroShotActor, measure, measure_loss, orthonormality_loss
from offrl.nn import diffusion
from offrl.nn.diffusion import Denoiser
from offrl.nn.representations.forward_backward import Backward, Forward, NormTanhMLP, Representation
from offrl.registry import register

SCHEDULE = "vp"
ACTOR_WEIGHT_DECAY = 0.01  # AdamW's, as in the authors' code


class BreezeActor(ZeroShotActor):
    """The best of `acting_samples`. Greedily their noise is the same at all times, so that the action depends on the
    state alone.
    """

    algorithm: Breeze

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        samples, z = self.algorithm.config.acting_samples, self.task(carry, observations)
        key = key if explore else rng.make_key(0, observations.device)
        return self.algorithm.best(self.state, observations, z, samples, key, shared_noise=not explore), carry


@register("algo", "breeze")
class Breeze(ZeroShot[BreezeConfig]):
    """FB whose policy is a diffusion model that clones the data's actions, weighted by their advantage, and whose Q
    also obeys the Bellman equation of the reward that z stands for, with V an expectile of Q over the data's
    actions."""

    actor_class = BreezeActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        obs, actions, z = s.observation_dim, s.action_dim, c.z_dim
        representation = (
            Representation(
                AttentiveForward(obs, actions, z, c.inputs_hidden, c.hidden),
                AttentiveBackward(obs, z, c.width, c.layers, c.feed_forward),
            )
            if c.attention
            else Representation(
                Forward(obs, actions, z, c.inputs_hidden, c.hidden), Backward(obs, z, c.backward_hidden)
            )
        )
        return {
            "actor": Denoiser(obs + z, actions, c.actor_hidden, c.embedding // 2 * 2, learned=True),
            "representation": representation,
            "value": NormTanhMLP(obs + z, c.value_hidden, 1),
        }

    def sampler(self) -> Sampler:
        return TransitionSampler((NEXT_ACTIONS,) if self.config.data_share > 0.0 else ())

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "value":
            return Adam(c.value_learning_rate, beta2=0.99, weight_decay=c.weight_decay)
        adam = super().optimizer(name)
        if name == "actor":
            return Adam(adam.learning_rate, weight_decay=ACTOR_WEIGHT_DECAY, clip_value=adam.clip_value)
        return Adam(adam.learning_rate, beta2=0.99, weight_decay=c.weight_decay, clip_value=adam.clip_value)

    def extra(self, params: dict[str, Params]) -> Tree:
        return {**super().extra(params), "average": {name: value.clone() for name, value in params["actor"].items()}}

    # ---- actions

    def draw(
        self, actor: Params, observations: Tensor, z: Tensor, count: int, key: Tensor, shared_noise: bool = False
    ) -> Tensor:
        """`count` actions for each row, [count, B, A]. shared_noise: all rows from the same noise."""
        rows, steps = observations.shape[0], self.config.denoising_steps
        condition = torch.cat([observations.flatten(1), z], -1)
        condition = condition.expand(count, *condition.shape).flatten(0, 1)
        keys = rng.split(key, steps + 1)

        def noise(t: int) -> Tensor:
            sample = rng.normal(keys[t], (count, 1 if shared_noise else rows, self.spec.action_dim))
            return sample.expand(-1, rows, -1).flatten(0, 1)

        def predict(noisy: Tensor, step: Tensor) -> Tensor:
            return self.apply("actor", actor, noisy, step, condition)

        return diffusion.reverse_process(predict, noise(steps), noise, steps, SCHEDULE).unflatten(0, (count, rows))

    def best(
        self, state: TrainState, observations: Tensor, z: Tensor, count: int, key: Tensor, shared_noise: bool = False
    ) -> Tensor:
        """The action of the largest Q among `count` that are drawn for each row: [B, A]."""
        actions = self.draw(state.extra["average"], observations, z, count, key, shared_noise)
        if count == 1:
            return actions[0]
        rows = [x.flatten(1) if x.ndim > 2 else x for x in (observations, z)]
        inputs = [x.expand(count, *x.shape).flatten(0, 1) for x in rows]
        q = (
            self.q(state.params["representation"], inputs[0], actions.flatten(0, 1), inputs[1])
            .amin(0)
            .unflatten(0, (count, -1))
        )
        index = q.argmax(0).view(1, -1, 1).expand(1, -1, actions.shape[-1])
        return actions.gather(0, index).squeeze(0)

    def next_actions(self, state: TrainState, batch: Batch, z: Tensor, key: Tensor) -> Tensor:
        """Actions at s', [B, A]: drawn from the policy, or a share of them the data's."""
        draw_key, share_key = rng.split(key)
        actions = self.best(state, batch["next_observations"], z, self.config.samples, draw_key)
        if not self.config.data_share:
            return actions
        from_data = rng.uniform(share_key, (len(actions), 1)) < self.config.data_share
        return torch.where(from_data, batch[NEXT_ACTIONS], actions)

    # ---- learning

    def v(self, value: Params, observations: Tensor, z: Tensor) -> Tensor:
        """V(s, z) [B]."""
        return self.apply("value", value, torch.cat([observations.flatten(1), z], -1)).squeeze(-1)

    def representation_loss(self, params: Params, state: TrainState, batch: Batch, z: Tensor, actions: Tensor) -> Loss:
        """FB's loss, and reward_weight E (r_z + gamma V(s', z) - F(s, a, z) . z)^2 / 2 for both F, r_z the reward that
        z stands for.

        actions [B, A]: the next ones.
        """
        c = self.config
        target = self.target_measure(state, batch, actions, z)
        f = self.forward_map(params, batch["observations"], batch["actions"], z)
        b = self.backward_map(params, batch["next_observations"])
        m = measure(f, b)
        bellman, orthonormality = measure_loss(m, target, c.discount * batch["masks"]), orthonormality_loss(b)
        q = (f * z).sum(-1)
        next_v = self.v(state.params["value"], batch["next_observations"], z)
        reward = implicit_reward(b, z)
        error = q - losses.td_target(reward, batch["masks"], c.discount, next_v)
        regression = 0.5 * error.square().mean(-1).sum()
        loss = bellman + c.orthonormality * orthonormality + c.reward_weight * regression
        metrics = {
            "fb/measure_loss": bellman,
            "fb/orthonormality": orthonormality,
            "fb/measure": m.mean(),
            "fb/q": q.mean(),
        }
        return loss, {**metrics, "fb/reward_loss": regression, "fb/implicit_reward": reward.mean(), "fb/loss": loss}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, z: Tensor) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2, Q = min F(s, a, z) . z."""
        q = self.q(state.params["representation"], batch["observations"], batch["actions"], z).amin(0)
        v = self.v(value, batch["observations"], z)
        loss = losses.expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, z: Tensor, key: Tensor) -> Loss:
        """E exp(alpha (Q - V)) |noise - predicted noise|^2, summed over the action's dimensions."""
        c, actions = self.config, batch["actions"]
        observations = batch["observations"].flatten(1)
        q = self.q(state.params["representation"], observations, actions, z).amin(0)
        advantage = q - self.v(state.params["value"], observations, z)
        weight = losses.advantage_weight(advantage, c.temperature)
        noisy, step, noise = diffusion.noised(actions, c.denoising_steps, rng.split(key), SCHEDULE)
        prediction = self.apply("actor", actor, noisy, step, torch.cat([observations, z], -1))
        loss = (weight * (prediction - noise).square().sum(-1)).mean()
        return loss, {"actor/loss": loss, "actor/weight": weight.mean(), "actor/advantage": advantage.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys = rng.split(key, 3)
        z = self.draw_z(state, batch, keys[0])
        initial, next_actions = state, self.next_actions(state, batch, z, keys[1])
        state, metrics = self.descend(state, "representation", self.representation_loss, batch, z, next_actions)
        # V regresses on the Q of before, as in the code, where one pass serves both
        value_state, value = self.descend(initial, "value", self.value_loss, batch, z)
        state = state._replace(
            params={**state.params, "value": value_state.params["value"]},
            opt={**state.opt, "value": value_state.opt["value"]},
        )
        state, actor = self.descend(state, "actor", self.actor_loss, batch, z, keys[2])
        state = self.polyak(state, "representation")
        average = diffusion.update_average(
            state.extra["average"], state.params["actor"], state.step, self.config.actor_polyak
        )
        return state.with_extra(average=average), {**metrics, **value, **actor}
