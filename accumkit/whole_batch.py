"""The outputs of a batch, joined from those of its pieces for the loss.

A loss over the batch needs all that a forward pass hands to it: predictions,
the Keras masks on them, and losses that layers added. A scalar among the last
is a mean over the samples, of which a piece has its share; a tensor of values
is a sum over them. See `added_losses`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from accumkit import keras_internals, weighting
from accumkit.observation import batch_size


class Outputs(NamedTuple):
    """What a piece, or a batch, hands to the loss; a pytree of tensors.

    Attributes:
        predictions: Flat, the samples first.
        masks: On those that have one.
        added: A tensor of shape `(pieces,)` for each loss that layers added:
            what each piece adds to that of the batch.
    """

    predictions: list[Any]
    masks: list[Any]
    added: list[Any]


@dataclass(frozen=True)
class Layout:
    """What `Outputs` look like, the same for all pieces.

    Attributes:
        structure: Nesting of the predictions, their places in it.
        masked: Places of those with a mask.
        scalars: Of each added loss, whether it is one number.
        floating: Of each prediction, whether it has a gradient.
    """

    structure: Any
    masked: tuple[int, ...]
    scalars: tuple[bool, ...]
    floating: tuple[bool, ...]

    def differentiable(self, outputs: Outputs) -> list[Any]:
        """What the loss is differentiated by: predictions, added losses."""
        pairs = zip(outputs.predictions, self.floating, strict=True)
        return [v for v, floats in pairs if floats] + list(outputs.added)

    def replaced(self, outputs: Outputs, differentiable: list[Any]) -> Outputs:
        """Outputs with other tensors in place of the differentiable ones."""
        new = iter(differentiable)
        pairs = zip(outputs.predictions, self.floating, strict=True)
        predictions = [next(new) if floats else v for v, floats in pairs]
        return outputs._replace(predictions=predictions, added=list(new))

    def summed(self, outputs: Outputs) -> Outputs:
        """The outputs of a batch, with one tensor for each added loss.

        Args:
            outputs: Joined from those of all pieces.
        """
        pairs = zip(outputs.added, self.scalars, strict=True)
        added = [ops.sum(v, keepdims=not scalar) for v, scalar in pairs]
        return outputs._replace(added=added)

    def cotangents(self, gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients of the loss, by predictions and by what a piece adds.

        Args:
            gradients: By what `differentiable` returned of the `summed`
                outputs; None where the loss does not depend on one.

        Returns:
            Those by predictions, to be cut like the batch, and those by added
            losses, of shape `(1,)`, the same for each piece.
        """
        split = sum(self.floating)
        added = [
            None if g is None else ops.reshape(g, (1,))
            for g in gradients[split:]
        ]
        return list(gradients[:split]), added

    def hand_over(self, model: Any, outputs: Outputs) -> Any:
        """Makes a model's state that after a forward pass of the batch.

        Args:
            model: The model, whose loss is to be computed.
            outputs: Those of the batch, `summed`.

        Returns:
            The predictions, nested as `call` returned them, with their masks.
        """
        keras_internals.replace_added_losses(model, outputs.added)
        for at, mask in zip(self.masked, outputs.masks, strict=True):
            keras_internals.set_keras_mask(outputs.predictions[at], mask)
        return keras.tree.map_structure(
            lambda at: None if at is None else outputs.predictions[at],
            self.structure,
        )


def taken(
    model: Any, x: Any, y_pred: Any, samples: Any
) -> tuple[Outputs, Layout]:
    """Takes what a forward pass of a piece hands to the loss.

    Args:
        model: The model, after its forward pass.
        x: The piece's inputs.
        y_pred: Its predictions.
        samples: Samples of the whole batch.

    Returns:
        The outputs, and what they look like.
    """
    rows = batch_size(x)
    predictions: list[Any] = []
    masks: list[Any] = []

    def place(leaf: Any) -> Any:
        if leaf is None:
            return None
        predictions.append(ops.convert_to_tensor(leaf))
        masks.append(keras_internals.get_keras_mask(leaf))
        return len(predictions) - 1

    structure = keras.tree.map_structure(place, y_pred)
    losses, _ = keras_internals.added_losses(model)
    scalars = tuple(not len(loss.shape) for loss in losses)
    added = []
    for loss, scalar in zip(losses, scalars, strict=True):
        if scalar:
            loss = loss * weighting.share(rows, samples, loss.dtype)
        added.append(ops.reshape(ops.sum(loss), (1,)))
    layout = Layout(
        structure,
        tuple(at for at, mask in enumerate(masks) if mask is not None),
        scalars,
        tuple(keras.backend.is_float_dtype(v.dtype) for v in predictions),
    )
    present = [mask for mask in masks if mask is not None]
    return Outputs(predictions, present, added), layout


def check_rows(few: Outputs, more: Outputs, rows: int) -> None:
    """Raises if the outputs of a sample depend on how many there are.

    Args:
        few: Outputs of `rows` samples.
        more: Outputs of one sample more. Shapes are enough of both.
        rows: How many.

    Raises:
        ValueError: If outputs have another axis than the first, or no axis,
            for the samples: then they cannot be joined.
    """
    for one, other in zip(few.predictions, more.predictions, strict=True):
        first, second = tuple(one.shape), tuple(other.shape)
        fits = first[:1] in ((rows,), (None,)) and second[:1] in (
            (rows + 1,),
            (None,),
        )
        if fits and first[1:] == second[1:]:
            continue
        raise ValueError(
            "`loss_over='batch'` runs the model on `micro_batch_size` samples "
            "at a time and joins the outputs along their first axis: each "
            "sample must have outputs of its own, of a shape that does not "
            "depend on how many samples there are. Received: outputs of shape "
            f"{first} for {rows} samples and {second} for {rows + 1}. If "
            "`call` couples the samples (multiplies embeddings of all with "
            "each other, say), return the embeddings, and make the logits in "
            "`compute_loss` or in the loss function."
        )
