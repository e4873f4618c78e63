"""How our callbacks reach the model that is trained."""

from typing import Any

import keras

from accumkit.mixin import AccumulationMixin


class ModelCallback(keras.callbacks.Callback):
    """Keeps the model at hand.

    On JAX each access to `self.model` brings the whole training state back
    into the model, which is needed to read or write variables and is far too
    much for anything done before every batch. `_owner` is the same model
    without that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = None

    def set_model(self, model: Any) -> None:
        """Keeps the model, as Keras's own method does.

        Args:
            model: The model that is going to be trained.
        """
        super().set_model(model)
        self._owner = model

    def _require_mixin(self, purpose: str) -> None:
        """Raises if the model keeps no windows.

        Args:
            purpose: What the callback does with them, for the message.

        Raises:
            TypeError: If it has no `AccumulationMixin`.
        """
        if not isinstance(self._owner, AccumulationMixin):
            raise TypeError(
                f"`{type(self).__name__}` {purpose} of a model with "
                "`AccumulationMixin`. Received: a model of class "
                f"{type(self._owner).__name__}. Mix it in, in front of the "
                "model class; without `accumulation_steps` it trains as "
                "before."
            )
