"""`offrl.load_policy`: a trained policy from a file, a run, or a repository of the Hugging Face Hub, by one call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from offrl.errors import UserError, first_line, nearest
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs.paths import RECORD
from offrl.runs.run import SavedRun

HUB = "hf://"
FILE = "policy.safetensors"
SUFFIX = ".safetensors"


def load_policy(
    source: str | Path, seed: int | None = None, *, revision: str | None = None, device: str = "auto", **values: float
) -> Any:
    """The trained policy behind `source`.

    source: a policy file (.safetensors), a folder that `offrl export` wrote, a run directory, or "hf://USER/REPOSITORY"
    of the Hugging Face Hub, with "/FOLDER/FILE.safetensors" behind it where it is not policy.safetensors. seed, values:
    which replica of a run, as `Run.policy`. revision: a commit, tag or branch of the repository (also
    "hf://USER/REPOSITORY@REVISION"); name a commit where the policy must stay what it is. device: where it acts, if
    that pays.

    What is read is safetensors and JSON, never a pickle, and runs no code. Raises UserError for what is missing,
    damaged or no policy."""
    text = str(source)
    if text.startswith(HUB):
        if seed is not None or values:
            raise UserError(
                f"{text} holds single policies: seed= and settings choose one of a run; name the file, "
                f"{text}/FOLDER/{FILE}"
            )
        return TrainedPolicy.load(_download(text, revision), device)
    if revision is not None:
        raise UserError(f"revision={revision} is of a repository, and {text} is none: write {HUB}USER/REPOSITORY")
    path = Path(source).expanduser()
    if (path / RECORD).exists():
        run = SavedRun(path)
        return run.load_policy(run.replica(run.seeds[0] if seed is None else seed, values), device)
    if seed is not None or values:
        raise UserError(f"{path} is no run directory, of which seed= and settings choose a policy")
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        chosen = path / FILE if path / FILE in files else files[0] if len(files) == 1 else None
        if chosen is None:
            names = ", ".join(p.name for p in files[:5])
            raise UserError(
                f"{path} is no run directory and has no {FILE}{f'; it has {names}: name one' if names else ''}"
            )
        path = chosen
    if not path.exists():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hub = f" A repository of the Hub is written {HUB}{text}" if re.fullmatch(r"[\w.-]+/[\w.-]+", text) else ""
        raise UserError(f"there is no policy {path}.{nearest(path.name, there)}{hub}")
    return TrainedPolicy.load(path, device)


def _download(text: str, revision: str | None) -> Path:
    """The policy's file in the Hub's cache on this machine."""
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+?))?(?:/([\w./-]+\.safetensors))?/?", text)
    if match is None:
        raise UserError(
            f"{text} names no repository: write {HUB}USER/REPOSITORY, or "
            f"{HUB}USER/REPOSITORY@REVISION/FOLDER/FILE{SUFFIX}"
        )
    repository, typed, file = match.groups()
    if typed and revision and typed != revision:
        raise UserError(f"{text} and revision={revision} are two revisions; leave one of them out")
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError(
            f"{text} needs pip install huggingface_hub; a file or folder that is here already does not"
        ) from None
    name = file or FILE
    try:
        return Path(hub.hf_hub_download(repository, name, revision=revision or typed))
    except Exception as error:  # its errors have no common base, and come from several libraries
        kind = type(error).__name__
        if kind == "EntryNotFoundError":
            there = [f for f in hub.list_repo_files(repository, revision=revision or typed) if f.endswith(SUFFIX)]
            names = (
                f"; it has {', '.join(there[:5])}: {HUB}{repository}/{there[0]}"
                if there
                else ", nor another policy of offrl"
            )
            raise UserError(f"{HUB}{repository} has no {name}{names}") from None
        cure = {
            "RepositoryNotFoundError": "is the name right, and the repository public? (`hf auth login` for a private "
            "one)",
            "RevisionNotFoundError": f"it has no revision {revision or typed}",
            "GatedRepoError": "its owner lets in only those who asked on its page, after `hf auth login`",
        }.get(kind, first_line(error))
        raise UserError(f"cannot load {text}: {cure}") from error
