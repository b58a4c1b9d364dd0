"""Encoders inside each network (encoder.trained_by=own): what they see, what trains them, what targets hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset
from offrl.encoding import encoded_update
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.nn.encoders.own import EncodedLayer
from tests.unit.test_streams import SLOW, data, make, trained

FORM = {"frames": 2, "encoder": "drq"}


def own(fusion: str = "late", **changes: Any) -> Dataset:
    dataset = data(**FORM)
    assert dataset.spec.encoder is not None
    settings = dataclasses.replace(dataset.spec.encoder, trained_by="own", fusion=fusion, **changes)
    return dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=settings))


@pytest.mark.parametrize("fusion", ["late", "early"])
@pytest.mark.parametrize("name", SLOW)
def test_each_network_trains_its_own(name: str, fusion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = own(fusion)
    if name in ("act", "brc", "diffusion_bc", "diffusion_ql", "dtql", "encoder", "idql", "sharsa", "simbav2"):
        with pytest.raises(UserError, match=rf"trained_by=own: not every network of {name} is .* leave it out"):
            make(name, dataset)
        return
    algorithm = make(name, dataset)
    encoded = EncodedLayer.encoded

    def checked(self: EncodedLayer, x: Tensor) -> Tensor:
        """Pixels are whole numbers, which actions, noise and times are not."""
        observations = self.raw.split(x.unflatten(-1, (self.count, -1)))
        pixels = observations["front"].flatten()
        while torch._C._functorch.is_functorch_wrapped_tensor(pixels):
            pixels = torch._C._functorch.get_unwrapped(pixels)
        assert bool((pixels == pixels.round()).all()) and 0.0 <= float(pixels.min()) < float(pixels.max()) <= 255.0
        return encoded(self, x)

    before = algorithm.init(0)
    with monkeypatch.context() as patched:
        patched.setattr(EncodedLayer, "encoded", checked)
        alone = trained(algorithm, dataset, [0], 2)
    both = trained(algorithm, dataset, [0, 1], 2)
    encoders = [(m, k) for m, params in before.params.items() for k in params if ".encoder." in k]
    assert {m for m, _ in encoders} >= set(before.params) - {"encoder", "entropy"}
    assert not before.params["encoder"]
    for module, key in encoders:
        assert not torch.equal(alone.params[module][key][0], before.params[module][key]), (module, key)
        torch.testing.assert_close(alone.params[module][key][0], both.params[module][key][0], rtol=0, atol=2e-3)
    for module in before.target:
        assert before.target[module].keys() == before.params[module].keys()


class Reference:
    """OGBench's GCIQL (arXiv 2410.20092, its code's impls/agents/gciql.py) with an encoder of state and goal in each
    network, written with autograd and torch's Adam.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.c = algorithm, algorithm.config
        state = algorithm.init(0)
        self.params = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in state.params.items() if p}
        self.target = {k: v.clone() for k, v in state.target["critic"].items()}
        self.adam = {n: torch.optim.Adam(p.values(), lr=self.c.learning_rate) for n, p in self.params.items()}

    def net(self, name: str, p: dict[str, Tensor], s: dict[str, Tensor], g: dict[str, Tensor], *more: Tensor) -> Tensor:
        module, prefix = self.algorithm.networks[name], "net." if name == "actor" else ""
        first = module.get_submodule(f"{prefix}layers.0")
        at = f"{prefix}layers.0.encoder."
        encoder = {k.removeprefix(at): v for k, v in p.items() if k.startswith(at)}
        images = torch.cat([s["front"], g["front"]], -1)  # channels: two frames of the state, two of the goal
        vectors = torch.cat([s["vector"], g["vector"]], -1)
        z = functional_call(first.encoder, encoder, ({"vector": vectors, "front": images},))  # type: ignore[arg-type]
        x = torch.cat([z, *more], -1)
        weight, bias = (p[f"{prefix}layers.0.layer.{k}"] for k in ("weight", "bias"))
        y = F.gelu(x @ weight + bias if name == "critic" else F.linear(x, weight, bias), approximate="tanh")
        if name != "actor":
            y = F.layer_norm(y, y.shape[-1:], eps=1e-6)
            scale, shift = ("scales.0", "shifts.0") if name == "critic" else ("norms.0.weight", "norms.0.bias")
            y = y * p[scale] + p[shift]
        weight, bias = (p[f"{prefix}head.{k}"] for k in ("weight", "bias"))
        return (y @ weight + bias if name == "critic" else F.linear(y, weight, bias)).squeeze(-1)

    def update(self, batch: dict[str, Any]) -> None:
        s, a, next_s = (batch[k] for k in ("observations", "actions", "next_observations"))
        g, actor_g = batch["value_goals"], batch["actor_goals"]
        critic, value, actor = (self.params[n] for n in ("critic", "value", "actor"))
        frozen = {k: v.detach() for k, v in critic.items()}
        v, next_v = self.net("value", value, s, g), self.net("value", value, next_s, g).detach()
        gap = self.net("critic", self.target, s, g, a).amin(0) - v
        value_loss = (torch.where(gap < 0, 1 - self.c.expectile, self.c.expectile) * gap**2).mean()
        target = batch["successes"] - 1 + self.c.discount * (1 - batch["successes"]) * next_v
        critic_loss = ((self.net("critic", critic, s, g, a) - target) ** 2).sum(0).mean()
        mean = self.net("actor", actor, s, actor_g)
        log_prob = (-0.5 * (a - mean) ** 2 - 0.5 * math.log(2 * math.pi)).sum(-1)
        q = self.net("critic", frozen, s, actor_g, mean.clamp(-1, 1)).amin(0)
        actor_loss = -q.mean() / q.abs().mean().detach() - self.c.bc_weight * log_prob.mean()
        for name, loss in (("value", value_loss), ("critic", critic_loss), ("actor", actor_loss)):
            gradients = torch.autograd.grad(loss, list(self.params[name].values()))
            for p, gradient in zip(self.params[name].values(), gradients, strict=True):
                p.grad = gradient
        self.target = {k: p + self.c.polyak * (frozen[k] - p) for k, p in self.target.items()}
        for adam in self.adam.values():
            adam.step()


def test_two_updates_of_gciql_are_those_of_its_formulas() -> None:
    dataset = own("early", shift=0)
    algorithm = make("gciql", dataset)
    reference, state = Reference(algorithm), algorithm.init(0)
    sampler = algorithm.sampler()
    source = sampler.prepare(dataset)
    algorithm.runtime.alone = True
    for i in range(2):
        batch: Any = sampler(source, rng.make_key(i), 16)
        state = torch.no_grad()(encoded_update)(algorithm, state, batch, rng.make_key(i), phase=0)[0]
        reference.update(batch)
    for name, params in {**reference.params, "target": reference.target}.items():
        found = state.target["critic"] if name == "target" else state.params[name]
        for key, value in params.items():
            # where a gradient is nearly nothing, Adam's first steps are as large as their rounding is
            wrong = (found[key] - value.detach()).abs() > 2e-6
            assert wrong.float().mean() < 1e-3, f"{name} {key}: {int(wrong.sum())} of {wrong.numel()}"


@pytest.mark.parametrize("fusion", ["late", "early"])
def test_a_policy_acts_by_the_encoder_of_its_network(tmp_path: Path, fusion: str) -> None:
    algorithm = make("gciql", own(fusion))
    state = algorithm.init(0)
    seen = [
        {"state": torch.full((2,), float(i)).numpy(), "front": data().stores["front"].values[i].numpy()} for i in (0, 9)
    ]
    policy = TrainedPolicy(algorithm, state, 0)
    policy.save(tmp_path / "policy")
    loaded = TrainedPolicy.load(tmp_path / "policy")
    streams = [
        {"vector": torch.full((1, 2), float(i)), "front": torch.from_numpy(s["front"]).repeat(1, 1, 2)[None]}
        for i, s in zip((0, 9), seen, strict=True)
    ]
    mean = Reference(algorithm).net("actor", state.params["actor"], *streams) if fusion == "early" else None
    for p in (policy, loaded):
        action = torch.from_numpy(p.act(seen[0], goal=seen[1]))
        assert action.shape == (2,)
        if mean is not None:
            torch.testing.assert_close(action, mean[0].detach().clamp(-1, 1), rtol=0, atol=1e-5)


def test_parts_of_an_ensemble_keep_its_encoder() -> None:
    """A random subset of critics, the first of them, and bounds of singular values."""
    dataset = own()
    for name, settings in (
        ("sac_n", {"critics": 3, "target_critics": 2, "spectral_norm": 2.0}),
        ("edac", {"critics": 3, "compared_critics": 2}),
    ):
        algorithm = make(name, dataset)
        algorithm = type(algorithm)(dataclasses.replace(algorithm.config, **settings), dataset.spec)
        state = trained(algorithm, dataset, [0], 1)
        assert all(bool(v.isfinite().all()) for v in state.params["critic"].values())


def test_networks_start_from_a_pretrained_encoder() -> None:
    dataset, trained_together = own(), data(**FORM)
    first = make("bc", trained_together).init(0).params["encoder"]
    kind = type(make("gciql", dataset))
    config = make("gciql", dataset).config
    random, state = (kind(config, dataset.spec, pretrained).init(0) for pretrained in (None, {"encoder": first}))
    for module in ("actor", "critic", "value"):
        for key, value in state.params[module].items():
            _, part, name = key.partition(".encoder.")
            assert torch.equal(value, first[name] if part else random.params[module][key])
    assert torch.equal(state.target["critic"]["layers.0.encoder.trunk.0.weight"], first["trunk.0.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1e-3}, r"encoder.learning_rate= is of one encoder .* not with encoder.trained_by=own"),
        ({"trained_by": "auto", "fusion": "early"}, r"fusion=early is .*: encoder.trained_by=own"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    dataset = own()
    assert dataset.spec.encoder is not None
    changed = dataclasses.replace(dataset.spec.encoder, **settings)
    with pytest.raises(UserError, match=message):
        make("iql", dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=changed)))
