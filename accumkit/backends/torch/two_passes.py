"""A loss over the whole batch on torch: forward, loss, and again, backward."""

from typing import Any

import torch

from accumkit import (
    kept_state,
    keras_internals,
    observation,
    unlike_passes,
    weighting,
    whole_batch,
)
from accumkit.backends.torch import pieces, randomness


def run(
    model: Any, batch: Any, samples: int
) -> tuple[weighting.MicroBatch, Any, int]:
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
    size = accumulation.micro_batch_size
    full, last, count = pieces.cut(batch[0], size)
    several = [*full, last]
    state = model, randomness, accumulation.own_forward_variables
    before = kept_state.Snapshot(*state)

    def forward(
        x: Any, opens: bool = False
    ) -> tuple[whole_batch.Outputs, whole_batch.Layout]:
        with accumulation.forward(opens):
            y_pred = keras_internals.forward(model, x)
        return whole_batch.taken(model, x, y_pred, samples)

    with torch.no_grad():
        if count > 1 and not accumulation.findings.rows_checked:
            more, _, _ = pieces.cut(batch[0], size + 1)
            few = forward(several[0])[0], forward([*more, batch[0]][0])[0]
            before.put_back()
            whole_batch.check_rows(*few, size)
            accumulation.findings.rows_checked = True
        opens = window.is_empty()
        passed = [
            forward(piece, opens and index == 0)
            for index, piece in enumerate(several)
        ]
        layout = passed[0][1]
        joined = pieces.joined([outputs for outputs, _ in passed])
        outputs = layout.summed(joined)
    leaves = [v.requires_grad_() for v in layout.differentiable(outputs)]
    y_pred = layout.hand_over(model, layout.replaced(outputs, leaves))
    part = weighting.weigh(
        model, accumulation, batch, y_pred, window.is_empty(), samples
    )
    if window.variables:
        after = kept_state.Snapshot(*state)
        part.objective.backward()
        window.add_grad(part.late, part.divisor)
        by_rows, by_added = layout.cotangents([v.grad for v in leaves])
        before.put_back()
        worst: Any = torch.zeros(())
        for index, piece in enumerate(several):
            again, _ = forward(piece)
            rows = slice(index * size, (index + 1) * size)
            cotangents = [None if g is None else g[rows] for g in by_rows]
            _backward(layout.differentiable(again), [*cotangents, *by_added])
            window.add_grad(part.late, None)
            with torch.no_grad():
                seen = [v[rows] for v in outputs.predictions]
                apart = unlike_passes.difference(model, seen, again.predictions)
                worst = torch.maximum(worst.to(apart.device), apart)
        after.put_back()
        accumulation.comparison.note(worst)
    part.objective = None  # and with it its graph
    part.contribution = part.contribution.detach()
    if window.recorder is not None:
        with torch.no_grad():
            window.recorder.add(
                part.contribution,
                part.divisor,
                observation.batch_size(batch[0]),
                float(count),
            )
    return part, y_pred, count


def _backward(outputs: list[Any], cotangents: list[Any]) -> None:
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if cotangent is not None and output.requires_grad
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)
