"""A window of gradients on TensorFlow: eager, in a graph, under a strategy.

Gradients are added to accumulators of each replica, in replica context.
Whether the window is full is decided in cross-replica context: a `tf.cond`
around the optimizer in replica context fails under `MirroredStrategy`, since
the optimizer itself calls `merge_call`. The taken branch goes back to the
replicas, so that gradients are all-reduced once per window.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from accumkit import keras_internals
from accumkit.backends.tensorflow import optimizing
from accumkit.backends.tensorflow.counts import Counts
from accumkit.backends.tensorflow.sums import Sums


def replica_id() -> int:
    """The replica that the calling code works for."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if replica is None else int(replica)


class Window:
    """Sums of gradients on their way to one optimizer step.

    Args:
        optimizer: The optimizer that takes the step.
        accumulation_steps: N, batches in a full window.
        strategy: The `tf.distribute.Strategy` under which it is trained.

    Attributes:
        across: Whether a window spans several batches.
        variables: Those of the train step that was run or traced last.
        recorder: A `WindowRecorder`, or None.
    """

    def __init__(
        self, optimizer: Any, accumulation_steps: int, strategy: Any = None
    ):
        self.optimizer = optimizer
        self.across = accumulation_steps > 1
        self.variables: list[Any] = []
        self.recorder: Any = None
        self._n = accumulation_steps
        # Where an optimizer was made, which knows no model.
        if strategy is None:
            strategy = keras_internals.distribution_strategy(optimizer)
        self._strategy = strategy
        self._sums: Any = None
        self._counts = Counts()
        # Whether the last train step ran outside of a graph.
        self._eager = True
        self._compiled: dict[Any, Any] = {}

    def track(self, variables: list[Any]) -> None:
        """Begins a train step: creates what is missing for its variables.

        Under a strategy the first call must be outside replica context.
        """
        self.variables = list(variables)
        self._eager = tf.executing_eagerly()
        if self.across and not self._counts.exist:
            self._sums = None  # those of a single train step have no flags
        if self._sums is None or self._sums.lacks(self.variables):
            scope = (
                self._strategy.scope()
                if tf.distribute.in_cross_replica_context()
                or not tf.distribute.has_strategy()
                else contextlib.nullcontext()
            )
            with tf.init_scope(), scope:
                if self.across:
                    self._counts.create(self._n)
                self._sums = self._sums or Sums(self.across)
                self._sums.create(self._sums.lacks(self.variables))
                if not self.optimizer.built:
                    self.optimizer.build(self.variables)
        sums: Any = self._sums
        sums.begin()

    @property
    def traveling_variables(self) -> list[Any]:
        """None: a train step on TensorFlow reaches its variables by itself."""
        return []

    def is_empty(self) -> Any:
        """Whether nothing has been added yet, before the first piece."""
        return self._counts.is_empty() if self.across else True

    def add(
        self, gradients: list[Any], first: Any, late: Any, divisor: Any
    ) -> None:
        """Adds the gradients of a micro-batch; see `Sums.add`."""
        if self.variables:
            self._sums.add(self.variables, gradients, first, late, divisor)

    def close_full(self, pieces: Any = 1) -> None:
        """Counts a batch; takes the optimizer step if the window is full.

        In replica context. When data runs out in the middle of a graph, ops
        that do not wait for it still run: call it under a control dependency
        on something that was computed from the batch, or a batch is counted
        that never came. `pieces` are its micro-batches.
        """

        def close(strategy: Any) -> None:
            got = self._sums.got
            if not self.across:
                self._apply(strategy, self.variables, got)
                return
            full = self._counts.count(pieces)
            if tf.executing_eagerly():
                if full:
                    _, got = self._flagged()
                    self._apply(strategy, self.variables, got)
                return
            known = {id(v) for v in self.variables}
            others = self._sums.variables()
            others = [v for v in others if id(v) not in known]
            optimizing.warn_of_missing(
                [v for v in self.variables if id(v) not in got]
            )

            def step():
                variables = self.variables + others
                self._apply(strategy, variables, got, self._sums.flags(got))
                return True

            tf.cond(full, step, lambda: False)

        tf.distribute.get_replica_context().merge_call(close)

    def take(self, gradients: list[Any], weight: Any = None) -> None:
        """Adds a micro-batch and closes the window if that fills it.

        `weight` is what it weighs, None for 1.

        Raises:
            ValueError: If it is called in cross-replica context.
        """
        if tf.distribute.get_replica_context() is None:
            raise ValueError(
                "`apply` must be called in replica context. Received: a call "
                "in the cross-replica context of a strategy. Call it in what "
                "`strategy.run` runs."
            )
        self.track(self.variables)
        given = 1.0 if weight is None else tf.stop_gradient(weight)
        # The optimizer sums over the replicas and D counts all of them.
        replicas = self._strategy.num_replicas_in_sync
        late = None
        if weight is not None or replicas > 1:
            late = tf.cast(given, keras.config.floatx()) * replicas
        self.add(gradients, self.is_empty(), late, given)
        ready = next(g for g in gradients if g is not None)
        if isinstance(ready, tf.IndexedSlices):
            ready = ready.values
        with tf.control_dependencies([ready]):
            self.close_full()

    def stateless_take(self, *values: Any) -> Any:
        """Raises: as in Keras, an optimizer on TensorFlow has no such form."""
        raise ValueError(
            "`stateless_apply` is not supported with the TensorFlow backend "
            "(nor is it in Keras). Received: an AccumulationOptimizer. Call "
            "`apply`."
        )

    def apply(self) -> None:
        """Takes the optimizer step of the open window, outside a trace."""
        variables, flagged = self._flagged()
        with self._strategy.scope():
            if not tf.distribute.has_strategy():
                self._apply(self._strategy, variables, flagged)
                return
            # The collectives of a strategy mix up their tensors when run
            # eagerly.
            key = frozenset(flagged)
            if key not in self._compiled:
                self._compiled[key] = tf.function(
                    lambda: self._apply(self._strategy, variables, flagged)
                )
            self._compiled[key]()

    def discard(self) -> None:
        """Empties the window, outside a trace."""
        if self._sums is None:
            return
        with self._strategy.scope():
            self._sums.write_zeros()
            self._counts.empty()

    def forget_traces(self) -> None:
        """Has everything compiled anew: optimizer or schedule has changed."""
        self._compiled = {}

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on."""
        self._n = accumulation_steps
        self.across = self.across or accumulation_steps > 1
        self._counts.set_steps(accumulation_steps)

    def open_batches(self) -> int:
        """How many batches the open window holds; waits for the device."""
        return self._counts.open_batches()

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds; waits for the device."""
        return self._counts.open_micro_batches()

    def _flagged(self) -> tuple[list[Any], set[int]]:
        """What got a gradient in this window, read now."""
        flagged = self._sums.flagged()
        known = self._sums.variables()
        if self._eager:
            # What was frozen since stays, as in stock Keras without a graph.
            known = self.variables
        return [v for v in known if id(v) in flagged], flagged

    def _apply(
        self,
        strategy: Any,
        variables: list[Any],
        got: set[int],
        flags: dict[int, Any] | None = None,
    ) -> None:
        """Hands the window's mean gradients to the optimizer, once.

        `flags` say who of `variables` got one beside those with ids in `got`,
        in a trace that shares the window with other traces.
        """
        if variables:
            divisor = self._sums.divisor()
            known = self.optimizer, self._sums, divisor
            with optimizing.recorded(self.recorder, *known):
                optimizing.step(strategy, *known, variables, got, flags or {})
        self._counts.empty()
