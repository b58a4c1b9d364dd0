"""Policies from elsewhere: models of Stable-Baselines3, and users' Python."""

from __future__ import annotations

import copy
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from offrl.errors import UserError
from offrl.interop.policies import load_agents, reseeded

sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
SMALL = {"policy_kwargs": {"net_arch": [16, 12]}, "device": "cpu", "seed": 0}
OFF = {**SMALL, "buffer_size": 50}


def load(path: object, env: str | gym.Env) -> object:
    env = gym.make(env) if isinstance(env, str) else env
    box = isinstance(env.action_space, gym.spaces.Box)
    dim, size = int(np.prod(env.observation_space.shape)), env.action_space.shape[0] if box else 0
    (agent,) = load_agents(str(path), observation_dim=dim, action_dim=size, discrete=not box).values()
    return agent


def loaded(model: object, folder: Path, env: str | gym.Env) -> object:
    """As a Python file of the user's loads it."""
    name = type(model).__name__
    model.save(folder / name)
    (folder / f"{name}.py").write_text(
        f"from stable_baselines3 import {name}\nmodel = {name}.load({str(folder / name)!r}, device='cpu')\n"
    )
    return load(f"{folder}/{name}.py:model", env)


def same(agent: object, model: object, space: gym.Space) -> None:
    """SB3's own deterministic actions, to 1e-5, on random observations."""
    observations = np.random.default_rng(0).normal(size=(64, *space.shape)).astype(np.float32)
    expected = model.predict(observations, deterministic=True)[0]
    actions, _ = agent.step(agent.start(64), observations, 0)
    assert actions.dtype == expected.dtype
    np.testing.assert_allclose(actions, expected, atol=1e-5, rtol=0)
    assert len(np.unique(np.round(expected, 3), axis=0)) > 1  # not all the same, for then nothing is compared


class Wide(gym.Env):
    """Actions of unlike ranges."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(np.array([-1, 0, -3], np.float32), np.array([1, 5, 2], np.float32))

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        return np.zeros(4, np.float32), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        return np.zeros(4, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [
        ("SAC", OFF),
        ("SAC", {**OFF, "policy_kwargs": {"activation_fn": torch.nn.ELU, "net_arch": {"pi": [8], "qf": [4]}}}),
        ("SAC", {**OFF, "use_sde": True}),
        ("TD3", OFF),
        ("DDPG", OFF),
        ("PPO", {**SMALL, "n_steps": 16, "batch_size": 8}),
        ("PPO", {**SMALL, "policy_kwargs": {"activation_fn": torch.nn.ReLU, "log_std_init": -1.0}}),
        ("A2C", {**SMALL, "use_sde": True}),
    ],
)
def test_continuous_actions_are_sb3s_own(algorithm: str, arguments: dict, tmp_path: Path) -> None:
    model = getattr(sb3, algorithm)("MlpPolicy", Wide(), **copy.deepcopy(arguments))  # SB3 writes to policy_kwargs
    for p in model.policy.parameters():  # an untrained head gives nearly the same action everywhere
        p.data.mul_(3.0)
    same(loaded(model, tmp_path, Wide()), model, Wide.observation_space)


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN"])
def test_discrete_choices_are_sb3s_own(algorithm: str, tmp_path: Path) -> None:
    model = getattr(sb3, algorithm)("MlpPolicy", "CartPole-v1", **copy.deepcopy(OFF if algorithm == "DQN" else SMALL))
    for p in model.policy.parameters():
        p.data.mul_(3.0)
    same(loaded(model, tmp_path, "CartPole-v1"), model, gym.make("CartPole-v1").observation_space)


def test_noise_is_that_of_sb3_and_the_log_density_is_right(tmp_path: Path) -> None:
    """The density of SAC's actions in the environment's range: SB3's, in [-1, 1], over the range's half width."""
    model = sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF))
    agent = loaded(model, tmp_path, Wide())
    observations = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    with torch.no_grad():
        obs = torch.as_tensor(observations)
        mean, log_std, _ = model.actor.get_action_dist_params(obs)
        scaled = torch.as_tensor(model.policy.scale_action(actions))
        theirs = model.actor.action_dist.proba_distribution(mean, log_std).log_prob(scaled)
    half = np.log((Wide.action_space.high - Wide.action_space.low) / 2).sum()
    np.testing.assert_allclose(log, theirs.numpy() - half, atol=1e-3)
    many, _ = agent.act(np.repeat(observations[:1], 20000, 0), np.random.default_rng(2))
    torch.manual_seed(0)
    others = model.predict(np.repeat(observations[:1], 20000, 0), deterministic=False)[0]
    np.testing.assert_allclose(many.mean(0), others.mean(0), atol=0.05)
    np.testing.assert_allclose(many.std(0), others.std(0), atol=0.05)
    other = reseeded(agent, 7)
    step = lambda a: a.step(a.start(5), observations, 0, explore=True)[0]  # noqa: E731
    assert np.array_equal(step(agent), step(agent)) and not np.array_equal(step(agent), step(other))


def test_choices_have_the_probabilities_they_claim(tmp_path: Path) -> None:
    model = sb3.DQN("MlpPolicy", "CartPole-v1", **copy.deepcopy(OFF))
    model.exploration_rate = 0.3
    agent = loaded(model, tmp_path, "CartPole-v1")
    observations = np.zeros((20000, 4), np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    greedy = agent.act(observations[:1])[0][0]
    assert abs((actions == greedy).mean() - 0.85) < 0.01
    np.testing.assert_allclose(np.exp(log), np.where(actions == greedy, 0.85, 0.15), atol=1e-6)
    ppo = sb3.PPO("MlpPolicy", "CartPole-v1", **copy.deepcopy(SMALL))
    agent = loaded(ppo, tmp_path, "CartPole-v1")
    observations = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    with torch.no_grad():
        _, theirs, _ = ppo.policy.evaluate_actions(torch.as_tensor(observations), torch.as_tensor(actions))
    np.testing.assert_allclose(log, theirs.numpy(), atol=1e-6)


def refuses(path: object, env: str | gym.Env, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load(path, env)
    for word in words:
        assert word in str(error.value), error.value


def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    class Pictures(Wide):
        observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)

    class Named(Wide):
        observation_space = gym.spaces.Dict({"a": Wide.observation_space})

    for model, name in (
        (sb3.PPO("CnnPolicy", Pictures(), device="cpu"), "NatureCNN"),
        (sb3.A2C("MultiInputPolicy", Named(), device="cpu"), "CombinedExtractor"),
    ):
        with pytest.raises(UserError, match=rf"{name}; only .* policy=file.py:name"):
            loaded(model, tmp_path, Wide())
    model = sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF))
    with pytest.raises(UserError, match=r"observations of 4 numbers.*have 3"):
        loaded(model, tmp_path, "Pendulum-v1")
    with pytest.raises(UserError, match="continuous"):
        loaded(model, tmp_path, "CartPole-v1")
    refuses(tmp_path / "SAC.zip", Wide(), "SAC.load('SAC.zip')", "FILE.py:model")
    refuses(tmp_path / "n.zip", Wide(), "no policy", "SAC.zip")


def test_python_policies(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def act(observations, rng): return np.zeros((len(observations), 3))\n"
        "def noisy(observations, rng, explore=False): return rng.normal(size=(len(observations), 3)) * explore\n"
        "def short(observations, rng): return np.zeros(3)[:1]\n"
        "def broken(observations, rng): return undefined\n"
        "class Walker:\n"
        "    def start(self, episodes): return episodes\n"
        "    def step(self, carry, observations, t): return np.full((len(observations), 3), t), carry\n"
        "walker = Walker()\n"
        "several = {'a': act, 'b': walker}\n"
        "number = 3\n"
    )
    place, obs = f"{tmp_path}/mine.py", np.ones((2, 4), np.float32)
    assert load(f"{place}:act", Wide()).step(None, obs, 0)[0].shape == (2, 3)
    noisy = load(f"{place}:noisy", Wide())
    assert not noisy.step(noisy.start(2), obs, 0)[0].any()
    first, other = (p.step(p.start(2), obs, 0, explore=True)[0] for p in (noisy, reseeded(noisy, 1)))
    assert first.any() and not np.array_equal(first, other)
    walker = load(f"{place}:walker", Wide())
    assert (walker.step(walker.start(2), obs, 5, explore=True)[0] == 5).all()
    both = load_agents(f"{place}:several", observation_dim=4, action_dim=3, discrete=False)
    assert list(both) == ["a", "b"]
    with pytest.raises(UserError, match="shape"):
        load(f"{place}:short", Wide()).step(None, obs, 0)
    with pytest.raises(UserError, match=r"mine\.py:5: NameError"):
        load(f"{place}:broken", Wide()).step(None, obs, 0)
    refuses(f"{place}:Walker", Wide(), "class", "walker = Walker()")
    refuses(f"{place}:number", Wide(), "int")
    refuses(f"{place}:walkr", Wide(), "walker")
    refuses(place, Wide(), "mine.py:NAME")
    refuses(f"{tmp_path}/mne.py:act", Wide(), "mine.py")
    refuses("no.such.module:act", Wide(), "no Python module")
