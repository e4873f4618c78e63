"""Accumulation on JAX: stateless, compiled or not, data parallel or not.

Keras hands a train step its whole state and takes the new one back; the
window's variables travel at the end of the non-trainable ones. `lax.cond`
skips the optimizer's work inside a window, so that it costs nothing there.
The first micro-batch of a window overwrites the accumulators instead of
adding to them, so that nothing has to be reset.
"""

from typing import Any, cast

import jax
import keras
from jax import numpy as jnp

from accumkit import keras_internals, observation, recording, weighting
from accumkit.backends import jax_pieces as pieces
from accumkit.window_state import WindowState, wide_dtype


def check_options(options: dict[str, Any]) -> None:
    """Nothing to refuse: all arguments of `compile` work."""


def create_variables(model: Any, state: WindowState) -> None:
    """Creates the variables of the window that are missing.

    Args:
        model: A built model.
        state: Its window.
    """
    if state.accumulation_steps > 1 and state.steps is None:
        n = state.accumulation_steps
        state.steps = _scalar(n, "accumulation_steps")
        state.window_steps = _scalar(n, "window_accumulation_steps")
        state.open_batches = _scalar(0, "open_batches")
        state.open_pieces = _scalar(0, "open_micro_batches")
        state.denominator = _zeros((), keras.config.floatx(), "denominator")
    if state.across:
        for variable in model.trainable_variables:
            if id(variable) not in state.accumulators:
                state.accumulators[id(variable)] = (
                    variable,
                    _zeros(variable.shape, variable.dtype, "accumulator"),
                )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if state.recording is not None and state.recorder is None:
        state.recorder = recording.WindowRecorder(*state.recording)


def _scalar(value: int, name: str) -> Any:
    return keras.Variable(
        value, dtype="int32", trainable=False, autocast=False, name=name
    )


def _zeros(shape: Any, dtype: str, name: str) -> Any:
    return keras.Variable(
        "zeros",
        shape=tuple(shape),
        dtype=_wide(dtype),
        trainable=False,
        autocast=False,
        name=name,
    )


def _wide(dtype: Any) -> str:
    return wide_dtype(keras.backend.standardize_dtype(dtype))


def traveling_variables(state: WindowState) -> list[Any]:
    """Variables that Keras must hand through the train step."""
    variables = []
    if state.steps is not None:
        variables = [
            state.steps,
            state.window_steps,
            state.open_batches,
            state.open_pieces,
            state.denominator,
            *[accumulator for _, accumulator in state.accumulators.values()],
        ]
    if state.recorder is not None:
        variables += state.recorder.variables
    return variables


def train_step(model: Any, train_state: Any, data: Any) -> tuple[Any, Any]:
    """Runs one batch; takes an optimizer step where it fills the window.

    Args:
        model: The model.
        train_state: Trainable, non-trainable, optimizer and metrics variables.
        data: A batch, `(x, y, sample_weight)` or a part of that.

    Returns:
        The logs, and the new state.
    """
    state = model._accumulation
    batch = keras.utils.unpack_x_y_sample_weight(data)
    samples = observation.batch_size(batch[0])
    window = _Window(model, state, train_state)
    if state.micro_batch_size is None:
        count = 1
        loss, _, y_pred = _micro_batch(model, state, window, batch)
    else:
        loss, denominator, count, batch = _all_but_last_piece(
            model, state, window, batch
        )
        last, value, y_pred = _micro_batch(model, state, window, batch)
        loss = loss + value * last
        if state.divides:
            loss = loss / _nonzero(denominator + value)
    logs = _update_metrics(model, window, batch, y_pred, loss, samples)
    _close_full_window(model, state, window, count)
    return logs, window.train_state(model, state)


class _Window:
    """The train state, taken apart; its fields are replaced, not changed."""

    def __init__(self, model: Any, state: WindowState, train_state: Any):
        own = len(traveling_variables(state))
        self.trainable, others, self.optimizer, self.metrics = train_state
        split = len(others) - own
        self.others, self.own = others[:split], list(others[split:])
        self.steps = None
        self.records: list[Any] = []
        if state.recorder is not None:
            self.records = self.own[-3:]
        self.first: Any = True
        zero = jnp.zeros((), _wide(keras.config.floatx()))
        self.denominator = zero
        self.gradients: Any = None
        if state.steps is not None:
            self.steps, self.size, self.batches, self.pieces = self.own[:4]
            self.first = self.pieces == 0
            self.denominator = jnp.where(self.first, zero, self.own[4])
            paired = self._accumulators(state)
            self.gradients = [paired[id(v)] for v in model.trainable_variables]
        else:
            self.gradients = [
                jnp.zeros(v.shape, _wide(v.dtype)) for v in self.trainable
            ]

    def _accumulators(self, state: WindowState) -> dict[int, Any]:
        values = self.own[5 : len(self.own) - len(self.records)]
        return dict(zip(state.accumulators, values, strict=True))

    def carry(self) -> tuple[Any, ...]:
        """What one piece hands to the next."""
        return (
            self.others,
            self.metrics,
            self.gradients,
            self.denominator,
            self.first,
            self.records,
        )

    def take(self, carry: tuple[Any, ...]) -> None:
        """Takes what a piece handed on."""
        (
            self.others,
            self.metrics,
            self.gradients,
            self.denominator,
            self.first,
            self.records,
        ) = carry

    def train_state(self, model: Any, state: WindowState) -> tuple[Any, ...]:
        """The state as Keras wants it back."""
        own = []
        if self.steps is not None:
            ids = [id(v) for v in model.trainable_variables]
            paired = self._accumulators(state)
            paired |= zip(ids, self.gradients, strict=True)
            own = [
                self.steps,
                self.size,
                self.batches,
                self.pieces,
                self.denominator,
                *paired.values(),
            ]
        others = [*self.others, *own, *self.records]
        return self.trainable, others, self.optimizer, self.metrics


def _all_but_last_piece(
    model: Any, state: WindowState, window: _Window, batch: Any
) -> tuple[Any, Any, int, Any]:
    """Works off all pieces of a batch but the last, which may be smaller.

    Returns:
        Σ D_i·L_i and Σ D_i of those pieces, the number of all pieces, and the
        last one.
    """
    full, last, count = pieces.cut(batch, cast(int, state.micro_batch_size))
    zero = jnp.zeros((), window.denominator.dtype)
    if count == 1:
        return zero, zero, count, last

    def body(carry: Any, piece: Any) -> tuple[Any, None]:
        inner, loss, denominator = carry
        window.take(inner)
        value_of_loss, value, y_pred = _micro_batch(model, state, window, piece)
        _update_metrics(model, window, piece, y_pred)
        loss = loss + value * value_of_loss
        return (window.carry(), loss, denominator + value), None

    window.first = jnp.asarray(window.first)
    (inner, loss, denominator), _ = pieces.scan(
        body, (window.carry(), zero, zero), full
    )
    window.take(inner)
    return loss, denominator, count, last


def _micro_batch(
    model: Any, state: WindowState, window: _Window, batch: Any
) -> tuple[Any, Any, Any]:
    """Forward and backward pass of one micro-batch; adds its gradients.

    Returns:
        Its loss, its weight D_i and its predictions.
    """
    x = batch[0]
    late = weighting.weights_late(model, state)
    others = model.non_trainable_variables
    others = others[: len(others) - len(window.own)]

    def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(others, window.others, strict=True),
            *zip(model.metrics_variables, window.metrics, strict=True),
            *zip(model.optimizer.variables, window.optimizer, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            y_pred = keras_internals.forward(model, x)
            # The mask on a prediction does not outlive this function.
            loss, weight = weighting.loss_and_weight(
                model, state, batch, y_pred
            )
            scaled = weighting.window_loss(model, loss, weight, window.first)
            state.divides = weight.divides and not state.whole
            state.means = weight.divides
            value = jax.lax.stop_gradient(
                jnp.asarray(weight.value, window.denominator.dtype)
            )
            if state.divides and not late:
                scaled = scaled * value.astype(scaled.dtype)
            scaled = model.optimizer.scale_loss(scaled)
        updates = (
            [scope.get_current_value(v) for v in others],
            [scope.get_current_value(v) for v in model.metrics_variables],
        )
        return scaled, (loss, value, y_pred, updates)

    gradients, (loss, value, y_pred, updates) = jax.grad(
        loss_and_updates, has_aux=True
    )(window.trainable)
    window.others, window.metrics = updates
    _accumulate(window, gradients, value if late and state.divides else None)
    if state.divides:
        window.denominator = window.denominator + value
    window.first = jnp.zeros_like(window.first)
    if state.recorder is not None:
        samples = observation.batch_size(x)
        window.records = _recorded(
            state, window.records, "add", loss, value, samples
        )
    return loss.astype(value.dtype), value, y_pred


def _recorded(
    state: WindowState, records: list[Any], method: str, *arguments: Any
) -> list[Any]:
    """Runs a method of the recorder on the values that travel."""
    recorder = state.recorder
    mapping = list(zip(recorder.variables, records, strict=True))
    with keras.StatelessScope(mapping) as scope:
        getattr(recorder, method)(*arguments)
    return [scope.get_current_value(v) for v in recorder.variables]


def _accumulate(window: _Window, gradients: Any, factor: Any) -> None:
    added = []
    for total, gradient in zip(window.gradients, gradients, strict=True):
        gradient = gradient.astype(total.dtype)
        if factor is not None:
            gradient = gradient * factor.astype(total.dtype)
        # One fused pass; the first micro-batch of a window needs no zeros.
        added.append(jnp.where(window.first, gradient, total + gradient))
    window.gradients = added


def _update_metrics(
    model: Any,
    window: _Window,
    batch: Any,
    y_pred: Any,
    loss: Any = None,
    samples: Any = None,
) -> Any:
    x, y, sample_weight = batch
    mapping = zip(model.metrics_variables, window.metrics, strict=True)
    with keras.StatelessScope(list(mapping)) as scope:
        logs = None
        if loss is None:
            keras_internals.update_metrics(model, batch, y_pred)
        else:
            keras_internals.loss_tracker(model).update_state(
                loss, sample_weight=samples
            )
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
    window.metrics = [
        scope.get_current_value(v) for v in model.metrics_variables
    ]
    return logs


def _close_full_window(
    model: Any, state: WindowState, window: _Window, count: int
) -> None:
    """Counts the batch; takes the optimizer step if the window is full."""
    before = (window.trainable, window.optimizer, window.records)
    sums = (window.gradients, window.denominator)
    if window.steps is None:
        after = _apply(model, state, *before, *sums)
        window.trainable, window.optimizer, window.records = after
        return
    full = window.batches + 1 >= window.size
    window.trainable, window.optimizer, window.records = jax.lax.cond(
        full,
        lambda: _like(before, _apply(model, state, *before, *sums)),
        lambda: before,
    )
    window.size = jnp.where(full, window.steps, window.size)
    window.batches = jnp.where(full, 0, window.batches + 1)
    window.pieces = jnp.where(full, 0, window.pieces + count)


def _like(old: Any, new: Any) -> Any:
    # Both branches must return the same types, weak ones included.
    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), old, new)


def _apply(
    model: Any,
    state: WindowState,
    trainable: Any,
    optimizer: Any,
    records: Any,
    gradients: Any,
    denominator: Any,
) -> tuple[Any, Any, Any]:
    """Hands the window's mean gradients to the optimizer, once."""
    if not trainable:
        return trainable, optimizer, records
    if state.divides:
        divisor = _nonzero(denominator)
        gradients = [g / divisor.astype(g.dtype) for g in gradients]
    new = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    if state.recorder is not None:
        rate, before, scale = _read_optimizer(model, optimizer)
        stepped = _read_optimizer(model, new[1])[1] - before
        norm = 0.0
        if state.recorder.gradient_norm:
            norm = recording.gradient_norm(gradients, scale)
        records = _recorded(
            state, records, "close", state.means, rate, norm, stepped
        )
    return *new, records


def _read_optimizer(model: Any, values: Any) -> tuple[Any, Any, Any]:
    """Learning rate, iterations and loss scale of an optimizer's state."""
    optimizer = model.optimizer
    mapping = list(zip(optimizer.variables, values, strict=True))
    with keras.StatelessScope(mapping):
        return (
            keras.ops.convert_to_tensor(optimizer.learning_rate),
            keras.ops.convert_to_tensor(optimizer.iterations),
            optimizer.scale_loss(jnp.ones(())),
        )


def _nonzero(denominator: Any) -> Any:
    # Without weight there is no gradient either: 0 / 1 is 0.
    return jnp.where(denominator == 0, 1, denominator)


def apply_window(model: Any, state: WindowState) -> None:
    """Takes the optimizer step of the open window, outside a trace."""
    trainable = model.trainable_variables
    optimizer = model.optimizer.variables
    records = state.recorder.variables if state.recorder is not None else []
    gradients = [state.accumulators[id(v)][1].value for v in trainable]

    def step(*values: Any) -> Any:
        return _apply(model, state, *values)

    # A new train function stands for a new optimizer or schedule.
    if state.applying is None or state.applying[0] is not model.train_function:
        compiled = step if model.run_eagerly else jax.jit(step)
        state.applying = (model.train_function, compiled)
    variables = (trainable, optimizer, records)
    new = state.applying[1](
        *[[v.value for v in several] for several in variables],
        gradients,
        state.denominator.value,
    )
    for several, values in zip(variables, new, strict=True):
        for variable, value in zip(several, values, strict=True):
            variable.assign(value)
    discard_window(model, state)


def discard_window(model: Any, state: WindowState) -> None:
    """Empties the window, outside a trace."""
    if state.across:
        state.open_batches.assign(0)
        state.open_pieces.assign(0)
        # A copy: Keras donates the buffers, and none may be donated twice.
        state.window_steps.assign(jnp.array(state.steps.value))


def sync(model: Any) -> None:
    """Makes the model's variables readable in the middle of `fit`."""
    model.jax_state_sync()
