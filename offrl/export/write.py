"""The formats: building the file, checking it, putting it in place with its description."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offrl.data.history import history_of
from offrl.errors import UserError, first_line, nearest, warn
from offrl.evaluation import streams
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.shield_kinds import ShieldSettings
from offrl.export import OPSET, SUFFIX, c_code, card, describe
from offrl.export.check import BATCHES, Check, Runner, check
from offrl.export.draws import MEANING, Draw, Undrawable, input_names, later_names
from offrl.export.graph import PolicyGraph, draws_of, inputs_of
from offrl.ope.candidates import data_of
from offrl.settings.field import plain_name
from offrl.system import files as checkpoint

if TYPE_CHECKING:
    from offrl.data.dataset import Dataset
    from offrl.runs.run import SavedRun

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
EXAMPLE = 4  # rows of the observations that the graph is traced with
CURE = " Free some space, or give another place with out=."


@dataclass(frozen=True)
class Exported:
    """The files of an export."""

    path: Path
    description: Path  # the JSON file beside it
    check: Check
    metadata: dict[str, Any]  # what the JSON file holds
    card: tuple[Path, ...] = ()  # README.md and policy.safetensors, where a folder was written


@dataclass(frozen=True)
class _Built:
    """A file's bytes, how to run them, and what its description says about how to use it."""

    data: bytes
    runner: Runner
    runtime: str  # what ran the check
    extra: dict[str, Any]


def export_run(
    run: SavedRun,
    format: str = "onnx",
    seed: int | None = None,
    values: Mapping[str, float] | None = None,
    out: str | Path | None = None,
    stochastic: bool = False,
    opset: int | None = None,
    shield: ShieldSettings | None = None,
    acting: Mapping[str, Any] | None = None,
) -> Exported:
    """Export the final policy of one replica: `seed` (the first by default) and, in a grid, the cell `values`, behind
    its shield. acting: see `TrainedPolicy.with_settings`; scores are then not told of, for they are of the policy as it
    was trained. Into a folder it also writes a model card, README.md, and policy.safetensors, so that the folder can be
    uploaded to the Hugging Face Hub.

    out: a file, or a folder for `policy.SUFFIX`; by default RUN/export/REPLICA. See `export_policy` for the rest.
    """
    _known(format)
    policy = run.policy(seed, **(values or {}))
    policy = policy.with_settings(acting) if acting else policy
    policy = shield.of(policy) if shield else policy
    replica = run.replica(policy.seed, dict(values or {}))
    with contextlib.suppress(UserError):  # of damaged checkpoints; the policy's own file is what counts here
        if replica in run.diverged:
            warn(f"{replica} diverged: what is exported are its last finite parameters")
    path = _place(out, run.dir / "export" / replica.name, format, stochastic)
    for folder_name in ("policies", "checkpoints"):
        if (run.dir / folder_name).resolve() in path.resolve().parents:
            raise UserError(f"out={out} is where the run keeps its own {folder_name}; choose another folder")
    shown = None
    if policy.spec.streams:
        with contextlib.suppress(UserError):  # of data that are elsewhere now
            shown = recorded_observations(data_of([run]))
    done = export_policy(policy, path, format, stochastic, opset, describe.of_run(run, replica, acting), shown)
    if out is None or Path(out).is_dir() or not Path(out).suffix:  # a folder that can become a repository
        return replace(done, card=tuple(card.write(path.parent, policy, done.metadata)))
    return done


def export_policy(
    policy: TrainedPolicy,
    path: str | Path,
    format: str = "onnx",
    stochastic: bool = False,
    opset: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    shown: np.ndarray | None = None,
) -> Exported:
    """Write `policy` to `path` and its description to the JSON file of the same name, after the file's numbers were
    compared with the policy's.

    format: a key of SUFFIX. stochastic: a sample of the policy's distribution, from random numbers that are inputs.
    opset: of ONNX. metadata: what is known of the run, for the description. shown: observations of the data, to be
    compared on as well. Raises UserError for a policy that cannot be exported, a missing package, and where the numbers
    differ; nothing is then written.
    """
    _known(format)
    if opset is not None and format != "onnx":
        raise UserError(f"opset={opset} belongs to format=onnx, not to {format}")
    for package in ONNX_PACKAGES if format == "onnx" else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            needs = f"format=onnx needs pip install 'offrl[export]': {package} cannot be imported ({first_line(error)})"
            raise UserError(f"{needs}. format=pt2 needs nothing more") from None
    path = Path(path)
    beside = path.with_suffix(".json")
    other_files = _others(beside, path)
    name = policy.algorithm.config.name
    try:
        draws = draws_of(policy, stochastic)
        if stochastic and all(d.kind not in MEANING for d in draws):
            raise UserError(f"the policy of {name} is deterministic: stochastic=true has nothing to draw; leave it out")
        graph = PolicyGraph(policy, stochastic)
        if format == "c":
            built = _c(policy)
        else:
            built = _onnx(graph, draws, opset or OPSET) if format == "onnx" else _pt2(graph, draws)
    except UserError:
        raise
    except Undrawable as error:
        raise UserError(f"the policy of {name} cannot be exported: {error}") from None
    except Exception as error:  # whatever the exporters raise about an operation that they do not know
        text = f"{type(error).__name__}: {first_line(error)}"
        if "Constraints violated (batch)" in text:
            text = "its act makes the number of observations a constant (len(obs), or int(...)); obs.shape[0] does not"
        raise UserError(
            f"the policy of {name} cannot be written as {format}: {text}; another format= may do"
        ) from error
    result = check(policy, stochastic, built.runner, draws, built.runtime, shown)
    if not result.passed:
        raise UserError(f"{path} was not kept: {result.failure}. The exporter is at fault; another format= may do")
    size = len(built.data)
    entry = {
        "format": format,
        "sha256": hashlib.sha256(built.data).hexdigest(),
        "bytes": size,
        **built.extra,
        "check": result.to_json(),
    }
    description = describe.description(policy, stochastic, draws, metadata or {})
    # files of the same policy in other formats share the description
    old, new = other_files.get("policy", {}), description["policy"]
    same = all(old.get(name) == new.get(name) for name in ("weights_sha256", "acting"))
    listed = {n: e for n, e in other_files.get("files", {}).items() if same and n != path.name and plain_name(n)}
    intact = {n: e for n, e in listed.items() if _intact(path.with_name(n), e)}
    description["files"] = {path.name: entry, **intact}
    checkpoint.write_bytes(path, built.data, CURE)
    checkpoint.write_text(beside, describe.text(description), CURE)
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        path.unlink()
        raise UserError(f"{path} did not read back as it was written and was deleted: is the disk sound?")
    return Exported(path, beside, result, description)


def recorded_observations(dataset: Dataset) -> np.ndarray:
    """Observations of the data with all streams, at most `BATCHES[0]` of them at even distances, with whole stacks and
    windows.
    """
    rows = torch.linspace(0, len(dataset) - 1, min(BATCHES[0], len(dataset))).long()
    shown, history = np.zeros(len(rows), streams.kind_of(dataset.spec, window=True)), history_of(dataset, None)
    vectors = dataset.columns["observations"][rows]
    if history is not None:
        vectors = history.windows(vectors, rows)
    for name in shown.dtype.names or ():
        store = dataset.stores.get(name)
        shown[name] = vectors if store is None else store.frames(rows, dataset.spec.frames)
    return shown


def _known(format: str) -> None:
    if format not in SUFFIX:
        raise UserError(f"format={format} is not known; choose one of {', '.join(SUFFIX)}.{nearest(format, SUFFIX)}")


def _place(out: str | Path | None, folder: Path, format: str, stochastic: bool) -> Path:
    """The file to write."""
    suffix, stem = SUFFIX[format], "policy-stochastic" if stochastic else "policy"
    if out is None:
        return folder / f"{stem}{suffix}"
    path = Path(out)
    if path.is_dir() or not path.suffix:
        return path / f"{stem}{suffix}"
    if path.suffix.lower() != suffix:
        raise UserError(
            f"out={out} does not end in {suffix}, as a file of format={format} does; give such a name, or a folder"
        )
    return path


def _others(beside: Path, path: Path) -> dict[str, Any]:
    """The older description at `beside`; {} without one. Raises UserError where the file there is not one of ours."""
    if not beside.exists():
        return {}
    try:
        old = json.loads(beside.read_text(encoding="utf-8"))
        if isinstance(old, dict) and old.get("kind") == describe.KIND:
            return old
    except (OSError, ValueError):
        pass
    raise UserError(
        f"{beside} is no description of an exported policy and would be overwritten; choose another name than "
        f"out={path}"
    )


def _intact(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == entry.get("sha256")
    except OSError:
        return False


# -------------------------------------------------------------------------------------------------------------- formats


def _program(graph: PolicyGraph, draws: Sequence[Draw]) -> torch.export.ExportedProgram:
    """The graph with a free batch size, by torch.export."""
    batch = torch.export.Dim("batch")
    free = [{i: batch for i, n in enumerate(d.shape) if n is None} for d in draws]
    observed = graph.examples(EXAMPLE)
    free = [*({0: batch} for _ in observed[1:]), *free]
    shapes = ({0: batch}, tuple(free)) if free else ({0: batch},)
    inputs = (torch.full([EXAMPLE if n is None else n for n in d.shape], 0.5).to(d.dtype) for d in draws)
    examples = (*observed, *inputs)
    with _quiet():
        program = torch.export.export(graph, examples, dynamic_shapes=shapes, strict=False)
    if "ops.offrl." in str(program.graph_module.code):  # the file could only be loaded beside offrl
        raise Undrawable(
            "it draws random numbers from offrl.rng's functions imported by name; they must be called as "
            "rng.normal(...)"
        )
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices that PyTorch's exporters give about themselves, such as that torchvision is not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def _pt2(graph: PolicyGraph, draws: Sequence[Draw]) -> _Built:
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_program(graph, draws), buffer)
        loaded = torch.export.load(io.BytesIO(buffer.getvalue())).module()

    def runner(x: np.ndarray, noise: Sequence[np.ndarray]) -> Any:
        outputs = loaded(*map(torch.from_numpy, (*inputs_of(x), *noise)))
        return [y.numpy() for y in outputs] if graph.parts else outputs.numpy()

    extra = {"load": "torch.export.load(file).module()(observations, *others)"}
    return _Built(buffer.getvalue(), runner, f"torch.export, torch {torch.__version__}", extra)


def _c(policy: TrainedPolicy) -> _Built:
    code = c_code.source(policy)
    runner, load = c_code.compiled(policy, code), code[code.rindex(" policy(") + 1 :].partition(" {")[0]
    return _Built(code.encode(), runner, Path(c_code.compiler()).name, {"load": f"{load}; link with -lm"})


def _onnx(graph: PolicyGraph, draws: Sequence[Draw], opset: int) -> _Built:
    import onnxruntime

    names = [*(graph.streams or ["observations"]), *(input_names(draws) if draws else [])]
    program, outputs = _program(graph, draws), ["actions", *later_names(draws)]
    with _quiet(), contextlib.redirect_stdout(io.StringIO()):
        exported = torch.onnx.export(
            program,
            (),
            None,
            dynamo=True,
            input_names=names,
            output_names=outputs,
            opset_version=opset,
            external_data=False,
        )
    assert exported is not None
    model = exported.model_proto
    written = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if written != opset:
        raise UserError(
            f"opset={opset}: PyTorch {torch.__version__} writes opset {written} for this policy; leave opset= out"
        )
    _name_batch(model)
    data = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base
        text = f"onnxruntime {onnxruntime.__version__} cannot load what was exported ({first_line(error)})"
        raise UserError(f"{text}; a smaller opset= may do, 18 is the smallest") from error

    def runner(x: np.ndarray, noise: Sequence[np.ndarray]) -> Any:
        results = session.run(outputs, dict(zip(names, (*inputs_of(x), *noise), strict=True)))
        return results if graph.parts else results[0]

    extra = {
        "load": "onnxruntime.InferenceSession(file).run(None, {name: array, ...})[0]",
        "opset": opset,
        "ir": model.ir_version,
    }
    return _Built(data, runner, f"onnxruntime {onnxruntime.__version__}", extra)


def _name_batch(model: Any) -> None:
    """The free dimension is called `batch`, whatever torch.export called it."""
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    axis_names = {d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}
    for value in values:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in axis_names:
                dimension.dim_param = "batch"
