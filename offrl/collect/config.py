"""Settings of `offrl collect`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings.field import setting

RECIPES = ("d4rl", "ogbench", "near-real")
# from bad to good, then everything seen
SETS = ("random", "medium-replay", "medium", "medium-expert", "expert", "full-replay")
FORMATS = ("d4rl", "minari", "both")
KINDS = ("navigate", "stitch", "explore", "path", "play", "noisy")
FREE = ("format", "quiet", "name", "datasets")  # what may change when a folder is continued


@dataclass
class CollectConfig:
    """Settings of recording: the source, the amount, and the destination."""

    env: str = setting(
        "",
        "Gymnasium id of the environment, such as Hopper-v5 (OGBench: pointmaze-medium-v0, cube-single-v0)",
        shown="ID",
    )
    recipe: str = setting("", f"{', '.join(RECIPES)}; or give policy=", shown="d4rl|ogbench|near-real")
    policy: str = setting(
        "",
        "record from this policy: an SB3 zip, an offrl run or policy, file.py:name, package.module:name",
        shown="PATH",
    )
    out: str = setting("", "folder of this collection; the same command continues it", shown="collected/NAME")
    format: str = setting("d4rl", "d4rl: HDF5 files in `out`; minari: Minari datasets; both", choices=FORMATS)
    name: str = setting("", "namespace of the Minari ids, NAME/medium-v0", shown="offrl/ENV")
    seed: int = setting(0, "decides start states, actions and training", low=0)
    rows: int | None = setting(
        None, "rows of each set, rounded up to whole episodes; null: as many as `steps`, or 100,000", low=1
    )
    episodes: int | None = setting(
        None, "episodes in place of rows; with OGBench those for training, a tenth more for validation", low=1
    )
    datasets: list[str] = setting([], f"recipe=d4rl: which of {', '.join(SETS)}; []: all")
    quiet: bool = setting(False, "no progress")
    # recipe=d4rl
    steps: int | None = setting(
        None, "environment steps of training; null: 1,000,000 (discrete actions: 100,000)", low=1
    )
    algorithm: str = setting("auto", "auto: SAC, PPO for discrete actions", choices=("auto", "sac", "ppo"))
    medium: float = setting(
        1 / 3, "return of the medium policy, 0 the untrained one's, 1 the expert's", low=0.0, high=1.0, shown="0.333"
    )
    expert: str = setting(
        "last",
        "which snapshot is the expert: the last, or the one of the best measured return",
        choices=("last", "best"),
    )
    snapshot_every: int | None = setting(
        None, "steps between snapshots, which are measured and saved; null: 1% of steps, 250 at least", low=1
    )
    eval_episodes: int = setting(10, "episodes that measure each snapshot", low=1)
    # policy=
    explore: bool = setting(True, "act with the policy's own noise; false: greedily")
    noise: float = setting(
        0.0, "added to actions: Gaussian, in half widths of their range; discrete: probability of a random one", low=0.0
    )
    parallel: int = setting(
        16, "environments stepped side by side; decides, with the seed, what is recorded", low=1, high=1024
    )
    images: bool = setting(
        False, "record what render() shows beside the numbers, as the images 'pixels' of `dataset.observation_keys`"
    )
    size: list[int] = setting([64, 64], "height and width of such images, each pixel the mean of what it covers")
    camera: str = setting("", "camera of such images (MuJoCo); empty: the environment's own", shown="NAME")
    max_steps: int | None = setting(None, "cut episodes after so many steps; null: the environment's own limit", low=1)
    # recipe=ogbench
    kind: str = setting(
        "", f"mazes: {', '.join(KINDS[:4])}; cubes, scene, puzzles: {', '.join(KINDS[4:])}", shown="navigate|play"
    )
    oracle_noise: float | None = setting(None, "OGBench's --noise; null: its published value for the kind", low=0.0)
