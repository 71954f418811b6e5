# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Running mean and variance of observations, counted once per collected row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.data import Composite


def _suffixed(key: NestedKey) -> NestedKey:
    key = unravel_key(key)
    return f"{key}_normalized" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_normalized")


class EmpiricalNormalization(TensorDictModuleBase):
    r"""Normalises several observations by the statistics of the rows that were collected.

    ``y = (x - mean) / (std + eps)``, optionally clamped, with the population variance. :meth:`update` merges
    a whole run of rows by the parallel rule of Chan et al. (1979), the batch form of Welford's:

    .. math::
        \delta = \mu_B - \mu_A,\quad \mu = \mu_A + \delta\,\frac{n_B}{n},\quad
        M = M_A + M_B + \delta^2\,\frac{n_A n_B}{n},\quad n = n_A + n_B,\quad \sigma^2 = M / n.

    Call it once per collected run, never on replayed rows: a replayed row would be counted again, and
    the statistics would drift to whatever the sampler prefers.

    State       three buffers of accumulators (``count`` int64, ``mean`` and ``m2`` float64, features of all
                keys in one vector) and two of what is applied (``loc`` and ``inv_scale``, ``dtype``).
    In place    every buffer keeps its memory, so captured CUDA graphs and processes that share the module
                see each update. No method waits for the device.
    Before      the first update ``mean`` is 0 and ``std`` 1.

    Args:
        in_keys (sequence of NestedKey): observations to normalise.
        shapes (sequence of int or sequence of int): the feature shape of each key, ``batch_size`` excluded.

    Keyword Args:
        out_keys (sequence of NestedKey, optional): where the normalised observations go. Defaults to
            ``None``: the input keys with ``"_normalized"`` appended to the last part, so that a collector
            stores raw observations. Pass ``in_keys`` to overwrite.
        eps (float): added to the standard deviation; bounds the gain on a feature that hardly moves by
            ``1 / eps``. Defaults to ``1e-2``.
        clamp (float, optional): limits the result to ``[-clamp, clamp]``. Defaults to ``None``.
        until (int, optional): updates stop for good once this many rows were counted. Defaults to ``None``.
        device (torch.device, optional): where the buffers are made. Defaults to torch's default.
        dtype (torch.dtype): dtype of the normalised observations. Defaults to ``torch.float32``.

    Raises:
        ValueError: if keys and shapes do not match in number, or a limit is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> normalizer = EmpiricalNormalization(["observation"], [3], eps=1e-8)
        >>> run = TensorDict(observation=torch.tensor([[0.0, 1.0, 2.0], [2.0, 3.0, 6.0]]), batch_size=[2])
        >>> normalizer.update(run)
        >>> normalizer(run)["observation_normalized"]
        tensor([[-1., -1., -1.],
                [ 1.,  1.,  1.]])
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    loc: Tensor
    inv_scale: Tensor

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        shapes: Sequence[int | Sequence[int]],
        *,
        out_keys: Sequence[NestedKey] | None = None,
        eps: float = 1e-2,
        clamp: float | None = None,
        until: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.out_keys = [unravel_key(key) for key in (map(_suffixed, in_keys) if out_keys is None else out_keys)]
        self.shapes = [torch.Size([shape] if isinstance(shape, int) else shape) for shape in shapes]
        if not len(self.in_keys) == len(self.out_keys) == len(self.shapes) > 0:
            raise ValueError(
                "EmpiricalNormalization: in_keys, shapes and out_keys must have one entry per observation, got "
                f"{len(self.in_keys)}, {len(self.shapes)} and {len(self.out_keys)}."
            )
        for name, value in (("eps", eps), ("clamp", clamp), ("until", until)):
            if value is not None and value <= 0:
                raise ValueError(f"EmpiricalNormalization: {name} must be positive, got {value}.")
        self.eps, self.clamp, self.until, self.dtype = eps, clamp, until, dtype
        self._sizes = [shape.numel() for shape in self.shapes]
        features = sum(self._sizes)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64, device=device))
        self.register_buffer("m2", torch.zeros(features, dtype=torch.float64, device=device))
        self.register_buffer("loc", torch.zeros(features, dtype=dtype, device=device))
        self.register_buffer("inv_scale", torch.full((features,), 1 / (1 + eps), dtype=dtype, device=device))

    @classmethod
    def from_spec(
        cls, observation_spec: Composite, in_keys: Sequence[NestedKey], **kwargs: Any
    ) -> EmpiricalNormalization:
        """Reads the feature shapes from a spec, less its batch shape; ``kwargs`` as in the constructor."""
        shapes = [observation_spec[key].shape[observation_spec.ndim :] for key in in_keys]
        return cls(in_keys, shapes, **kwargs)

    @property
    def var(self) -> Tensor:
        """The population variance, float64, shape ``[features]`` (all keys, in order)."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp_min(1), 1.0)

    @torch.no_grad()
    def update(self, tensordict: TensorDictBase) -> None:
        """Counts every row of a run once.

        Args:
            tensordict (TensorDictBase): collected rows, any batch shape (``[N]``, ``[K, N]``), with the
                ``in_keys`` at its root, any real dtype.

        Raises:
            KeyError: if a key is missing. The statistics are unchanged.
            ValueError: if a key does not have the batch shape followed by its feature shape. The statistics
                are unchanged.
        """
        rows = tensordict.batch_size.numel()
        values = [self._read(tensordict, index).reshape(rows, size) for index, size in enumerate(self._sizes)]
        if rows == 0:
            return
        # float32 is enough inside one run (torch subtracts the mean first); sums over runs need float64.
        moments = [
            torch.var_mean(value.to(torch.promote_types(value.dtype, self.dtype)), 0, correction=0) for value in values
        ]
        var = torch.cat([var for var, _ in moments]).double()
        mean = torch.cat([mean for _, mean in moments]).double()
        before = self.count.double()
        added = torch.full_like(before, float(rows))
        if self.until is not None:
            added = torch.where(before < self.until, added, 0.0)  # a device decision: no ``if``, no sync
        total = (before + added).clamp_min(1.0)
        delta = mean - self.mean
        self.m2.add_(var * added + delta.square() * (before * added / total))
        self.mean.add_(delta * (added / total))
        self.count.add_(added.long())
        self._refresh()

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the normalised ``in_keys`` to the ``out_keys`` of the same tensordict.

        Raises:
            KeyError, ValueError: as :meth:`update`. Nothing is written.
        """
        return self._write(tensordict, self._normalized(tensordict))

    def normalize_transition(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalises a replayed batch: its root and its ``"next"``, with the same statistics.

        Args:
            tensordict (TensorDictBase): a batch with the ``in_keys`` at its root and in ``"next"``.

        Returns:
            TensorDictBase: the same tensordict, ``out_keys`` written in both places. Nothing is counted.

        Raises:
            KeyError, ValueError: as :meth:`update`, and ``KeyError`` without a ``"next"``. Nothing is written.
        """
        following = tensordict.get("next", None)
        if following is None:
            raise self._missing("next", tensordict)
        later, now = self._normalized(following), self._normalized(tensordict)
        self._write(following, later)
        return self._write(tensordict, now)

    def _normalized(self, tensordict: TensorDictBase) -> list[Tensor]:
        """All of them before the first is written, which may be over an observation."""
        values, start = [], 0
        for index, size in enumerate(self._sizes):
            shape, end = self.shapes[index], start + size
            loc, inv_scale = self.loc[start:end].view(shape), self.inv_scale[start:end].view(shape)
            value = self._read(tensordict, index)
            if value.dtype == torch.bool:
                value = value.to(self.dtype)  # torch subtracts nothing from flags
            value = ((value - loc) * inv_scale).to(self.dtype)
            values.append(value if self.clamp is None else value.clamp_(-self.clamp, self.clamp))
            start = end
        return values

    def _write(self, tensordict: TensorDictBase, values: list[Tensor]) -> TensorDictBase:
        for key, value in zip(self.out_keys, values, strict=True):
            tensordict.set(key, value)
        return tensordict

    @staticmethod
    def _missing(key: NestedKey, tensordict: TensorDictBase) -> KeyError:
        return KeyError(
            f"EmpiricalNormalization: key {key!r} must be present, got {sorted(map(str, tensordict.keys()))}; "
            "the statistics are unchanged."
        )

    def _read(self, tensordict: TensorDictBase, index: int) -> Tensor:
        key, shape = self.in_keys[index], self.shapes[index]
        value = tensordict.get(key, None)
        if value is None:
            raise self._missing(key, tensordict)
        if value.shape != (*tensordict.batch_size, *shape):
            raise ValueError(
                f"EmpiricalNormalization: key {key!r} must have shape {[*tensordict.batch_size, *shape]} (batch, then "
                f"features), got {list(value.shape)}; the statistics are unchanged."
            )
        return value

    def _refresh(self) -> None:
        self.loc.copy_(self.mean)
        self.inv_scale.copy_((self.var.sqrt() + self.eps).reciprocal())

    def extra_repr(self) -> str:
        """The settings, one line."""
        return f"in_keys={self.in_keys}, eps={self.eps}, clamp={self.clamp}, until={self.until}"
