"""Optuna's store: the settings and their estimates, for Optuna's own tools (optuna-dashboard, importances) and samplers
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl.errors import UserError, first_line
from offrl.system import trust
from offrl.tuning.search.propose import History, as_trial, load_optuna
from offrl.tuning.search.space import Space

JOURNAL = "journal.log"
MOST, END = 1 << 28, 1 << 20  # bytes of a journal, which Optuna reads whole; of its last line
FIRST = b'{"op_code":'  # what each line of a journal of Optuna's begins with
IDENTITY, SETTING = "offrl_tune", "setting"


def record(
    storage: str | None,
    folder: Path,
    spaces: Mapping[str, Space],
    history: Mapping[str, History],
    identity: str,
    criteria: int,
) -> None:
    """Add to the store, a study for each algorithm, what it does not hold yet.

    storage: as `TuneConfig.storage`. identity: of the tune; what is in the store must be of the same. Raises UserError
    for a store of another tune, or one that cannot be read or written.
    """
    optuna = load_optuna()
    store = _open(optuna, storage, folder)
    for algo, space in spaces.items():
        study = _study(optuna, store, algo, criteria, identity, storage or str(folder / JOURNAL))
        stored = {t.user_attrs.get(SETTING) for t in study.get_trials(deepcopy=False)}
        for number, (values, result) in enumerate(history[algo]):
            name = f"{algo}-{number}"
            if name not in stored and (trial := as_trial(optuna, space, values, result, **{SETTING: name})) is not None:
                study.add_trial(trial)


def check(storage: str | None, folder: Path, algos: list[str], identity: str, criteria: int) -> None:
    """Raises UserError for a store that is damaged, or of another tune: another data set, say."""
    optuna = load_optuna()
    if storage is None and not (folder / JOURNAL).exists():
        return
    store = _open(optuna, storage, folder)
    for algo in algos:
        _study(optuna, store, algo, criteria, identity, storage or str(folder / JOURNAL))


def _open(optuna: Any, storage: str | None, folder: Path) -> Any:
    if storage is not None and "://" in storage:
        try:
            return optuna.storages.RDBStorage(storage)
        except Exception as error:  # whatever a database driver raises
            raise UserError(
                f"storage={storage} cannot be opened ({first_line(error)}); write sqlite:///FILE, or leave it out"
            ) from None
    path = folder / JOURNAL if storage is None else Path(storage)
    _mend(path)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except Exception as error:  # of a file that is no journal
        raise UserError(
            f"{path} is no journal of Optuna's ({first_line(error)}); remove it, or name another with storage="
        ) from None


def _mend(path: Path) -> None:
    """Cut a last line that an interrupted write left unfinished: Optuna would append to it, and never read the file
    again.

    Raises UserError, before anything is written, for what is no journal, and for one that is too large to be read.
    """
    # of links, those that a command names; a tune's folder has none that leads out of it
    path = Path(os.path.realpath(path))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    try:
        with trust.open_to_write(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if not FIRST.startswith(head := file.read(len(FIRST))):
                raise UserError(f"{path} is no journal of Optuna's, and stays as it is; name another with storage=")
            if size > MOST:
                raise UserError(
                    f"{path} has {size:,} bytes, and a journal has {MOST:,} at most; move it away, or name another "
                    "with storage="
                )
            file.seek(max(0, size - END))
            end = file.read()
            if head and not end.endswith(b"\n"):
                if b"\n" not in end and size > END:
                    raise UserError(
                        f"{path} is no journal of Optuna's: its last line has more than {END:,} bytes; move it away"
                    )
                file.truncate(size - len(end) + end.rfind(b"\n") + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _study(optuna: Any, store: Any, algo: str, criteria: int, identity: str, where: str) -> Any:
    try:
        if algo in optuna.get_all_study_names(store):  # to create it again would be written down too
            study = optuna.load_study(study_name=algo, storage=store)
        else:
            study = optuna.create_study(study_name=algo, storage=store, directions=["maximize"] * criteria)
    except Exception as error:  # of a database
        raise UserError(f"the store {where} cannot be used ({first_line(error)}); name another with storage=") from None
    known = study.user_attrs.get(IDENTITY)
    if known is None and study.get_trials(deepcopy=False):
        raise UserError(
            f"the store {where} holds a study '{algo}' that offrl did not write; name another with storage="
        )
    if known not in (None, identity):
        raise UserError(
            f"the store {where} is of another tune (other data, spaces or judges: {known[:12]}, and this is "
            f"{identity[:12]}); name another with storage=, or another out="
        )
    if known is None:
        study.set_user_attr(IDENTITY, identity)
    return study
