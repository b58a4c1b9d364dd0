"""Policies from elsewhere: Stable-Baselines3's zips without unpickling, and users' Python."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from offrl.errors import UserError
from offrl.interop.policies import load_agents, reseeded

sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
POLICIES = Path(os.environ.get("OFFRL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "policies"
SMALL = {"policy_kwargs": {"net_arch": [16, 12]}, "device": "cpu", "seed": 0}
OFF = {**SMALL, "buffer_size": 50}


def load(path: object, env: str | gym.Env) -> object:
    env = gym.make(env) if isinstance(env, str) else env
    box = isinstance(env.action_space, gym.spaces.Box)
    low, high = (env.action_space.low, env.action_space.high) if box else (None, None)
    dim = int(np.prod(env.observation_space.shape))
    (agent,) = load_agents(str(path), observation_dim=dim, action_low=low, action_high=high, discrete=not box).values()
    return agent


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
    model.save(tmp_path / "m")
    same(load(tmp_path / "m.zip", Wide()), model, Wide.observation_space)


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN"])
def test_discrete_choices_are_sb3s_own(algorithm: str, tmp_path: Path) -> None:
    model = getattr(sb3, algorithm)("MlpPolicy", "CartPole-v1", **copy.deepcopy(OFF if algorithm == "DQN" else SMALL))
    for p in model.policy.parameters():
        p.data.mul_(3.0)
    model.save(tmp_path / "m")
    same(load(tmp_path / "m.zip", "CartPole-v1"), model, gym.make("CartPole-v1").observation_space)


@pytest.mark.skipif(not POLICIES.is_dir(), reason=f"needs {POLICIES}")
@pytest.mark.parametrize("name", ["sac-Hopper-v3", "tqc-Hopper-v3", "sac-HalfCheetah-v3", "tqc-HalfCheetah-v3"])
def test_zoo_zips_act_as_sb3s_own_actor(name: str) -> None:
    """Their `data` is of gym's time and cannot be unpickled today: the actor is SB3's, with the zip's tensors."""
    import io

    from stable_baselines3.sac.policies import SACPolicy

    env = gym.make(name.split("-")[1] + "-v5")
    tensors = torch.load(
        io.BytesIO(zipfile.ZipFile(POLICIES / f"{name}.zip").read("policy.pth")), weights_only=True, map_location="cpu"
    )
    policy = SACPolicy(env.observation_space, env.action_space, lambda _: 1e-3)
    policy.load_state_dict({k: v for k, v in tensors.items() if k.startswith("actor.")}, strict=False)
    same(load(POLICIES / f"{name}.zip", env), policy, env.observation_space)


def test_noise_is_that_of_sb3_and_the_log_density_is_right(tmp_path: Path) -> None:
    """The density of SAC's actions in the environment's range: SB3's, in [-1, 1], over the range's half width."""
    model = sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF))
    model.save(tmp_path / "m")
    agent = load(tmp_path / "m.zip", Wide())
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
    model.save(tmp_path / "m")
    agent = load(tmp_path / "m.zip", "CartPole-v1")
    observations = np.zeros((20000, 4), np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    greedy = agent.act(observations[:1])[0][0]
    assert abs((actions == greedy).mean() - 0.85) < 0.01
    np.testing.assert_allclose(np.exp(log), np.where(actions == greedy, 0.85, 0.15), atol=1e-6)
    ppo = sb3.PPO("MlpPolicy", "CartPole-v1", **copy.deepcopy(SMALL))
    ppo.save(tmp_path / "p")
    agent = load(tmp_path / "p.zip", "CartPole-v1")
    observations = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    actions, log = agent.act(observations, np.random.default_rng(0))
    with torch.no_grad():
        _, theirs, _ = ppo.policy.evaluate_actions(torch.as_tensor(observations), torch.as_tensor(actions))
    np.testing.assert_allclose(log, theirs.numpy(), atol=1e-6)


def edit(path: Path, change: object, drop: str = "") -> None:
    """Rewrite a zip with `change` made to its JSON, without the member `drop`."""
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist() if n != drop}
    data = json.loads(members["data"])
    change(data)
    members["data"] = json.dumps(data).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, blob in members.items():
            archive.writestr(name, blob)


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

    sb3.PPO("CnnPolicy", Pictures(), device="cpu").save(tmp_path / "cnn")
    refuses(tmp_path / "cnn.zip", Wide(), "images", "file.py:name")
    sb3.A2C("MultiInputPolicy", Named(), device="cpu").save(tmp_path / "dict")
    refuses(tmp_path / "dict.zip", Wide(), "Dict")
    path = tmp_path / "m.zip"

    def fresh() -> None:
        sb3.SAC("MlpPolicy", Wide(), **copy.deepcopy(OFF)).save(path)

    fresh()
    edit(path, lambda d: d["policy_class"].update(__module__="my.policies"))
    refuses(path, Wide(), "my.policies")
    fresh()
    edit(path, lambda d: d["policy_kwargs"].update(activation_fn="<class 'my.Snake'>"))
    refuses(path, Wide(), "Snake")
    fresh()
    edit(path, lambda d: d["policy_kwargs"].update(features_extractor_class="<class 'my.Net'>"))
    refuses(path, Wide(), "my.Net")
    fresh()
    edit(path, lambda d: None, drop="policy.pth")
    refuses(path, Wide(), "policy.pth")
    fresh()
    path.write_bytes(path.read_bytes()[:2000])
    refuses(path, Wide(), "damaged")
    fresh()
    refuses(path, "Pendulum-v1", "observations of 4 numbers", "have 3")
    refuses(path, "CartPole-v1", "continuous")
    (tmp_path / "vecnormalize.pkl").write_bytes(b"x")
    refuses(path, Wide(), "np.savez")
    refuses(tmp_path / "vecnormalize.pkl", Wide(), "np.savez")
    refuses(tmp_path / "n.zip", Wide(), "no policy", "cnn.zip")


def test_no_code_in_a_zip_is_run(tmp_path: Path) -> None:
    """policy.pth as a pickle that would create a file when loaded."""
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (open, (str(mark), "w"))

    torch.save({"actor.mu.weight": Evil()}, tmp_path / "policy.pth")
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.write(tmp_path / "policy.pth", "policy.pth")
    refuses(tmp_path / "m.zip", Wide(), "nothing is unpickled")
    assert not mark.exists()


def test_vecnormalize_arrays_are_used(tmp_path: Path) -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env = VecNormalize(DummyVecEnv([Wide]), clip_obs=2.0)
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, -2, 3, 0]), np.array([4.0, 1, 9, 0.25])
    model = sb3.PPO("MlpPolicy", env, **copy.deepcopy(SMALL))
    for p in model.policy.parameters():
        p.data.mul_(3.0)
    model.save(tmp_path / "m")
    np.savez(
        tmp_path / "vecnormalize.npz",
        mean=env.obs_rms.mean,
        var=env.obs_rms.var,
        epsilon=env.epsilon,
        clip_obs=env.clip_obs,
    )
    observations = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    expected = model.predict(env.normalize_obs(observations), deterministic=True)[0]
    agent = load(tmp_path / "m.zip", Wide())
    np.testing.assert_allclose(agent.step(None, observations, 0)[0], expected, atol=1e-5)


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
    both = load_agents(f"{place}:several", observation_dim=4, action_low=None, action_high=None, discrete=False)
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
