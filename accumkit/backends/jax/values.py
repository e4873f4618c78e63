"""What a window on JAX holds: a pytree, and pure functions of it."""

from typing import Any, NamedTuple

import jax
import keras
from jax import numpy as jnp

from accumkit.backends.dtypes import wide


class Values(NamedTuple):
    """What a window holds.

    Attributes:
        sums: The sum of gradients of each variable.
        denominator: What they are to be divided by.
        first: Whether nothing has been added yet.
        counts: N, N of the open window, batches and micro-batches in it;
            empty where a window is one train step.
        flags: Which variables got a gradient; empty where all do.
        records: Values of the recorder's variables, if there is one.
    """

    sums: list[Any]
    denominator: Any
    first: Any
    counts: list[Any]
    flags: list[Any]
    records: list[Any]

    def added(
        self,
        places: list[int],
        gradients: list[Any],
        late: Any,
        divisor: Any,
    ) -> "Values":
        """Adds the gradients of a micro-batch.

        The first micro-batch of a window overwrites the sums instead of
        adding to them, so that nothing has to be reset.

        Args:
            places: Where among the sums each gradient belongs.
            gradients: One for each place; None where there is none.
            late: What the gradients are to be multiplied by, or None.
            divisor: Its share of what the sums are divided by, or None.

        Returns:
            The new values.
        """
        sums = list(self.sums)
        for at, gradient in zip(places, gradients, strict=True):
            total = sums[at]
            if gradient is None:
                sums[at] = jnp.where(self.first, 0, total)
                continue
            gradient = gradient.astype(total.dtype)
            if late is not None:
                gradient = gradient * jnp.asarray(late, total.dtype)
            # One fused pass; the first micro-batch needs no zeros.
            sums[at] = jnp.where(self.first, gradient, total + gradient)
        denominator, flags = self.denominator, self.flags
        if divisor is not None:
            denominator = denominator + jnp.asarray(divisor, denominator.dtype)
        if flags:
            got = jnp.asarray([g is not None for g in gradients])
            flags = [got | (flags[0] & ~self.first)]
        return self._replace(
            sums=sums,
            denominator=denominator,
            flags=flags,
            first=jnp.zeros_like(self.first),
        )

    def mean(self, places: list[int]) -> list[Any]:
        """The sums at some places, divided.

        Args:
            places: Where the sums stand.
        """
        # Without weight there is no gradient either: 0 / 1 is 0. Where XLA
        # sees that nothing was added to it, it divides nothing.
        divisor = jnp.where(self.denominator == 0, 1, self.denominator)
        sums = [self.sums[at] for at in places]
        return [total / divisor.astype(total.dtype) for total in sums]

    def is_full(self) -> Any:
        """Whether one batch more fills the window."""
        _, size, batches, _ = self.counts
        return batches + 1 >= size

    def counted(self, full: Any, pieces: int) -> "Values":
        """Counts a batch; a full window gives way to an empty one.

        Args:
            full: What `is_full` said.
            pieces: In how many micro-batches the batch was worked off.
        """
        steps, size, batches, micro = self.counts
        counts = [
            steps,
            jnp.where(full, steps, size),
            jnp.where(full, 0, batches + 1),
            jnp.where(full, 0, micro + pieces),
        ]
        return self._replace(counts=counts)


def of_one_step(trainable: list[Any]) -> Values:
    """Values of an empty window that is one train step.

    Args:
        trainable: Values of what is trained.
    """
    sums = [
        jnp.zeros(v.shape, wide(keras.backend.standardize_dtype(v.dtype)))
        for v in trainable
    ]
    zero = jnp.zeros((), wide(keras.config.floatx()))
    return Values(sums, zero, jnp.asarray(True), [], [], [])


def like(old: Any, new: Any) -> Any:
    """Gives values the dtypes of others.

    Both branches of a `cond` must return the same types, weak ones included.

    Args:
        old: A pytree of arrays.
        new: One of the same structure.
    """
    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), old, new)
