"""What a policy file holds, as an algorithm and its state. The file may be of a stranger: its settings are data, and
nothing is built of them before their shapes are those of its tensors."""

from __future__ import annotations

from pathlib import Path

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data.containers.file_type import pickled
from offrl.data.containers.guard import reading
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.nn.meta_check import check_memory, outline
from offrl.nn.meta_check import of_file as sized_by
from offrl.settings.kinds import restored
from offrl.system import files
from offrl.system.plugins.loading import of_file

ASSETS = "assets/"  # before names of tensors of `Algorithm.assets`
CURE = "the file is damaged, or no policy that offrl wrote"


def read(path: Path) -> tuple[Algorithm, TrainState, int]:
    """(algorithm, state of what acting needs, seed). Raises UserError, in one line, for whatever is wrong with the
    file.
    """
    if Path(path).is_file() and pickled(path):  # a FIFO would be waited for
        raise UserError(
            f"{path} is a pickle (PyTorch's files are), which may run code when it is read, and is refused on purpose: "
            "policies of offrl are RUN/policies/*.safetensors; another program's policy acts as a plugin "
            "(docs/tutorials/own-algorithm.md)"
        )
    tensors, meta = files.read(path)
    if meta.get("kind") != "policy":
        raise UserError(f"{path} is not a policy file; policies are under policies/ in a run directory")
    settings, spec, seed, description = (meta.get(name) for name in ("config", "spec", "seed", "assets"))
    name = settings.get("name") if isinstance(settings, dict) else None
    if not (
        isinstance(settings, dict)
        and isinstance(spec, dict)
        and isinstance(name, str)
        and isinstance(description, dict | None)
    ):
        raise UserError(f"{path} does not say which algorithm acts, and on what: {CURE}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"{path} has the seed {str(seed)[:60]}: {CURE}")
    of_file(meta.get("plugins"), str(path))
    kind = registry.get("algo", name)
    config = restored(kind.Config, settings, str(path))
    if not kind.traits_for(config).policy_modules:
        raise UserError(f"{path} is of {name}, which trains no policy: {CURE}")
    with reading(path, f" as a policy of {name}", CURE), sized_by(tensors):
        data = DataSpec.from_json(spec, str(path))
        assets = {n.removeprefix(ASSETS): tensor for n, tensor in tensors.items() if n.startswith(ASSETS)}
        pretrained = kind.load_assets(assets, description) if description is not None else {}
        with outline(str(path)):
            try:
                meta_algorithm = kind(config, data, pretrained)
            except UserError as error:
                raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
            meta_algorithm.buffers = dict  # no policy needs it, and it may be large
            template = meta_algorithm.init(0)
        acting = {n: template.params[n] for n in meta_algorithm.traits.policy_modules}
        state = files.unflatten(template._replace(params=acting, target={}, opt={}), tensors, str(path))
        check_memory(str(path), meta_algorithm.networks.values())
        algorithm = kind(config, data, pretrained)
    algorithm.buffers = dict
    return algorithm, state, seed
