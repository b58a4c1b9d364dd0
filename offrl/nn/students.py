"""Policies small enough to read, and their fits to another policy's actions: trees, sparse formulas, small networks.

A fit takes the first parameters, observations x [N, O], targets y [N, A] and `inside` [N, A] (whether a target lies
strictly between the ends of its range), all on the CPU, the settings of algo=distill and a key, and returns the
module's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.nn.mlp import MLP, Linear, call
from offrl.nn.policies import Dist, Policy
from offrl.nn.sparse import SparseSettings, formula, library, monomials, padded, regress
from offrl.optim import Adam, Params

SMALLEST_LEAF = 1e-3  # share of the rows
EXACT = SparseSettings(threshold=0.0, members=1, min_z_score=0.0)  # least squares on all terms


class StudentPolicy(Policy):
    """Outputs [B, A] of a small model, clipped to [-1, 1]; of discrete actions the largest of K."""

    net: Any  # Trees, Polynomial or SmallMLP

    def __init__(self, net: nn.Module, discrete: bool) -> None:
        nn.Module.__init__(self)
        self.net, self.discrete = net, discrete

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        return (self.net(observations),)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0].argmax(-1) if self.discrete else dist[0].clamp(-1.0, 1.0)

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return self.mode(dist)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        raise TypeError("a student is deterministic and has no density")


def agreement(labels: Tensor, acted: Tensor, discrete: bool) -> tuple[Tensor, Tensor]:
    """R^2 of a student's actions [N, A] against the teacher's, and their RMS difference as a share of the range.
    Of discrete actions, one-hot [N, K], the second is the share of rows that differ.
    """
    error = (acted - labels).square()
    spread = (labels - labels.mean(0)).square().sum().clamp(min=1e-12)
    difference = error.sum(-1).gt(0).float().mean() if discrete else error.mean().sqrt() / 2.0
    return 1.0 - error.sum() / spread, difference


def constant(x: Tensor) -> nn.Parameter:
    """A parameter that no gradient moves; it may hold whole numbers."""
    return nn.Parameter(x, requires_grad=False)


class Trees(nn.Module):
    """The sum of `count` complete binary trees: at node i a row goes to 2 i + 1 where its feature is at most the
    threshold, else to 2 i + 2. A leaf of less depth has thresholds of infinity below it.
    """

    def __init__(self, inputs: int, outputs: int, count: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.feature = constant(torch.zeros(count, 2**depth - 1, dtype=torch.int64))
        self.threshold = constant(torch.full((count, 2**depth - 1), torch.inf))
        self.value = constant(torch.zeros(count, 2**depth, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, O] -> [B, A]."""
        return self.each(x).sum(1)

    def each(self, x: Tensor) -> Tensor:
        """What each of T trees adds, [B, O] -> [B, T, A]."""
        tree = torch.arange(len(self.value), device=x.device)
        node = torch.zeros(x.shape[0], len(tree), dtype=torch.int64, device=x.device)
        for _ in range(self.depth):
            below = x.gather(1, self.feature[tree, node]) <= self.threshold[tree, node]
            node = 2 * node + 2 - below.to(torch.int64)
        return self.value[tree, node - (2**self.depth - 1)]

    @property
    def size(self) -> tuple[int, str, int]:
        """Leaves, what they are called, and the numbers that the model holds."""
        questions = int(self.threshold.isfinite().sum())
        leaves = questions + len(self.value)
        return leaves, "leaves", 2 * questions + leaves * self.value.shape[-1]

    def fit(
        self,
        params: Params,
        x: Tensor,
        y: Tensor,
        inside: Tensor,
        config: Any,
        key: Tensor,
        weights: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Params:
        """CART by squared error, each row's times its weight [N]; of several trees each is fitted to the residual of
        those before it, and counts `shrinkage` (gradient boosting, Friedman 2001), on `batch_size` rows drawn anew if
        it is given. On one-hot targets the squared error is Gini's impurity. Raises UserError without scikit-learn.
        """
        try:
            from sklearn.tree import DecisionTreeRegressor
        except ImportError as error:
            raise UserError(f"trees need scikit-learn ({error}): pip install 'offrl[trees]'") from None
        parts = {name: p.clone() for name, p in params.items()}
        rows, count = x.numpy().astype(np.float32), len(parts["value"])
        y = y.double()
        row_weights = None if weights is None else weights.numpy()
        start = np.average(y.numpy(), 0, row_weights) if count > 1 else np.zeros(y.shape[1])
        residual = y.numpy() - start
        for k in range(count):
            model = DecisionTreeRegressor(
                max_depth=self.depth, min_samples_leaf=SMALLEST_LEAF, random_state=int(rng.randint(key, (1,), 2**31))
            )
            batch: Any = slice(None)
            if batch_size is not None:
                batch = rng.randint(rng.fold_in(key, k), (batch_size,), len(rows)).numpy()
            model.fit(rows[batch], residual[batch], None if row_weights is None else row_weights[batch])
            scale = config.shrinkage if count > 1 else 1.0
            self._write({name: p[k] for name, p in parts.items()}, model.tree_, scale)
            residual = residual - scale * model.predict(rows).reshape(residual.shape)
        parts["value"][0] += torch.from_numpy(start)
        return parts

    def _write(self, parts: dict[str, Tensor], tree: Any, scale: float) -> None:
        """A fitted tree of scikit-learn as a complete one."""
        nodes = {0: 0}  # ours -> scikit-learn's
        for i in range(2 ** (self.depth + 1) - 1):
            node, inner = nodes[i], i < 2**self.depth - 1
            leaf = tree.children_left[node] < 0
            if inner and not leaf:
                parts["feature"][i] = int(tree.feature[node])
                # its rows are float32: the largest float32 up to the threshold divides them alike
                at = np.float32(tree.threshold[node])
                at = np.nextafter(at, np.float32(-np.inf)) if float(at) > tree.threshold[node] else at
                parts["threshold"][i] = float(at)
            if inner:
                nodes[2 * i + 1] = node if leaf else tree.children_left[node]
                nodes[2 * i + 2] = node if leaf else tree.children_right[node]
            else:
                parts["value"][i - (2**self.depth - 1)] = torch.from_numpy(scale * tree.value[node, :, 0])


class Polynomial(nn.Module):
    """Sums of products of observations (and of the sine and cosine of some), one for each output."""

    def __init__(self, inputs: int, outputs: int, degree: int, angles: Sequence[int]) -> None:
        super().__init__()
        for angle in angles:
            if not 0 <= angle < inputs:
                raise UserError(f"algo.angles names observation {angle}, and there are {inputs}: 0 to {inputs - 1}")
        waves = range(inputs + 1, inputs + 1 + 2 * len(angles))
        terms = padded(monomials(range(1, inputs + 1), degree) + [(w,) for w in waves])
        self.terms, self.angles = constant(terms), constant(torch.tensor(list(angles), dtype=torch.int64))
        self.coefficients = constant(torch.zeros(outputs, len(terms)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, O] -> [B, A], by way of float64: in raw units large terms cancel."""
        theta = library(self.terms, x.double(), x[:, :0].double(), self.angles)
        return (theta @ self.coefficients.double().mT).to(x.dtype)

    @property
    def size(self) -> tuple[int, str, int]:
        """Terms, what they are called, and the numbers that the model holds."""
        terms = int(self.coefficients.count_nonzero())
        return terms, "terms", terms

    def formulas(self, labels: Sequence[str], scale: np.ndarray, shift: np.ndarray) -> list[str]:
        """What each output is, times `scale` [A] plus `shift` [A], with names of the observations."""
        waves = [f"{f}({labels[int(a)]})" for f in ("sin", "cos") for a in self.angles]
        rows, names = self.coefficients.detach().double().clone(), ["", *labels, *waves]
        rows *= torch.from_numpy(scale)[:, None]
        rows[:, 0] += torch.from_numpy(shift)  # of the constant, the first term
        order = (torch.arange(rows.shape[1]) > 0).double()  # by the size of coefficients, the constant last
        return [formula(self.terms, row[None], row, order, names) for row in rows]

    def fit(self, params: Params, x: Tensor, y: Tensor, inside: Tensor, config: Any, key: Tensor) -> Params:
        """The terms of each output by sparse regression on the rows whose target is `inside`: those at the ends of the
        range are clipped, and would bend every coefficient. Raises UserError where too few are.
        """
        terms, angles, coefficients = params["terms"], params["angles"], params["coefficients"].clone()
        settings = SparseSettings(threshold=config.threshold) if config.into == "sindy" else EXACT
        x, y = x.double(), y.double()
        for d in range(y.shape[1]):
            rows = torch.nonzero(inside[:, d]).squeeze(-1)
            if len(rows) < 2 * len(terms):
                raise UserError(
                    f"action {d}: the teacher is at an end of its range in all but {len(rows):,} of {len(y):,} rows, "
                    f"too few for a formula of {len(terms):,} terms: into=tree, or a lower algo.degree"
                )
            part, _ = regress(terms, x[rows], x[rows, :0], y[rows, d, None], angles, settings, rng.fold_in(key, d))
            coefficients[d] = part["median"][0].float()
        return {**params, "coefficients": coefficients}


class SmallMLP(MLP):
    """A network of ReLUs."""

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, O] -> [B, A], by way of float64, so that the order of sums does not show."""
        y, layers = x.double(), cast(Sequence[Linear], self.layers)
        for layer in layers:
            y = (y @ layer.weight.double().mT + layer.bias.double()).relu()
        return (y @ self.head.weight.double().mT + self.head.bias.double()).to(x.dtype)

    @property
    def size(self) -> tuple[int, str, int]:
        """Weights, what they are called, and the numbers that the model holds."""
        count = sum(p.numel() for p in self.parameters())
        return count, "weights", count

    def fit(self, params: Params, x: Tensor, y: Tensor, inside: Tensor, config: Any, key: Tensor) -> Params:
        """Squared error, by Adam with a cosine schedule."""
        adam = Adam(config.learning_rate, schedule="cosine", decay_steps=config.updates)
        opt = adam.init(params)
        for i in range(config.updates):
            rows = rng.randint(rng.fold_in(key, i), (config.batch_size,), len(x))
            leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
            with torch.enable_grad():
                loss = (call(self, leaves, x[rows]) - y[rows]).square().mean()
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            params, opt = adam.update(params, grads, opt)
        return params


def make_student(config: Any, spec: DataSpec) -> StudentPolicy:
    """The student that the settings of algo=distill describe."""
    inputs, outputs = spec.observation_dim, spec.encoded_action_dim
    net: nn.Module
    if config.into in ("tree", "trees"):
        net = Trees(inputs, outputs, config.trees if config.into == "trees" else 1, config.max_depth)
    elif config.into == "mlp":
        net = SmallMLP(inputs, config.hidden, outputs)
    else:
        net = Polynomial(inputs, outputs, config.degree if config.into == "sindy" else 1, config.angles)
    return StudentPolicy(net, spec.discrete)
