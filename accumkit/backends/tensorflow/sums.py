"""Sums of gradients on TensorFlow, one component a replica."""

import math
from typing import Any

import keras
import tensorflow as tf

from accumkit.backends.dtypes import wide

# Up to this many numbers writing zeros is faster than the branch that spares
# it: on a 784-128-10 net, micro-batch 1, the branch costs 7 % of a step.
_FEW = 2**20


class _Group:
    """Variables that were first met together, and their sums.

    Attributes:
        variables: The variables; kept, so that their ids stay taken.
        sums: The sum of gradients of each.
        flags: How many micro-batches of the window had a gradient for each;
            None where a window is one train step, which knows by itself.
    """

    def __init__(self, variables: list[Any], across: bool):
        self.variables = variables
        self.sums = [_local(v.shape, v.dtype, "sum") for v in variables]
        self.flags: Any = None
        if across:
            self.flags = _local((len(variables),), "float32", "flags")


class Sums:
    """The sums of a window's gradients, and what they are divided by.

    Args:
        across: Whether a window spans several batches.

    Attributes:
        got: Ids of the variables that got a gradient in the train step that
            is being run or traced.
    """

    def __init__(self, across: bool):
        self._across = across
        self._groups: list[_Group] = []
        self._sums: dict[int, Any] = {}
        self._denominator = _local((), keras.config.floatx(), "denominator")
        self.got: set[int] = set()
        self._divides = False

    def lacks(self, variables: list[Any]) -> list[Any]:
        """Those of the variables that have no sum yet."""
        return [v for v in variables if id(v) not in self._sums]

    def create(self, variables: list[Any]) -> None:
        """Creates sums, outside of a trace and of a replica's context.

        Args:
            variables: Variables that have none.
        """
        group = _Group(variables, self._across)
        self._groups.append(group)
        for variable, total in zip(variables, group.sums, strict=True):
            self._sums[id(variable)] = total

    def begin(self) -> None:
        """Begins a train step."""
        self.got, self._divides = set(), False
        if not self._across and self._are_few():
            self.write_zeros()

    def variables(self) -> list[Any]:
        """All that have a sum."""
        return [v for group in self._groups for v in group.variables]

    def add(
        self,
        variables: list[Any],
        gradients: list[Any],
        first: Any,
        late: Any,
        divisor: Any,
    ) -> None:
        """Adds the gradients of a micro-batch.

        The first micro-batch of a large model overwrites what was there,
        which takes over the gradient's memory as it is: no pass for zeros,
        none for the first sum. A small model finds zeros.

        Args:
            variables: What the train step trains.
            gradients: One for each of them; None where there is none.
            first: Bool or scalar bool tensor, whether it opens the window.
            late: What the gradients are to be multiplied by, or None.
            divisor: Its share of what the sums are divided by, or None.
        """
        if self._are_few():
            first = False
        pairs, got = [], set()
        for variable, gradient in zip(variables, gradients, strict=True):
            total = self._sums[id(variable)].value
            if gradient is not None:
                got.add(id(variable))
                gradient = _wide(gradient, total.dtype, late)
            pairs.append((total, gradient))
        if not got:
            raise ValueError(
                "The loss must depend on a trainable variable. Received: a "
                f"loss without a gradient for any of {len(variables)}. Does "
                "`call`, or the loss, leave the graph (NumPy, say)?"
            )
        self.got |= got
        denominator = self._denominator.value
        if divisor is not None:
            self._divides = True
            pairs.append((denominator, tf.cast(divisor, denominator.dtype)))
        elif self._across:
            pairs.append((denominator, None))
        for group in self._groups if self._across else []:
            flags = [float(id(v) in got) for v in group.variables]
            pairs.append((group.flags.value, tf.constant(flags)))

        def overwrite():
            for total, gradient in pairs:
                if gradient is None or isinstance(gradient, tf.IndexedSlices):
                    # An earlier window's sum may lie there.
                    total.assign(tf.zeros_like(total))
                if isinstance(gradient, tf.IndexedSlices):
                    total.scatter_add(gradient)
                elif gradient is not None:
                    total.assign(gradient)
            return False

        def add():
            for total, gradient in pairs:
                if isinstance(gradient, tf.IndexedSlices):
                    total.scatter_add(gradient)
                elif gradient is not None:
                    total.assign_add(gradient)
            return False

        if isinstance(first, bool):
            (overwrite if first else add)()
        else:
            tf.cond(first, overwrite, add)

    def end(self) -> None:
        """Ends a window, in replica context, after its optimizer step."""
        if self._across and self._are_few():
            self.write_zeros()

    def mean(self, variable: Any, divisor: Any) -> Any:
        """A variable's gradient, divided; a replica's share of it.

        Args:
            variable: The variable.
            divisor: What `divisor` returned.
        """
        gradient = tf.convert_to_tensor(self._sums[id(variable)].value)
        if divisor is not None:
            gradient /= tf.cast(divisor, gradient.dtype)
        return gradient

    def all(self) -> list[Any]:
        """All sums, over the replicas where it is read outside of them."""
        return [tf.convert_to_tensor(s.value) for s in self._sums.values()]

    def divisor(self) -> Any:
        """What the sums are to be divided by; None: by nothing."""
        if not self._across and not self._divides:
            return None
        denominator = tf.convert_to_tensor(self._denominator.value)
        # Without weight there is no gradient either: 0 / 1 is 0.
        one = tf.ones_like(denominator)
        return tf.where(denominator == 0, one, denominator)

    def flags(self, got: set[int]) -> dict[int, Any]:
        """Flags of the variables of which a trace does not know.

        Args:
            got: Ids of those of which it does.
        """
        flags = {}
        for group in self._groups:
            values = tf.convert_to_tensor(group.flags.value) > 0
            for index, variable in enumerate(group.variables):
                if id(variable) not in got:
                    flags[id(variable)] = values[index]
        return flags

    def flagged(self) -> set[int]:
        """Which variables got a gradient in this window, read now."""
        flags = self.flags(set())
        return {key for key, flag in flags.items() if bool(flag.numpy())}

    def write_zeros(self) -> None:
        """Empties them."""
        flags = [g.flags for g in self._groups if g.flags is not None]
        for v in [self._denominator, *self._sums.values(), *flags]:
            v.value.assign(tf.zeros_like(v.value))

    def _are_few(self) -> bool:
        shapes = (total.shape for total in self._sums.values())
        return sum(math.prod(shape) for shape in shapes) <= _FEW


def _local(shape: Any, dtype: str, name: str) -> Any:
    # One component for each replica, summed only when read outside of them.
    return keras.Variable(
        "zeros",
        shape=tuple(shape),
        dtype=wide(dtype),
        trainable=False,
        autocast=False,
        synchronization="on_read",
        aggregation="sum",
        name=name,
    )


def _wide(gradient: Any, dtype: Any, factor: Any) -> Any:
    """The gradient in the accumulator's dtype, times `factor`."""
    sparse = isinstance(gradient, tf.IndexedSlices)
    if sparse and tf.distribute.has_strategy():
        # A variable with one component a replica has no scatter-add.
        gradient, sparse = tf.convert_to_tensor(gradient), False
    values = tf.cast(gradient.values if sparse else gradient, dtype)
    if factor is not None:
        values = values * tf.cast(factor, dtype)
    return tf.IndexedSlices(values, gradient.indices) if sparse else values
