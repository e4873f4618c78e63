"""`AccumulationMixin`: gradient accumulation under `fit`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from accumkit import checks, class_checks, compile_config, fit_hooks
from accumkit.accumulation import Accumulation, Findings
from accumkit.arguments import Arguments, behind
from accumkit.backends import backend, processes
from accumkit.options import Options
from accumkit.remainder import RemainderCallback


class AccumulationMixin:
    """Trains a model with the gradients of a larger batch.

    Mix it into any model class, in front of it, and give `compile` one or
    both of the options below. `fit`, callbacks, metrics, saving and loading
    keep working. The weights become those of stock Keras with the large
    batch, to rounding, whatever the reduction, masks, sample weights, clipping
    or weight decay, and however unevenly the samples fall into micro-batches.

    - `accumulation_steps=N`, across batches: N batches of `fit` make one
      optimizer step. Learning-rate schedules count optimizer steps.
    - `micro_batch_size=m`, within a batch: each batch of `fit` is worked off
      `m` samples at a time and makes one optimizer step.

    Both compose: N batches, each cut into pieces. With neither, training is
    stock Keras to the bit.

    A loss that couples the samples of a batch (contrastive, Dice) is exact
    within a batch with `loss_over="batch"`: it sees the outputs of all pieces.

    What cannot be made equal to the large batch: BatchNormalization in
    training mode (its statistics are those of a micro-batch), coupling losses
    across batches, and randomness drawn per call (dropout draws other masks).

    Example:

    ```python
    class Net(accumkit.AccumulationMixin, keras.Model):
        pass

    model = Net(inputs, outputs)
    model.compile("adam", "mse", accumulation_steps=8)
    model.fit(x, y, batch_size=16)  # the weights of batch_size=128
    ```

    Reference:

    - [Goyal et al., 2017](https://arxiv.org/abs/1706.02677), section 2: the
      large batch as a sum of small ones.
    """

    # Before `compile` a model is stock Keras.
    _accumulation: Accumulation = Accumulation()
    # Whether Keras is reading or writing the state of a train step.
    _window_travels: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses bases in the order in which the stock train step wins."""
        super().__init_subclass__(**kwargs)
        class_checks.mixin_comes_first(cls, AccumulationMixin, keras.Model)

    def compile(
        self,
        *args: Any,
        accumulation_steps: int = 1,
        micro_batch_size: int | None = None,
        remainder: str = "apply",
        weighting: str = "exact",
        loss_over: str = "micro_batch",
        **kwargs: Any,
    ) -> None:
        """Configures the model for training, as its own `compile` does.

        An open window is discarded.

        Args:
            *args: Positional arguments of `keras.Model.compile`, or of the
                model class behind the mixin. They are handed on as they are,
                with nothing added. The optimizer must not accumulate
                gradients itself.
            accumulation_steps: Int ≥ 1, N: this many batches of `fit` make
                one optimizer step. Defaults to `1`.
            micro_batch_size: Int ≥ 1 or None, m: each batch of `fit` is
                worked off in pieces of m samples (the last may be smaller)
                inside one train step. Defaults to `None`, in one piece.
            remainder: What becomes of a window still open at the end of an
                epoch. `"apply"`: it makes an optimizer step, the mean over
                the samples that it has. `"carry"`: the next epoch goes on
                with it. `"drop"`: it is discarded. Defaults to `"apply"`.
            weighting: `"exact"`: the mean over the window's samples (tokens,
                weights), as the large batch. `"uniform"`: the mean of the
                micro-batch means, as Keras's own
                `gradient_accumulation_steps`. Defaults to `"exact"`.
            loss_over: What the loss sees, with `micro_batch_size`.
                `"micro_batch"`: the outputs of a piece at a time.
                `"batch"`: those of the whole batch, for losses that couple
                its samples (contrastive, Dice) or average outputs over unlike
                numbers of values; the model still runs on m samples at a
                time, and once more forward. Defaults to `"micro_batch"`.
            **kwargs: Keyword arguments, handed on likewise.

        Raises:
            TypeError: If a number is not an integer.
            ValueError: If a number is below 1, `remainder`, `weighting` or
                `loss_over` is unknown, `loss_over="batch"` has no
                `micro_batch_size`, the optimizer accumulates gradients
                itself, or the class has a method that would bypass this train
                step or be bypassed by it. The model is then as it was before.
        """
        steps = checks.count("accumulation_steps", accumulation_steps)
        if micro_batch_size is not None:
            micro_batch_size = checks.count(
                "micro_batch_size", micro_batch_size
            )
        checks.choice("remainder", remainder, checks.REMAINDERS)
        checks.choice("weighting", weighting, checks.WEIGHTINGS)
        checks.loss_over(loss_over, micro_batch_size)
        state = Accumulation(
            Options(steps, micro_batch_size, remainder, weighting, loss_over)
        )
        before = dict(vars(self))
        super().compile(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # Only now it is known: a class may choose its optimizer and its loss.
        try:
            self._check_compiled(state)
        except ValueError:
            vars(self).clear()
            vars(self).update(before)
            raise
        self._accumulation = state

    def _check_compiled(self, state: Accumulation) -> None:
        model: Any = self
        self._check_accumulation(model.optimizer, state)
        if not state.active:
            return
        backend.check_options({"jit_compile": model.jit_compile})
        if state.weighting == "exact" and not state.whole:
            checks.one_reduction(keras.tree.flatten(model.loss))

    def _check_accumulation(self, optimizer: Any, state: Accumulation) -> None:
        if not state.active:
            return
        setting, value = state.setting
        checks.accumulates_alone(optimizer, setting, value)
        self._check_class(setting)
        processes.check_strategy(setting, self)

    def _check_class(self, setting: str) -> None:
        cls, mixin = type(self), AccumulationMixin
        class_checks.train_step_is_used(cls, mixin, setting)
        class_checks.nothing_is_bypassed(
            cls, mixin, backend.bypassed_methods(), setting
        )

    @property
    def accumulation_steps(self) -> int:
        """N, the number of batches in a full window.

        Settable, also in the middle of a run: an open window keeps its N, the
        next one has the new N. Nothing is traced anew, except when N leaves 1
        for the first time since `compile`.
        """
        return self._accumulation.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        steps = checks.count("accumulation_steps", value)
        model: Any = self
        state = self._accumulation
        if not model.compiled:
            raise ValueError(
                "`accumulation_steps` can be set on a compiled model only. "
                f"Received: accumulation_steps={value!r}. Pass it to "
                "`compile` instead."
            )
        if steps == state.accumulation_steps:
            return
        was_active = state.across
        before = state.accumulation_steps
        state.accumulation_steps = steps
        try:
            self._check_accumulation(model.optimizer, state)
        except ValueError:
            state.accumulation_steps = before
            raise
        backend.sync(model)
        if state.window is not None:
            state.window.set_steps(steps)
        if not was_active and model.train_function is not None:
            self.make_train_function(force=True)

    @property
    def micro_batch_size(self) -> int | None:
        """m, samples in a piece of a batch; None where batches stay whole."""
        return self._accumulation.micro_batch_size

    @property
    def optimizer_steps(self) -> int:
        """How many optimizer steps were taken, `optimizer.iterations`."""
        model: Any = self
        if getattr(model, "optimizer", None) is None:
            return 0
        backend.sync(model)
        count = keras.ops.convert_to_tensor(model.optimizer.iterations)
        # TensorFlow's have no `item`; torch's `numpy` needs them on the CPU.
        return int(count.item() if hasattr(count, "item") else count.numpy())

    @property
    def open_micro_batches(self) -> int:
        """How many micro-batches the open window holds; 0 if none is open."""
        window = self._accumulation.window
        if window is None:
            return 0
        backend.sync(self)
        return window.open_micro_batches()

    def apply_accumulated_gradients(self) -> int:
        """Takes an optimizer step with what the open window holds.

        Returns:
            Int, the number of micro-batches in it. With 0 nothing changes.
        """
        count = self.open_micro_batches
        if count:
            self._accumulation.window.apply()
        return count

    def discard_accumulated_gradients(self) -> int:
        """Forgets what the open window holds.

        Returns:
            Int, the number of micro-batches in it. With 0 nothing changes.
        """
        count = self.open_micro_batches
        window = self._accumulation.window
        if window is not None:
            if window.recorder is not None:
                window.recorder.discard()
            window.discard()
        return count

    def _record_windows(self, gradient_norm: bool, capacity: int) -> Any:
        """Has each closed window noted; for callbacks.

        Args:
            gradient_norm: Whether to note the norm of the gradient too.
            capacity: How many windows may close between two readings.

        Returns:
            The model's `WindowRecorder`.
        """
        model: Any = self
        state = self._accumulation
        if state is AccumulationMixin._accumulation:
            raise ValueError("Compile the model before recording its windows.")
        recorder = state.recorder
        if (
            recorder is None
            or recorder.capacity < capacity
            or recorder.gradient_norm < gradient_norm
        ):
            self._check_class("EffectiveStepLogger")
            state.recording = (gradient_norm, capacity)
            if state.window is not None:
                state.window.recorder = None
            backend.prepare(model, state)
            self.make_train_function(force=True)
        return state.recorder

    def accumulation_weight(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        """The weight of a micro-batch in its window; override for your own.

        The window's gradient is Σ D_i·g_i / Σ D_i, with D_i this weight and
        g_i the gradient of the micro-batch's loss. It is right when D_i is
        what the loss of the micro-batch was divided by. Without an override
        that is found out from the compiled losses (`"exact"`), and a model
        with a `compute_loss` of its own counts samples.

        The `loss` in the logs of `fit` is averaged over an epoch by samples,
        as Keras averages it over batches. Where D_i is not proportional to
        them (masks, sample weights, an override) it differs a little from
        that of the large batch across batches; the rows of
        `EffectiveStepLogger` have the loss that each step was taken for.

        Example:

        ```python
        class Tagger(accumkit.AccumulationMixin, keras.Model):
            def compute_loss(self, x, y, y_pred, sample_weight, training=True):
                known = keras.ops.cast(y >= 0, "float32")
                values = my_values(y, y_pred) * known
                return keras.ops.sum(values) / keras.ops.sum(known)

            def accumulation_weight(self, x, y, y_pred, sample_weight):
                return keras.ops.sum(keras.ops.cast(y >= 0, "float32"))
        ```

        Args:
            x: Inputs of the micro-batch.
            y: Targets.
            y_pred: Predictions.
            sample_weight: Sample weights or None.

        Returns:
            A scalar ≥ 0 (number or tensor), or None for the default.
        """
        return None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one batch, as `keras.Model.train_step` of the backend does."""
        model: Any = self
        state = self._accumulation
        if not state.active:
            return super().train_step(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        state.entered = True
        return backend.train_step(model, *args, **kwargs)

    def compute_loss_and_updates(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's, on JAX; its train step calls it, the mixin's does not.

        Args:
            *args: As in Keras, handed on.
            **kwargs: As in Keras, handed on.

        Returns:
            As in Keras.

        Raises:
            ValueError: If Keras's train step was put in place of the mixin's.
        """
        model: Any = self
        if len(args) > 1 and len(args[1]) > len(model.non_trainable_variables):
            # The window has come along.
            setting, _ = self._accumulation.setting
            raise class_checks.trained_without(type(self), setting)
        return super().compute_loss_and_updates(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch, as in Keras.

        Args:
            *args: As in Keras, handed on.
            **kwargs: As in Keras, handed on.

        Returns:
            As in Keras.

        Raises:
            ValueError: If the two passes of `loss_over="batch"` differed.
        """
        logs = super().train_on_batch(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._accumulation.check_passes()
        return logs

    def make_train_function(self, force: bool = False) -> Any:
        """Creates the window's variables, then Keras's train function."""
        model: Any = self
        state = self._accumulation
        if not state.active:
            return super().make_train_function(force)  # pyright: ignore[reportAttributeAccessIssue]
        if force or model.train_function is None:
            state.findings = Findings()
            if state.window is not None:
                state.window.forget_traces()
        if model.built:
            checks.gradients_have_means(
                "`accumulation_steps` and `micro_batch_size`",
                model.trainable_variables,
            )
            backend.prepare(model, state)
        with self._with_window(True), backend.making_train_function(self):
            made = super().make_train_function(force)  # pyright: ignore[reportAttributeAccessIssue]
        if state.accumulates:
            processes.watch(self)
        return made

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as its own `fit` does.

        Args:
            *args: Positional arguments of `keras.Model.fit`, or of the model
                class behind the mixin. They are handed on as they are, but
                that a callback which deals with the remainder is put in front
                of `callbacks`.
            **kwargs: Keyword arguments, handed on likewise.

        Returns:
            What that `fit` returns, the `History` in Keras.
        """
        given = Arguments(self, AccumulationMixin, "fit", args, kwargs)
        closing = RemainderCallback()
        if self._accumulation.active:
            # Keras's default for arrays; a dataset brings its own size.
            arrays = keras.tree.flatten(given.get("x"))
            sized = bool(arrays) and all(hasattr(a, "shape") for a in arrays)
            self._accumulation.fit_batch_size = given.get("batch_size") or (
                32 if sized else None
            )
            if sized and len(arrays[0].shape):
                closing.samples = arrays[0].shape[0]
        callbacks = closing.in_front_of(given.get("callbacks"), self)
        closing.reaches(given.put("callbacks", callbacks), self)
        with fit_hooks.leaving(callbacks):
            history = super().fit(*given.args, **given.kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            closing.reaches(closing.began, self)
            return history

    # Whatever replaces the weights as a whole discards an open window: its
    # gradients belong to other weights (and may be what was to be undone). On
    # JAX the state comes back first: in the middle of `fit` it would be written
    # over what was just put in.

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights as in Keras; an open window is discarded."""
        backend.sync(self)
        super().load_weights(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.discard_accumulated_gradients()

    def load_own_variables(self, store: Any) -> None:
        """Loads as in Keras; an open window is discarded."""
        backend.sync(self)
        super().load_own_variables(store)  # pyright: ignore[reportAttributeAccessIssue]
        self.discard_accumulated_gradients()

    def set_weights(self, weights: Any) -> None:
        """Sets all weights as in Keras; an open window is discarded."""
        backend.sync(self)
        super().set_weights(weights)  # pyright: ignore[reportAttributeAccessIssue]
        self.discard_accumulated_gradients()

    def set_state_tree(self, state_tree: Any) -> None:
        """Sets the state as in Keras; new weights discard an open window."""
        backend.sync(self)
        super().set_state_tree(state_tree)  # pyright: ignore[reportAttributeAccessIssue]
        if "trainable_variables" in state_tree:
            self.discard_accumulated_gradients()

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes as in Keras; an open window is discarded."""
        backend.sync(self)
        super().quantize(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.discard_accumulated_gradients()

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Those of the plain model.

        On JAX a train step is handed its whole state, the window's variables
        at the end of this list; only Keras's own reading and writing of that
        state sees them there.
        """
        own = super().non_trainable_variables  # pyright: ignore[reportAttributeAccessIssue]
        window = self._accumulation.window
        if self._window_travels and window is not None:
            ours = self._accumulation.own_forward_variables
            return own + ours + window.traveling_variables
        return own

    @contextlib.contextmanager
    def _with_window(self, travels: Any) -> Iterator[None]:
        before = self._window_travels
        self._window_travels = bool(travels)
        try:
            yield
        finally:
            self._window_travels = before

    # Keras's reading and writing of the train state on JAX; nothing public
    # serves. An evaluation leaves the optimizer out, and the window with it.

    def _get_jax_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_window(kwargs.get("optimizer_variables")):
            return super()._get_jax_state(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def jax_state_sync(self) -> None:
        """Brings what a train step has computed back into the variables."""
        with self._with_window(self._state_has_window()):
            super().jax_state_sync()  # pyright: ignore[reportAttributeAccessIssue]

    def state_sync(self) -> None:
        """As `jax_state_sync`; its name from Keras 3.16 on."""
        # Keras calls it where a model has it, whatever the backend.
        sync = getattr(super(), "state_sync", None)
        if sync is not None:
            with self._with_window(self._state_has_window()):
                sync()

    def _state_has_window(self) -> bool:
        return "optimizer_variables" in (
            getattr(self, "_jax_state", None) or {}
        )

    def get_compile_config(self) -> dict[str, Any]:
        """Returns what `compile` was called with, our options included.

        With none of ours set it is the plain model's.
        """
        config = super().get_compile_config()  # pyright: ignore[reportAttributeAccessIssue]
        options = self._accumulation.options
        if not config or options.is_default:
            return config
        return compile_config.wrap(config, options.config())

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles with what `get_compile_config` returned.

        Args:
            config: Dict, from this class or from a plain Keras model.
        """
        model: Any = self
        config, options = compile_config.unwrap(config)
        if not self._compiles_as_keras():
            # The class's own; else Keras's, which says that there must be one.
            before = self._accumulation
            super().compile_from_config(config)  # pyright: ignore[reportAttributeAccessIssue]
            if options and self._accumulation is not before:
                state = Accumulation(Options(**options))
                self._check_compiled(state)
                self._accumulation = state
            return
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config, **options)
        if model.optimizer is not None and model.built:
            model.optimizer.build(model.trainable_variables)

    def _compiles_as_keras(self) -> bool:
        """Whether `compile` takes what Keras wrote into a config."""
        cls = type(self)
        return cls.compile is AccumulationMixin.compile and all(
            next(behind(cls, AccumulationMixin, name))
            is getattr(keras.Model, name)
            for name in ("compile", "compile_from_config")
        )
