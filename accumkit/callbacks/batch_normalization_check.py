"""`BatchNormalizationCheck`: what accumulation does to BatchNormalization."""

import math
import warnings
from typing import Any

import keras

from accumkit import batch_statistics, checks
from accumkit.messages import AccumkitWarning
from accumkit.mixin import AccumulationMixin

_ACTIONS = ("warn", "raise", "rescale_momentum", "pool_statistics")


class BatchNormalizationCheck(keras.callbacks.Callback):
    """Finds active BatchNormalization layers at the start of training.

    In training mode BatchNormalization uses the statistics of one forward
    pass. Under accumulation that is a micro-batch, not the effective batch:
    the outputs, and so the gradients, cannot be those of the large batch. Its
    moving averages are updated with each micro-batch, N times per optimizer
    step, and forget faster. Only the second can be mended.

    With momentum m one update is μ ← m·μ + (1 − m)·x. N updates in a window
    leave m^N of the old average, where the large batch's single update leaves
    m. With the momentum m^(1/N) a full window leaves (m^(1/N))^N = m: it
    forgets exactly what one large batch would, and the N statistics share the
    weight 1 − m, the later ones a little more of it.

    Layers are found wherever they are nested, in backbones and in custom
    layers, synchronized ones included; frozen ones run on their moving
    averages and are left out. Silent for N = 1, other normalizations and
    frozen layers.

    With the statistics of all micro-batches of a window pooled,

        n = Σ nᵢ,  μ = Σ nᵢ·μᵢ / n,  v = Σ (nᵢ/n)·(vᵢ + (μᵢ − μ)²)

    and one update of the averages with them, a layer that sees the data
    itself has the moving averages of the large batch, for any partition. What
    a later layer sees was normalized micro-batch by micro-batch before.

    Example:

    ```python
    check = accumkit.callbacks.BatchNormalizationCheck("rescale_momentum")
    model.fit(x, y, batch_size=16, callbacks=[check])
    ```

    Args:
        action: `"warn"`: says once what differs and what to do. `"raise"`:
            refuses to train. `"rescale_momentum"`: trains with m^(1/N) and
            restores the layers afterwards, also after an exception; follows
            N when it changes between epochs. `"pool_statistics"`: one update
            a window with its pooled statistics; for models with
            `AccumulationMixin`. Defaults to `"warn"`.
        updates_per_optimizer_step: Int ≥ 1 or None, N, for batches whose size
            cannot be known beforehand (a dataset with `micro_batch_size`).
            Defaults to `None`, N from the model and from `fit`'s
            `batch_size`.

    Raises:
        ValueError: If `action` is unknown; in `fit` with `"raise"` if an
            active layer is found, with `"rescale_momentum"` if N cannot be
            known, and with `"pool_statistics"` if the model is without the
            mixin.
    """

    def __init__(
        self,
        action: str = "warn",
        updates_per_optimizer_step: int | None = None,
    ):
        super().__init__()
        self.action = checks.choice("action", action, _ACTIONS)
        if updates_per_optimizer_step is not None:
            updates_per_optimizer_step = checks.count(
                "updates_per_optimizer_step", updates_per_optimizer_step
            )
        self.updates_per_optimizer_step = updates_per_optimizer_step
        self._said: set[int] = set()
        self._momenta: list[tuple[Any, float]] = []
        self._updates: int | None = 1
        self._pools = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks for layers and acts."""
        model: Any = self.model
        if self.action == "pool_statistics":
            self._pool(model)
            return
        self._updates = self._count(model)
        layers = batch_statistics.active_layers(model)
        if not layers or self._updates == 1:
            return
        if self.action == "raise":
            raise ValueError(
                f"{self._report(layers)} Received: action='raise'. {_REMEDIES}"
            )
        if self.action == "warn":
            if id(model) not in self._said:
                self._said.add(id(model))
                warnings.warn(
                    f"{self._report(layers)} {_REMEDIES}",
                    AccumkitWarning,
                    stacklevel=2,
                )
            return
        self._rescale(model, layers)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Follows N when it has changed."""
        if self.action != "rescale_momentum":
            return
        model: Any = self.model
        updates = self._count(model)
        if updates != self._updates:
            self._restore()
            self._updates = updates
            if updates != 1:
                self._rescale(model, batch_statistics.active_layers(model))

    def on_fit_exit(self) -> None:
        """Restores the layers, also after an exception."""
        self._restore()
        if self._pools:
            self._pools = False
            self._model._accumulation.pooled_layers = {}
            self._model.make_train_function(force=True)

    def _count(self, model: Any) -> int | None:
        """N, updates of a moving average per optimizer step, if known."""
        if self.updates_per_optimizer_step is not None:
            return self.updates_per_optimizer_step
        if not isinstance(model, AccumulationMixin):
            return checks.builtin_steps(model.optimizer)
        pieces: int | None = 1
        if model.micro_batch_size is not None:
            batch_size = model._accumulation.fit_batch_size
            pieces = None
            if batch_size is not None:
                pieces = math.ceil(batch_size / model.micro_batch_size)
        return None if pieces is None else pieces * model.accumulation_steps

    def _report(self, layers: dict[str, Any]) -> str:
        size = getattr(self.model, "micro_batch_size", None)
        n = self._updates
        of_what = "a micro-batch" if size is None else f"{size} samples"
        share = "" if n is None else f" (1/{n} of the effective batch)"
        times = "several" if n is None else str(n)
        momenta = sorted({float(v.momentum) for v in layers.values()})
        effective = ""
        if n is not None:
            pairs = ", ".join(f"{m:g}^{n} = {m**n:.3g}" for m in momenta)
            effective = f", an effective momentum of {pairs}"
        paths = ", ".join(map(repr, layers))
        return (
            f"{len(layers)} active BatchNormalization layer(s): {paths}. Under "
            "accumulation they cannot do what they would with the large "
            f"batch: they normalize with the statistics of {of_what}{share}, "
            f"and update their moving averages {times} times per optimizer "
            f"step{effective}."
        )

    def _pool(self, model: Any) -> None:
        if not isinstance(model, AccumulationMixin):
            raise ValueError(
                "`action='pool_statistics'` needs a model with "
                "`accumkit.AccumulationMixin`, whose train step knows where a "
                f"window begins. Received: a `{type(model).__name__}`. Mix it "
                "into the model, or use `action='rescale_momentum'`."
            )
        layers = batch_statistics.active_layers(model)
        if not layers:
            return
        # Also where N is 1 today: it may change while training.
        state = model._accumulation
        if state.pooling is not None and state.pooling.layers != layers:
            state.pooling = None
        state.pooled_layers = layers
        self._pools = True
        model.make_train_function(force=True)

    def _rescale(self, model: Any, layers: dict[str, Any]) -> None:
        if self._updates is None:
            raise ValueError(
                "`action='rescale_momentum'` needs the number of micro-batches "
                "in a batch, which a dataset does not tell. Received: "
                f"micro_batch_size={model.micro_batch_size} and no "
                "`updates_per_optimizer_step`. Pass it: batch size divided by "
                "`micro_batch_size`, times `accumulation_steps`."
            )
        self._momenta = [(v, v.momentum) for v in layers.values()]
        for layer, momentum in self._momenta:
            layer.momentum = float(momentum) ** (1 / self._updates)
        model.make_train_function(force=True)

    def _restore(self) -> None:
        if not self._momenta:
            return
        for layer, momentum in self._momenta:
            layer.momentum = momentum
        self._momenta = []
        # What was traced has the rescaled numbers in it.
        self._model.make_train_function(force=True)


_REMEDIES = (
    "Use GroupNormalization or LayerNormalization, freeze the layers "
    "(`layer.trainable = False`), make micro-batches as large as memory "
    "allows, or repair the moving averages with "
    "`BatchNormalizationCheck(action='pool_statistics')`."
)
