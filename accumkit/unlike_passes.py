"""Whether the two forward passes of a batch gave the same outputs.

They do, since all state of Keras is put back in between; random numbers that
`call` draws past Keras are others in the second pass, and the gradient would
belong to outputs that the loss has not seen.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

# Relative to the largest value of an output. A pass with gradients may round
# otherwise than one without.
_ROUNDING = {"float16": 0.05, "bfloat16": 0.1}
_ROUNDING_ELSE = 1e-3


class PassComparison:
    """The largest relative difference that was met, a variable.

    It hangs on no layer, so it is no weight. Create it where the model's other
    variables were created (under the same strategy).

    Attributes:
        variable: A scalar; 0 where passes differed by no more than rounding.
    """

    def __init__(self) -> None:
        self.variable = keras.Variable(
            "zeros",
            shape=(),
            dtype="float32",
            trainable=False,
            autocast=False,
            synchronization="on_read",
            aggregation="sum",
            name="pass_difference",
        )

    def note(self, difference: Any) -> None:
        """Keeps a difference if it is the largest; runs in the train step."""
        before = ops.convert_to_tensor(self.variable.value)
        self.variable.assign(ops.maximum(before, difference))

    def check(self) -> None:
        """Raises if passes have differed; waits for the device.

        Raises:
            ValueError: Once; then it is forgotten.
        """
        found = float(np.asarray(self.variable.numpy()))
        if found == 0:
            return
        self.variable.assign(np.zeros((), "float32"))
        raise ValueError(
            "`loss_over='batch'` runs the model forward twice, and both times "
            "it must return the same outputs. Received: outputs that differ "
            f"by {found:.3g} of their largest value, so the gradients were "
            "wrong. `call` draws random numbers past Keras (with `tf.random`, "
            "`torch.rand`, NumPy), or changes state that is no variable of "
            "the model. Draw them with `keras.random` and a "
            "`keras.random.SeedGenerator` that is an attribute of the layer."
        )


def difference(model: Any, first: list[Any], second: list[Any]) -> Any:
    """By how much outputs differ, relative to the largest value of each.

    Args:
        model: The model; its dtype says what rounding is.
        first: Predictions of one pass.
        second: Those of the other.

    Returns:
        A scalar float32 tensor, 0 where it is rounding.
    """
    worst: Any = ops.zeros((), "float32")
    for one, other in zip(first, second, strict=True):
        dtypes = model.compute_dtype, keras.backend.standardize_dtype(one.dtype)
        limit = max(_ROUNDING.get(d, _ROUNDING_ELSE) for d in dtypes)
        one, other = ops.cast(one, "float32"), ops.cast(other, "float32")
        scale = ops.maximum(ops.max(ops.abs(one), initial=0.0), 1e-30)
        apart = ops.max(ops.abs(one - other), initial=0.0) / scale
        # What is not finite is another's concern.
        wrong = ops.logical_and(apart > limit, ops.isfinite(apart))
        worst = ops.maximum(worst, ops.where(wrong, apart, 0.0))
    return worst
