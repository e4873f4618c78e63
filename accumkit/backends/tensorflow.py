"""Accumulation on TensorFlow: eager, graph, XLA and under a strategy.

The gradients of a micro-batch are added to accumulators of each replica, in
replica context. Whether the window is full is decided in cross-replica
context: a `tf.cond` around the optimizer in replica context fails under
`MirroredStrategy`, since the optimizer itself calls `merge_call`. The taken
branch goes back to the replicas, so that gradients are all-reduced once per
window.
"""

import contextlib
import math
from typing import Any, cast

import keras
import tensorflow as tf

from accumkit import keras_internals, observation, recording, weighting
from accumkit.backends import tensorflow_pieces as pieces
from accumkit.window_state import WindowState, wide_dtype

# Up to this many numbers writing zeros is faster than the branch that spares
# it: on a 784-128-10 net, micro-batch 1, the branch costs 7 % of a step.
_FEW = 2**20


def check_options(options: dict[str, Any]) -> None:
    """Nothing to refuse: all arguments of `compile` work."""


def create_variables(model: Any, state: WindowState) -> None:
    """Creates the variables of the window that are missing.

    Under a strategy this must run outside replica context.

    Args:
        model: A built model.
        state: Its window.
    """
    strategy = model.distribute_strategy
    scope = (
        strategy.scope()
        if tf.distribute.in_cross_replica_context()
        or not tf.distribute.has_strategy()
        else contextlib.nullcontext()
    )
    with tf.init_scope(), scope:
        if state.accumulation_steps > 1 and state.steps is None:
            n = state.accumulation_steps
            state.steps = _scalar(n, "accumulation_steps")
            state.window_steps = _scalar(n, "window_accumulation_steps")
            state.open_batches = _scalar(0, "open_batches")
            state.open_pieces = state.open_batches
            if state.micro_batch_size is not None:
                state.open_pieces = _scalar(0, "open_micro_batches")
        if state.denominator is None:
            state.denominator = _local((), keras.config.floatx(), "denominator")
        for variable in model.trainable_variables:
            if id(variable) not in state.accumulators:
                state.accumulators[id(variable)] = (
                    variable,
                    _local(variable.shape, variable.dtype, "accumulator"),
                )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if state.recording is not None and state.recorder is None:
            state.recorder = recording.WindowRecorder(*state.recording)


def _scalar(value: int, name: str) -> Any:
    return keras.Variable(
        value,
        dtype="int32",
        trainable=False,
        autocast=False,
        aggregation="only_first_replica",
        name=name,
    )


def _local(shape: Any, dtype: str, name: str) -> Any:
    # One component for each replica, summed only when read outside of them.
    return keras.Variable(
        "zeros",
        shape=tuple(shape),
        dtype=wide_dtype(dtype),
        trainable=False,
        autocast=False,
        synchronization="on_read",
        aggregation="sum",
        name=name,
    )


def traveling_variables(state: WindowState) -> list[Any]:
    """None: on TensorFlow a train step reaches its variables by itself."""
    return []


def train_step(model: Any, data: Any) -> dict[str, Any]:
    """Runs one batch; takes an optimizer step where it fills the window.

    Args:
        model: The model.
        data: A batch, `(x, y, sample_weight)` or a part of that.

    Returns:
        The logs, a dict of metric results.
    """
    state = model._accumulation
    batch = keras.utils.unpack_x_y_sample_weight(data)
    _build(model, *batch)
    create_variables(model, state)
    if not state.across and _has_few(state):
        _write_zeros(state)
    samples = observation.batch_size(batch[0])
    if state.micro_batch_size is None:
        count = 1
        loss, weight, y_pred = _micro_batch(model, state, batch, samples)
    else:
        loss, denominator, count, batch = _all_but_last_piece(
            model, state, batch, samples
        )
        last, weight, y_pred = _micro_batch(
            model, state, batch, samples, count - 1
        )
        value = tf.cast(weight.value, loss.dtype)
        loss += value * tf.cast(last, loss.dtype)
        if weight.divides:
            loss /= _nonzero(denominator + value)
    keras_internals.loss_tracker(model).update_state(
        loss, sample_weight=samples
    )
    x, y, sample_weight = batch
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    # When data runs out in the middle of a graph, ops that do not wait for it
    # still run: counting would count a batch that never came.
    with tf.control_dependencies([loss]):
        tf.distribute.get_replica_context().merge_call(
            lambda strategy: _close_full_window(strategy, model, state, count)
        )
    return logs


def _build(model: Any, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds what Keras would build in the first forward pass.

    The window's variables must exist before the loss is scaled and before
    anything runs in a loop. In a stateless scope nothing else is changed.
    """
    compiled = keras_internals.compile_loss(model)
    build_loss = (
        compiled is not None
        and not compiled.built
        and not keras_internals.overrides_compute_loss(model)
    )
    if model.built and not build_loss:
        return
    with keras.StatelessScope():
        y_pred = keras_internals.forward(model, x)
        if compiled is not None and build_loss:
            compiled(y, y_pred, sample_weight)


def _all_but_last_piece(
    model: Any, state: WindowState, batch: Any, samples: Any
) -> tuple[Any, Any, Any, Any]:
    """Works off all pieces of a batch but the last, which may be smaller.

    Returns:
        Σ D_i·L_i and Σ D_i of those pieces, the number of all pieces, and the
        last one.
    """
    size = cast(int, state.micro_batch_size)
    batch = pieces.checked(batch)
    if isinstance(samples, int):
        before = max((samples - 1) // size, 0)
    else:
        before = tf.maximum((samples - 1) // size, 0)
    rows = pieces.padded(batch, size) if model.jit_compile else batch
    zero = tf.zeros((), state.denominator.dtype)

    def body(index, loss, denominator):
        piece = pieces.full(rows, index * size, size)
        value, weight, y_pred = _micro_batch(
            model, state, piece, samples, index
        )
        keras_internals.update_metrics(model, piece, y_pred)
        count = tf.cast(weight.value, denominator.dtype)
        loss += count * tf.cast(value, loss.dtype)
        return index + 1, loss, denominator + count

    loss = denominator = zero
    if not isinstance(samples, int) or samples > size:
        _, loss, denominator = tf.while_loop(
            lambda index, *_: index < before,
            body,
            [0, zero, zero],
            parallel_iterations=1,
        )
    return loss, denominator, before + 1, pieces.rest(batch, before * size)


def _micro_batch(
    model: Any, state: WindowState, batch: Any, samples: Any, index: Any = 0
) -> tuple[Any, weighting.Weight, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Returns:
        Its loss, its weight and its predictions.
    """
    x = batch[0]
    variables = model.trainable_variables
    replicas = model.distribute_strategy.num_replicas_in_sync
    with tf.GradientTape() as tape:
        y_pred = keras_internals.forward(model, x)
        loss, weight = weighting.loss_and_weight(model, state, batch, y_pred)
        first = index == 0
        if state.across:
            first = tf.logical_and(first, state.open_pieces.value == 0)
        scaled = weighting.window_loss(model, loss, weight, first)
        factor = None
        if weight.divides and not state.whole:
            factor = tf.stop_gradient(
                tf.cast(weight.value, state.denominator.dtype)
            )
        state.divides = weight.divides and not state.whole
        if (
            factor is not None
            and weight.proportional
            and not state.across
            and replicas == 1
        ):
            # D is known beforehand: dividing each loss spares a pass over
            # the gradients.
            share = observation.batch_size(x), samples
            factor = tf.cast(share[0], factor.dtype) / _nonzero(
                tf.cast(share[1], factor.dtype)
            )
            state.divides = False
        if factor is not None:
            # Keras divides a replica's loss by the number of replicas; the
            # sum over the replicas is divided by D instead.
            factor = factor * replicas
        late = factor if weighting.weights_late(model, state) else None
        if factor is not None and late is None:
            scaled = scaled * tf.cast(factor, scaled.dtype)
        scaled = model.optimizer.scale_loss(scaled)
    gradients = tape.gradient(scaled, variables)
    # See `train_step` on data that runs out.
    with tf.control_dependencies([loss]):
        _accumulate(model, state, gradients, late, weight, first)
        if state.recorder is not None:
            state.means = weight.divides
            share = weight.value if weight.divides else 1 / replicas
            state.recorder.add(
                loss * replicas,
                share,
                observation.batch_size(x),
                1 / replicas,
            )
    return loss * replicas, weight, y_pred


def _accumulate(
    model: Any,
    state: WindowState,
    gradients: Any,
    factor: Any,
    weight: weighting.Weight,
    first: Any,
) -> None:
    """Adds to the window.

    The first micro-batch of a large model overwrites what was there, which
    takes over the gradient's memory as it is: no pass for zeros, none for the
    first sum. A small model finds zeros.
    """
    if _has_few(state):
        first = False
    pairs = []
    for variable, gradient in zip(
        model.trainable_variables, gradients, strict=True
    ):
        accumulator = state.accumulators[id(variable)][1].value
        if gradient is not None:
            state.touched.add(id(variable))
            gradient = _wide(gradient, accumulator.dtype, factor)
        pairs.append((accumulator, gradient, id(variable) in state.touched))
    if state.divides:
        value = tf.cast(weight.value, state.denominator.dtype)
        pairs.append((state.denominator.value, value, True))

    def overwrite():
        for accumulator, gradient, touched in pairs:
            if isinstance(gradient, tf.IndexedSlices) or (
                # Eagerly an earlier window's sum may lie there.
                gradient is None and (touched or model.run_eagerly)
            ):
                accumulator.assign(tf.zeros_like(accumulator))
            if isinstance(gradient, tf.IndexedSlices):
                accumulator.scatter_add(gradient)
            elif gradient is not None:
                accumulator.assign(gradient)
        return False

    def add():
        for accumulator, gradient, _ in pairs:
            if isinstance(gradient, tf.IndexedSlices):
                accumulator.scatter_add(gradient)
            elif gradient is not None:
                accumulator.assign_add(gradient)
        return False

    if isinstance(first, bool):
        (overwrite if first else add)()
    else:
        tf.cond(first, overwrite, add)


def _has_few(state: WindowState) -> bool:
    shapes = (a.shape for _, a in state.accumulators.values())
    return sum(math.prod(shape) for shape in shapes) <= _FEW


def _write_zeros(state: WindowState) -> None:
    state.denominator.value.assign(0)
    for _, accumulator in state.accumulators.values():
        accumulator.value.assign(tf.zeros_like(accumulator.value))


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


def _close_full_window(
    strategy: Any, model: Any, state: WindowState, count: Any
) -> None:
    """Counts the batch; takes the optimizer step if the window is full."""
    if not state.across:
        _apply(strategy, model, state)
        return
    state.open_batches.value.assign_add(1)
    if state.open_pieces is not state.open_batches:
        state.open_pieces.value.assign_add(count)

    def step():
        _apply(strategy, model, state)
        return True

    full = state.open_batches.value >= state.window_steps.value
    tf.cond(full, step, lambda: False)


def _apply(strategy: Any, model: Any, state: WindowState) -> None:
    """Hands the window's mean gradients to the optimizer, once."""
    if not model.trainable_variables:
        return
    denominator = tf.convert_to_tensor(state.denominator.value)
    divisor = _nonzero(denominator)
    rate: Any = None
    before: Any = None
    norm: Any = None
    if state.recorder is not None:
        rate = tf.convert_to_tensor(model.optimizer.learning_rate)
        before = tf.convert_to_tensor(model.optimizer.iterations)
        norm = _gradient_norm(model, state, divisor)

    def replica():
        gradients = []
        for variable in model.trainable_variables:
            accumulator = state.accumulators[id(variable)][1].value
            gradient = None
            if id(variable) in state.touched:
                gradient = tf.convert_to_tensor(accumulator)
                if state.divides:
                    gradient /= tf.cast(divisor, gradient.dtype)
            gradients.append(gradient)
        model.optimizer.apply(gradients, model.trainable_variables)
        if state.across and _has_few(state):
            _write_zeros(state)

    strategy.extended.call_for_each_replica(replica)
    if state.recorder is not None:
        after = tf.convert_to_tensor(model.optimizer.iterations)
        state.recorder.close(state.means, rate, norm, after - before)
    _empty_counts(state)
    if model.run_eagerly:
        # In a trace what got a gradient is settled; eagerly each window
        # finds out anew.
        state.touched.clear()


def _gradient_norm(model: Any, state: WindowState, divisor: Any) -> Any:
    if not state.recorder.gradient_norm:
        return 0.0
    gradients = [
        tf.convert_to_tensor(accumulator.value)
        for _, accumulator in state.accumulators.values()
    ]
    scale = model.optimizer.scale_loss(tf.ones(()))
    norm = recording.gradient_norm(gradients, scale)
    return norm / tf.cast(divisor, norm.dtype) if state.divides else norm


def _nonzero(denominator: Any) -> Any:
    # Without weight there is no gradient either: 0 / 1 is 0.
    return tf.where(denominator == 0, tf.ones_like(denominator), denominator)


def _empty_counts(state: WindowState) -> None:
    if state.across:
        state.open_batches.value.assign(0)
        state.open_pieces.value.assign(0)
        state.window_steps.value.assign(state.steps.value)


def apply_window(model: Any, state: WindowState) -> None:
    """Takes the optimizer step of the open window, outside a trace."""
    strategy = model.distribute_strategy
    with strategy.scope():
        if not tf.distribute.has_strategy():
            _apply(strategy, model, state)
            return
        # The collectives of a strategy mix up their tensors when run eagerly.
        # A new train function stands for a new optimizer or schedule.
        if state.applying is None or state.applying[0] is not (
            model.train_function
        ):
            state.applying = (
                model.train_function,
                tf.function(lambda: _apply(strategy, model, state)),
            )
        state.applying[1]()


def discard_window(model: Any, state: WindowState) -> None:
    """Empties the window, outside a trace."""
    with model.distribute_strategy.scope():
        _write_zeros(state)
        _empty_counts(state)
    if model.run_eagerly:
        state.touched.clear()


def sync(model: Any) -> None:
    """Nothing to do: variables are always readable."""
