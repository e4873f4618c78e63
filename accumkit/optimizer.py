"""`AccumulationOptimizer`: gradient accumulation under any train step."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import keras

from accumkit import checks
from accumkit.backends import processes, windows


@keras.saving.register_keras_serializable(package="accumkit")
class AccumulationOptimizer(keras.optimizers.Optimizer):
    """Wraps an optimizer so that it steps once per N micro-batches.

    For models that bring their own `train_step` and for training loops
    without `fit`: each call of `apply` is one micro-batch, and every N-th
    hands the mean gradient of the window to the wrapped optimizer. In between
    no variable changes, not by a bit. Iterations, learning-rate schedules,
    weight decay, clipping and moving averages count optimizer steps.

    It sees gradients, not samples, so that micro-batches weigh the same by
    default: exact where they are equally large. For others say what each
    weighs, see `micro_batch_weight`. Where `fit` trains the model with Keras's
    own train step, `AccumulationMixin` finds that out by itself.

    A window still open at the end of an epoch stays open: use
    `accumkit.callbacks.OptimizerRemainder`, or call
    `apply_accumulated_gradients`. An open window is not part of a saved file.

    Under `mixed_float16` `compile` wraps this optimizer in a
    `LossScaleOptimizer`: a micro-batch whose gradients are not finite is left
    out, and its window takes one more. To skip the whole window, as the large
    batch would be, wrap it inside:
    `AccumulationOptimizer(LossScaleOptimizer(...), N)` with
    `compile(auto_scale_loss=False)`.

    Example:

    ```python
    optimizer = accumkit.AccumulationOptimizer("adam", accumulation_steps=8)
    plain = keras.Sequential([keras.layers.Dense(1)])
    plain.compile(optimizer, "mse")
    plain.fit(
        x,
        y,
        batch_size=4,
        callbacks=[accumkit.callbacks.OptimizerRemainder()],
    )
    ```

    Args:
        optimizer: Name, config or instance of the optimizer to wrap, also a
            `LossScaleOptimizer` or `MultiOptimizer`. It must not accumulate
            itself.
        accumulation_steps: Int ≥ 1, N: micro-batches of an optimizer step. 1
            passes gradients straight on.
        weighting: `"uniform"`: the mean of the micro-batches' gradients.
            `"exact"`: their mean weighted by what `micro_batch_weight` was
            given. Defaults to `"uniform"`.
        name: Name of this optimizer. Defaults to `None`, an automatic one.

    Raises:
        TypeError: If `accumulation_steps` is not an integer.
        ValueError: If it is below 1, `weighting` is unknown, or the optimizer
            accumulates gradients itself.
    """

    def __init__(
        self,
        optimizer: Any,
        accumulation_steps: int,
        weighting: str = "uniform",
        name: str | None = None,
    ):
        steps = checks.count("accumulation_steps", accumulation_steps)
        checks.choice("weighting", weighting, ("uniform", "exact"))
        if isinstance(optimizer, dict):
            optimizer = copy.deepcopy(optimizer)  # Keras writes into it.
        inner = keras.optimizers.get(optimizer)
        if inner is None:
            raise ValueError(
                "`optimizer` must be the name, config or instance of an "
                "optimizer. Received: optimizer=None. Pass 'adam', say."
            )
        checks.accumulates_alone(inner, "accumulation_steps", steps)
        for one in checks.nested_optimizers(inner):
            if isinstance(one, AccumulationOptimizer):
                raise ValueError(
                    "`optimizer` must not hold another AccumulationOptimizer: "
                    "the two would multiply. Received: "
                    f"accumulation_steps={steps} around accumulation_steps="
                    f"{one.accumulation_steps}. Use one of them."
                )
        # Rate and counter of the base class are never used or saved.
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        self._accumulation_steps = steps
        self._weighting = weighting
        self._weights: dict[int, Any] = {}  # by replica, while it is worked off
        self._trained: tuple[Any, ...] = ()
        self._window: Any = None

    def build(self, variables: Any) -> None:
        """Creates the variables of the window and the wrapped optimizer.

        Args:
            variables: The variables that will be trained.
        """
        if self.built:
            return
        checks.gradients_have_means("`accumulation_steps`", variables)
        processes.check_strategy("AccumulationOptimizer")
        # A tuple: Keras tracks what lies in lists.
        self._trained = tuple(variables)
        if self.accumulation_steps > 1:
            make: Any = windows.Window
            window = make(self.inner_optimizer, self.accumulation_steps)
            window.track(list(variables))
            self._window = window
        elif not self.inner_optimizer.built:
            self.inner_optimizer.build(list(variables))
        super().build(list(variables))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Takes the gradients of a micro-batch.

        Args:
            grads: Gradients, one for each variable; None where there is none.
                A variable that gets none in a whole window stays untouched.
            trainable_variables: The variables. Defaults to `None`: those that
                the optimizer was built with.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        self._check_built("apply(grads)")
        if self._window is None:
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        grads = self._ordered(grads, trainable_variables)
        self._window.take(grads, self._weight())

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Takes the gradients of a micro-batch, as pairs.

        Args:
            grads_and_vars: Pairs of gradient and variable.

        Returns:
            `iterations`.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return self.iterations

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """As `apply`, on values that are handed in and back; on JAX only.

        Args:
            optimizer_variables: Values of `variables`.
            grads: Gradients, one for each variable.
            trainable_variables: Values of the variables that are trained.

        Returns:
            The new values of the trained variables and of `variables`.
        """
        self._check_built("stateless_apply(...)")
        expected = len(self.variables)
        if len(optimizer_variables) != expected:
            raise ValueError(
                "`optimizer_variables` must hold one value for each of the "
                f"{expected} `variables`. Received: "
                f"{len(optimizer_variables)} values. Take them from a built "
                "optimizer."
            )
        if self._window is None:
            return self.inner_optimizer.stateless_apply(
                optimizer_variables, grads, trainable_variables
            )
        return self._window.stateless_take(
            self._ordered(list(grads), None),
            self._weight(),
            list(optimizer_variables),
            list(trainable_variables),
        )

    def _check_built(self, call: str) -> None:
        if not self.built:
            raise ValueError(
                f"`{call}` needs an optimizer that knows its variables. "
                "Received: an AccumulationOptimizer that is not built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )

    def _ordered(self, grads: list[Any], variables: Any) -> list[Any]:
        """One gradient or None for each variable, in the order of `build`."""
        trained = self._trained
        if variables is None:
            variables = trained
        given = {id(v): g for g, v in zip(grads, variables, strict=False)}
        unknown = given.keys() - {id(v) for v in trained}
        if unknown or len(grads) != len(variables):
            raise ValueError(
                "`grads` must go with the variables that the optimizer was "
                f"built with. Received: {len(grads)} gradients for "
                f"{len(variables)} variables, {len(unknown)} of them unknown. "
                "Use a new optimizer for new variables."
            )
        if all(gradient is None for gradient in grads):
            raise ValueError(
                "`grads` must hold a gradient. Received: None for all of "
                f"{len(grads)} variables. Does the loss depend on them?"
            )
        return [given.get(id(v)) for v in trained]

    @contextlib.contextmanager
    def micro_batch_weight(self, value: Any) -> Iterator[None]:
        """Says what a micro-batch weighs in its window, under `"exact"`.

        The window's gradient is Σ D_i·g_i / Σ D_i. It is that of the large
        batch if D_i is what the loss of the micro-batch was divided by: the
        number of its samples, of its unmasked tokens, or the sum of its
        weights. Ignored under `"uniform"`.

        It is a context, since train steps, `LossScaleOptimizer` and
        `MultiOptimizer` call `apply` with gradients and variables only; so
        it also works around a train step that is not yours. Under
        `mixed_float16` this optimizer is `self.optimizer.inner_optimizer`.

        Example:

        ```python
        class Tagger(keras.Model):
            def train_step(self, *args):  # of Keras, on any backend
                x, y = args[-1]
                known = keras.ops.sum(keras.ops.cast(y >= 0, "float32"))
                with self.optimizer.micro_batch_weight(known):
                    return super().train_step(*args)
        ```

        Args:
            value: Number or scalar tensor ≥ 0, D_i.

        Yields:
            None. What the `with` block applies has this weight.
        """
        weights, replica = self._weights, windows.replica_id()
        before = weights.get(replica)
        weights[replica] = value
        try:
            yield
        finally:
            weights[replica] = before

    def _weight(self) -> Any:
        if self._weighting == "uniform":
            return None
        value = self._weights.get(windows.replica_id())
        if value is None:
            raise ValueError(
                "`weighting='exact'` needs to be told what a micro-batch "
                "weighs. Received: gradients without a weight. Call `apply`, "
                "or the train step, in a `with optimizer.micro_batch_weight("
                "value):` block, or use `weighting='uniform'`."
            )
        return value

    @property
    def accumulation_steps(self) -> int:
        """N, the number of micro-batches in a full window.

        Settable: an open window keeps its N, the next one has the new N.
        Nothing is traced anew.
        """
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        steps = checks.count("accumulation_steps", value)
        if self.built and self._window is None and steps != 1:
            raise ValueError(
                "`accumulation_steps` must not leave 1 once the optimizer is "
                f"built: it keeps no window. Received: {steps}. Construct it "
                "with 2 or more, then set 1."
            )
        self._accumulation_steps = steps
        if self._window is not None:
            self._window.set_steps(steps)

    @property
    def open_micro_batches(self) -> int:
        """How many micro-batches the open window holds; 0 if none is open.

        On JAX `fit` hands variables back at the end of an epoch, and sooner
        to a callback that reads its `model`.
        """
        return 0 if self._window is None else self._window.open_batches()

    def apply_accumulated_gradients(self) -> int:
        """Takes an optimizer step with what the open window holds.

        Returns:
            Int, the number of micro-batches in it. With 0 nothing changes.
        """
        count = self.open_micro_batches
        if count:
            self._window.apply()
        return count

    def discard_accumulated_gradients(self) -> int:
        """Forgets what the open window holds.

        Returns:
            Int, the number of micro-batches in it. With 0 nothing changes.
        """
        count = self.open_micro_batches
        if count:
            self._window.discard()
        return count

    @property
    def variables(self) -> list[Any]:
        """Those of the wrapped optimizer; on JAX those of the window follow.

        There `stateless_apply` is handed its whole state through this list.
        """
        own = list(self.inner_optimizer.variables)
        window = vars(self).get("_window")
        return own if window is None else own + window.traveling_variables

    @property
    def iterations(self) -> Any:
        """How many optimizer steps were taken."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """That of the wrapped optimizer; settable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value
        if self._window is not None:
            self._window.forget_traces()

    @property
    def loss_scale_factor(self) -> Any:
        """That of the wrapped optimizer; settable.

        1.0 where a `LossScaleOptimizer` is inside; then it must not be set.
        """
        inner = vars(self).get("inner_optimizer")
        # Not None, which `LossScaleOptimizer` sets on what it wraps: Keras on
        # TensorFlow skips setting what is there already, and a second scaling
        # must be noticed.
        return (
            1.0 if self._scales() else getattr(inner, "loss_scale_factor", None)
        )

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        inner = vars(self).get("inner_optimizer")
        if inner is None:  # The constructor of the base class.
            return
        if self._scales():
            raise ValueError(
                "`loss_scale_factor` must not be set where a "
                "LossScaleOptimizer is inside, nor a second one be wrapped "
                "around: gradients would be unscaled twice. Received: "
                f"loss_scale_factor={value}. Under mixed_float16 call "
                "`compile(..., auto_scale_loss=False)`."
            )
        inner.loss_scale_factor = value

    def _scales(self) -> bool:
        return any(
            isinstance(one, keras.optimizers.LossScaleOptimizer)
            for one in checks.nested_optimizers(
                vars(self).get("inner_optimizer")
            )
        )

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss as the wrapped optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Writes moving averages into the variables, if there are any."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Excludes variables from the wrapped optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Any) -> None:
        """Sets the values of `variables`."""
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)

    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: the wrapped optimizer is saved beside it."""

    def load_own_variables(self, store: Any) -> None:
        """Loads the state of a plain optimizer; discards an open window."""
        if len(store.keys()):
            self.inner_optimizer.load_own_variables(store)
        self.discard_accumulated_gradients()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "name": self.name,
            "optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "accumulation_steps": self.accumulation_steps,
            "weighting": self._weighting,
        }

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Returns an optimizer from what `get_config` returned."""
        inner = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "optimizer": inner})
