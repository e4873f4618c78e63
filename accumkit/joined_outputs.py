"""Whether the metrics of a batch see the outputs of all its pieces at once.

Updating metrics costs a fast model as much as training on a piece, so it is
done once a batch where the outputs are small enough to keep them until then.
Those of a language model are not.
"""

import math
from typing import Any

import keras

from accumkit import keras_internals

# Numbers in the outputs of a sample; 1,000 classes fit in, a token's do not.
MOST = 4096


def are_kept(model: Any, y_pred: Any) -> bool:
    """Whether the outputs of pieces are kept for the metrics.

    Args:
        model: The model.
        y_pred: The outputs of a piece, with the batch as first axis. A mask
            on one would not be kept with it.
    """
    if not keras_internals.has_metrics(model):
        return False
    leaves = keras.tree.flatten(y_pred)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    masks = [keras_internals.get_keras_mask(leaf) for leaf in leaves]
    if not all(shapes) or any(mask is not None for mask in masks):
        return False
    sizes: list[Any] = [n for shape in shapes for n in (shape or ())[1:]]
    return None not in sizes and MOST >= sum(
        math.prod((shape or ())[1:]) for shape in shapes
    )
