"""Settings of `offrl data label`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings.field import setting

KINDS = ("preferences", "rewards", "subgoals", "success")
MISSING = ("refuse", "recorded", "zero")


@dataclass
class LabelSettings:
    """The questions to a language model about a dataset, and the choice of the model."""

    kind: str = setting(
        "preferences",
        "what it labels: preferences between segments, rewards, or subgoals; success: no language model, a classifier "
        "of images learns a column's rewards",
        choices=KINDS,
    )
    task: str = setting(
        "", "what is to be achieved, in words: task='run forward, do not fall'; or @FILE with the words"
    )
    out: str = setting("", "the file for dataset.reward_labels; by default labels-NAME-KIND.safetensors")
    force: bool = setting(False, "replace `out` where it exists")
    quiet: bool = setting(False, "no progress")
    seed: int = setting(0, "decides which segments are compared", low=0)
    # which language model
    url: str | None = setting(
        None, "address of an OpenAI-compatible endpoint; null: $OFFRL_LLM_URL or $OPENAI_BASE_URL"
    )
    model: str = setting("", "the endpoint's name of the model")
    key_env: str | None = setting(
        None, "environment variable with the key; null: OFFRL_LLM_KEY (OpenAI's address: also OPENAI_API_KEY)"
    )
    local: str | None = setting(
        None, "in place of an endpoint: a Hugging Face folder or name, run here (pip install 'offrl[text]')"
    )
    labeller: str | None = setting(None, "in place of both: file.py:object, an offrl.labelling.Labeller of your own")
    temperature: float = setting(0.0, "0: the likeliest answer, as local models always give", low=0.0)
    max_tokens: int = setting(256, "longest answer; a model that thinks aloud needs thousands", low=1)
    device: str = setting("cpu", "of a local model, and of learning from preferences and success")
    batch: int = setting(8, "questions at a time of a local model", low=1)
    parallel: int = setting(4, "requests at a time to an endpoint", low=1)
    timeout: float = setting(60.0, "seconds without a sign of life before a request is given up", low=0.01)
    retries: int = setting(6, "further attempts of a request that failed for a reason that may pass", low=0)
    cache: str | None = setting(None, "file of the answers, so that none is paid for twice; null: in dataset.cache_dir")
    max_prompts: int = setting(20_000, "refuse to ask more new questions than this", low=1)
    # how rows are put into words
    names: list[str] = setting(
        [], "what each number of an observation is called; - leaves one out; []: known for some environments"
    )
    action_names: list[str] = setting([], "what each discrete action, or each number of an action, is called")
    steps: int = setting(8, "rows that are shown of a stretch, evenly spaced", low=1)
    digits: int = setting(3, "significant digits", low=1, high=9)
    show_actions: bool = setting(True, "show actions")
    show_images: bool = setting(
        False,
        "kind=rewards, preferences: show the images that dataset.observation_keys names, as PNG, to an endpoint; "
        "encoder=... is that of the learnt reward",
    )
    show_rewards: bool = setting(False, "show recorded rewards")
    render: str | None = setting(None, "file.py:function of a stretch's columns that gives its text, in place of these")
    # preferences and rewards
    pairs: int = setting(500, "kind=preferences: pairs of segments that are compared", low=2)
    length: int = setting(
        0,
        "rows of a segment (0: 25), and of a stretch that gets one reward (0: the whole episode; 1: every row)",
        low=0,
    )
    both_orders: bool = setting(
        True, "kind=preferences: ask about each pair in both orders; an answer that turns with it counts as a tie"
    )
    low: float = setting(0.0, "kind=rewards: the worst")
    high: float = setting(10.0, "kind=rewards: the best")
    # subgoals
    subgoals: int = setting(4, "kind=subgoals: at most so many for an episode", low=1)
    entries: list[int] = setting(
        [], "numbers of the observation that a subgoal fixes, such as [0,1]; []: the column achieved_goals", low=0
    )
    radius: float = setting(0.5, "a subgoal is reached within this distance", low=0.0)
    reached: str | None = setting(
        None, "file.py:function(columns, subgoal) -> [T] bool, after each step; subgoals are then words"
    )
    choices: list[str] = setting([], "with reached=: the words that are allowed")
    ordered: bool = setting(True, "a subgoal counts once those before it are reached")
    bonus: float = setting(1.0, "reward where a subgoal is reached for the first time in an episode")
    add_to_rewards: bool = setting(True, "kind=subgoals: added to the recorded rewards; false: in place of them")
    # success
    labels: str = setting("success", "kind=success: the column that is 1 where a step led to success, else 0")
    on_missing: str = setting(
        "refuse",
        "kind=rewards, subgoals: where no answer could be read: refuse, recorded or zero reward",
        choices=MISSING,
    )
