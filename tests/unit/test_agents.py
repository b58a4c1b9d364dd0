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
from offrl.interop.sb3 import Actor, actor_from

sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
SMALL = {"policy_kwargs": {"net_arch": [16, 12]}, "device": "cpu", "seed": 0}
OFF = {**SMALL, "buffer_size": 50}


def load(path: object, env: str | gym.Env) -> object:
    env = gym.make(env) if isinstance(env, str) else env
    box = isinstance(env.action_space, gym.spaces.Box)
    dim, size = int(np.prod(env.observation_space.shape)), env.action_space.shape[0] if box else 0
    (agent,) = load_agents(str(path), observation_dim=dim, action_dim=size, discrete=not box).values()
    return agent


def actor(model: object, env: gym.Env) -> Actor:
    """As `offrl collect` has it."""
    box = isinstance(env.action_space, gym.spaces.Box)
    low, high = (env.action_space.low, env.action_space.high) if box else (None, None)
    return actor_from(model.policy.state_dict(), low=low, high=high, discrete=not box, where="it")


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


@pytest.mark.parametrize("algorithm", ["SAC", "PPO"])
def test_continuous_actions_are_sb3s_own(algorithm: str) -> None:
    model = getattr(sb3, algorithm)("MlpPolicy", Wide(), **copy.deepcopy(OFF if algorithm == "SAC" else SMALL))
    for p in model.policy.parameters():  # an untrained head gives nearly the same action everywhere
        p.data.mul_(3.0)
    same(actor(model, Wide()), model, Wide.observation_space)


def test_discrete_choices_are_sb3s_own() -> None:
    env = gym.make("CartPole-v1")
    model = sb3.PPO("MlpPolicy", env, **copy.deepcopy(SMALL))
    for p in model.policy.parameters():
        p.data.mul_(3.0)
    agent = actor(model, env)
    same(agent, model, env.observation_space)
    observations = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    with torch.no_grad():
        _, theirs, _ = model.policy.evaluate_actions(torch.as_tensor(observations), torch.as_tensor(actions))
    np.testing.assert_allclose(log, theirs.numpy(), atol=1e-6)


def test_noise_is_that_of_sb3_and_the_log_density_is_right() -> None:
    """The density of SAC's actions in the environment's range: SB3's, in [-1, 1], over the range's half width."""
    model = sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF))
    agent = actor(model, Wide())
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


def refuses(path: object, env: str | gym.Env, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load(path, env)
    for word in words:
        assert word in str(error.value), error.value


def test_a_zip_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "SAC.zip").write_bytes(b"x")
    refuses(tmp_path / "SAC.zip", Wide(), "SAC.load('SAC.zip')", "FILE.py:act")
    refuses(tmp_path / "n.zip", Wide(), "no policy", "SAC.zip")


def test_a_function_that_calls_a_model_of_sb3(tmp_path: Path) -> None:
    """That of docs/coming-from/stable-baselines3.md: its noise is decided by the seed."""
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "stable-baselines3.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("sac.zip", str(tmp_path / "sac.zip"))
    (tmp_path / "sac.py").write_text(code)
    model = sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF))
    model.save(tmp_path / "sac")
    agent = load(f"{tmp_path}/sac.py:act", Wide())
    same(agent, model, Wide.observation_space)
    observations = np.zeros((3, 4), np.float32)
    first, again, other = (
        one.step(one.start(3), observations, 0, explore=True)[0] for one in (agent, agent, reseeded(agent, 7))
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_python_policies(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef act(observations, rng): return np.zeros((len(observations), 3))\ndef "
        "noisy(observations, rng, explore=False): return rng.normal(size=(len(observations), 3)) * explore\ndef "
        "short(observations, rng): return np.zeros(3)[:1]\ndef broken(observations, rng): return undefined\nclass "
        "Walker:\n    def start(self, episodes): return episodes\n    def step(self, carry, observations, t): return "
        "np.full((len(observations), 3), t), carry\nwalker = Walker()\nseveral = {'a': act, 'b': walker}\nnumber = 3\n"
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
