"""A loss over the whole batch on TensorFlow: forward, loss, again, backward."""

from typing import Any

import tensorflow as tf

from accumkit import (
    kept_state,
    keras_internals,
    unlike_passes,
    weighting,
    whole_batch,
)
from accumkit.backends.tensorflow import pieces, randomness


def run(
    model: Any, batch: Any, samples: Any
) -> tuple[weighting.MicroBatch, Any, Any]:
    """Works off a batch in pieces, with one loss; adds its gradients.

    The first pass runs all pieces forward and keeps only their outputs. The
    loss on all of them is differentiated by them, and directly by what is
    trained. The second pass runs each piece again, from the same state, and
    takes the gradient that its outputs have on through it.

    Args:
        model: The model.
        batch: `(x, y, sample_weight)`, any nesting, batch first.
        samples: Its number of samples.

    Returns:
        The loss as it enters the window, the predictions, and the number of
        pieces.
    """
    accumulation = model._accumulation
    window = accumulation.window
    replicas = model.distribute_strategy.num_replicas_in_sync
    size, compiled = accumulation.micro_batch_size, model.jit_compile
    state = model, randomness, accumulation.own_forward_variables
    before = kept_state.Snapshot(*state)
    layouts: list[whole_batch.Layout] = []

    def forward(x: Any, opens: Any = False) -> whole_batch.Outputs:
        with accumulation.forward(opens):
            y_pred = keras_internals.forward(model, x)
        outputs, layout = whole_batch.taken(model, x, y_pred, samples)
        layouts[:] = [layout]
        return outputs

    def opens(index: Any) -> Any:
        if window.across:
            return tf.logical_and(index == 0, window.is_empty())
        return index == 0

    x = batch[0]
    full, last, count = pieces.cut((x,), size, compiled)
    if not accumulation.findings.rows_checked:
        _check_rows(forward, x, size)
        accumulation.findings.rows_checked = True
        if tf.executing_eagerly():
            before.put_back()
    _, kept = pieces.loop(
        lambda carry, x, index: (carry, forward(x[0], opens(index))),
        [],
        full,
        lambda x: forward(x[0]),
    )
    (rest,) = last(kept)
    outputs = forward(rest, opens(count - 1))
    layout = layouts[0]
    if kept is not None:
        outputs = pieces.joined([kept, outputs])
    outputs = layout.summed(outputs)
    differentiable = layout.differentiable(outputs)
    first = window.is_empty()
    with tf.GradientTape() as tape:
        tape.watch(differentiable)
        y_pred = layout.hand_over(model, outputs)
        part = weighting.weigh(
            model, accumulation, batch, y_pred, first, samples, replicas
        )
    sources: Any = [differentiable, window.variables]
    both: Any = tape.gradient(part.objective, sources)
    gradients, direct = both
    # See `Window.close_full` on data that runs out.
    with tf.control_dependencies([part.contribution]):
        if window.variables:
            after = kept_state.Snapshot(*state)
            before.put_back()
            gradients = [
                None if g is None else tf.convert_to_tensor(g)
                for g in gradients
            ]
            cotangents = layout.cotangents(gradients)
            given = x, cotangents[0], outputs.predictions
            cut = pieces.cut(given, size, compiled)
            worst = _second(
                model,
                (forward, layout, opens),
                cut,
                cotangents[1],
                direct,
                part,
            )
            after.put_back()
            accumulation.comparison.note(worst)
        if window.recorder is not None:
            window.recorder.add(
                # The rows sum over replicas.
                part.contribution
                if part.divisor is not None
                else part.contribution / replicas,
                part.divisor,
                samples,
                tf.cast(count, "float32") / replicas,
            )
    return part, y_pred, count


def _second(
    model: Any,
    given: Any,
    cut: Any,
    by_added: list[Any],
    direct: list[Any],
    part: weighting.MicroBatch,
) -> Any:
    """Runs the second pass.

    Args:
        model: The model.
        given: What takes inputs to outputs, their layout, and what says
            whether a piece opens a window.
        cut: Inputs, gradients by predictions, and predictions, cut.
        by_added: Gradients by what layers add.
        direct: Gradients by the variables themselves.
        part: The loss as it enters the window.

    Returns:
        By how much the predictions differ from the first pass's.
    """
    forward, layout, opens = given
    window = model._accumulation.window

    def again(piece: Any) -> tuple[list[Any], Any]:
        x, cotangents, seen = piece
        with tf.GradientTape() as tape:
            outputs = forward(x)
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(
                layout.differentiable(outputs),
                [*cotangents, *by_added],
                strict=True,
            )
            if cotangent is not None
        ]
        gradients: list[Any] = [None] * len(window.variables)
        if pairs:
            tensors, given = map(list, zip(*pairs, strict=True))
            gradients = tape.gradient(tensors, window.variables, given)
        apart = unlike_passes.difference(model, seen, outputs.predictions)
        return gradients, apart

    def body(carry: list[Any], piece: Any, index: Any) -> Any:
        gradients, apart = again(piece)
        if _any(gradients):
            window.add(gradients, opens(index), part.late, None)
        return [tf.maximum(carry[0], apart)], None

    full, last, count = cut
    carry, _ = pieces.loop(body, [tf.zeros(())], full, lambda piece: None)
    gradients, apart = again(last(carry))
    first = opens(count - 1)
    # What is divided by counts once.
    if not _any(gradients):
        window.add(direct, first, part.late, part.divisor)
    else:
        window.add(gradients, first, part.late, part.divisor)
        if _any(direct):
            window.add(direct, False, part.late, None)
    return tf.maximum(carry[0], apart)


def _any(gradients: list[Any]) -> bool:
    return any(g is not None for g in gradients)


def _check_rows(forward: Any, x: Any, size: int) -> None:
    """Raises if the outputs cannot be joined; see `whole_batch.check_rows`."""
    found: list[Any] = []

    def look(rows: int) -> None:
        found.append(forward(pieces.first_rows(x, rows)))

    for rows in (size, size + 1):
        if tf.executing_eagerly():
            look(rows)
        else:  # Traced, and never run.
            tf.function(look, autograph=False).get_concrete_function(rows)
    few, more = found
    whole_batch.check_rows(few, more, size)
