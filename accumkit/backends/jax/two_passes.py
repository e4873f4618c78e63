"""A loss over the whole batch on JAX: forward, loss, and again, backward."""

from typing import Any

import jax
import keras
from jax import numpy as jnp

from accumkit import keras_internals, unlike_passes, weighting, whole_batch
from accumkit.backends.jax import joining, pieces


def run(
    model: Any, fixed: Any, state: Any, batch: Any, samples: Any
) -> tuple[Any, weighting.MicroBatch, Any, int]:
    """Works off a batch in pieces, with one loss; adds its gradients.

    The first pass runs all pieces forward and keeps only their outputs. The
    loss on all of them is differentiated by them, and directly by what is
    trained. The second pass runs each piece again, from the same state, and
    takes the gradient that its outputs have on through it.

    Args:
        model: The model.
        fixed: Values of the trainable and of the optimizer's variables.
        state: Values of the other variables, the metrics, and the window.
        batch: `(x, y, sample_weight)`, any nesting, batch first.
        samples: Its number of samples.

    Returns:
        The new state, the loss as it enters the window, the predictions, and
        the number of pieces.
    """
    accumulation = model._accumulation
    window = accumulation.window
    trainable, optimizer = fixed
    others, metrics, values = state
    variables = accumulation.forward_variables(model)
    layouts: list[whole_batch.Layout] = []

    def scope(trainable: Any, others: Any, metrics: Any) -> Any:
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(variables, others, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
            *zip(model.optimizer.variables, optimizer, strict=True),
        ]
        return keras.StatelessScope(mapping, collect_losses=True)

    def updates(scope: Any) -> tuple[Any, Any]:
        return (
            [scope.get_current_value(v) for v in variables],
            [scope.get_current_value(v) for v in model.metrics_variables],
        )

    def forward(
        trainable: Any, state: Any, x: Any, opens: Any = False
    ) -> tuple[Any, Any]:
        with scope(trainable, *state) as inner:
            with accumulation.forward(opens):
                y_pred = keras_internals.forward(model, x)
            outputs, layout = whole_batch.taken(model, x, y_pred, samples)
        layouts[:] = [layout]
        return outputs, updates(inner)

    def first(carry: Any, piece: Any) -> tuple[Any, Any]:
        state, opens = carry
        outputs, state = forward(trainable, state, piece, opens)
        return (state, jnp.zeros_like(opens)), outputs

    before = others, metrics
    size = accumulation.micro_batch_size
    full, last, count = pieces.cut(batch[0], size, False)
    if count > 1:
        few, more = (
            jax.eval_shape(forward, trainable, before, rows)[0]
            for rows in pieces.some_rows(full)
        )
        whole_batch.check_rows(few, more, full.size)
    carry, kept = pieces.loop(first, (before, values.first), full)
    carry, rest = last(carry)
    if rest is not None:
        carry, rest = first(carry, rest)
    after, _ = carry
    layout = layouts[0]
    joined = joining.in_order(full, kept, rest)
    outputs = layout.summed(joined)

    def objective(differentiable: Any, trainable: Any) -> tuple[Any, Any]:
        with scope(trainable, *after) as inner:
            replaced = layout.replaced(outputs, differentiable)
            y_pred = layout.hand_over(model, replaced)
            part = weighting.weigh(
                model, accumulation, batch, y_pred, values.first, samples
            )
        rest = part.contribution, part.divisor, part.late
        return part.objective, (rest, y_pred, updates(inner))

    gradients, (rest, y_pred, after) = jax.grad(
        objective, argnums=(0, 1), has_aux=True
    )(layout.differentiable(outputs), trainable)
    part = weighting.MicroBatch(None, *rest)
    values = window.add(values, gradients[1], part.late, part.divisor)
    by_rows, by_added = layout.cotangents(gradients[0])

    def second(carry: Any, piece: Any) -> tuple[Any, None]:
        state, values, worst = carry
        x, cotangents, seen = piece

        def again(trainable: Any) -> tuple[Any, Any]:
            outputs, new = forward(trainable, state, x)
            return layout.differentiable(outputs), (outputs, new)

        _, pull, (outputs, state) = jax.vjp(again, trainable, has_aux=True)
        (gradients,) = pull([*cotangents, *by_added])
        values = window.add(values, gradients, part.late, None)
        apart = unlike_passes.difference(model, seen, outputs.predictions)
        return (state, values, jnp.maximum(worst, apart)), None

    given = batch[0], by_rows, outputs.predictions
    full, last, _ = pieces.cut(given, size, False)
    carry = before, values, jnp.zeros((), "float32")
    carry, _ = pieces.loop(second, carry, full)
    carry, rest = last(carry)
    if rest is not None:
        carry, _ = second(carry, rest)
    _, values, worst = carry
    others, metrics = after
    with keras.StatelessScope(list(zip(variables, others, strict=True))) as end:
        accumulation.comparison.note(worst)
    others = [end.get_current_value(v) for v in variables]
    noted = part.contribution, part.divisor, samples, float(count)
    values = window.note(values, *noted)
    return (others, metrics, values), part, y_pred, count
