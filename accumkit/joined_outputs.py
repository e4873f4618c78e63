"""Whether the metrics of a batch see the outputs of all its pieces at once.

Updating metrics costs a fast model as much as training on a piece, so it is
done once a batch where the outputs are small enough to keep them until then.
Those of a language model are not.
"""

import math
from typing import Any

import keras

from accumkit import keras_internals

# Numbers in the outputs of a sample: 1,000 classes fit in, 4 kB; those of each
# token do not.
MOST = 1024


def are_kept(model: Any, rows: Any, y_pred: Any) -> bool:
    """Whether the outputs of pieces are kept for the metrics.

    Args:
        model: The model.
        rows: Samples in a piece.
        y_pred: The outputs of a piece. Only what has a row for each sample can
            be joined, and a mask on it would be lost.
    """
    if not keras_internals.has_metrics(model):
        return False
    numbers = 0
    for leaf in keras.tree.flatten(y_pred):
        shape: tuple[Any, ...] = tuple(getattr(leaf, "shape", None) or ())
        if not shape or None in shape or shape[0] != rows:
            return False
        if keras_internals.get_keras_mask(leaf) is not None:
            return False
        numbers += math.prod(shape[1:])
    return numbers <= MOST
