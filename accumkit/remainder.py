"""The callback that deals with the window open at the end of an epoch."""

from typing import Any

import keras

from accumkit import (
    class_checks,
    fit_hooks,
    keras_internals,
    messages,
    resuming,
    windows,
)
from accumkit.backends import backend, processes


class RemainderCallback(keras.callbacks.Callback):
    """Closes the open window when an epoch's last batch has been seen.

    `AccumulationMixin.fit` puts it in front of all other callbacks: those
    that save, compare or stop must see the weights with the remainder in
    them. The first hook after an epoch's last batch is `on_test_begin` where
    `fit` evaluates, else `on_epoch_end`; `fit` hands its callbacks to its own
    evaluation only, so an `evaluate` of the user's never comes by here.

    Standing first, it also lets those callbacks write that have something for
    the logs which the others read.

    Attributes:
        others: All callbacks of this `fit`, a list or a `CallbackList`.
        samples: How many `fit` was given, if it was given arrays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: Any = []
        self.samples: int | None = None
        self.began = False
        self._steps = 0
        self._looked = False

    def in_front_of(self, callbacks: Any, model: Any) -> Any:
        """Returns what to hand to `fit` as `callbacks`, this one in front.

        Args:
            callbacks: What the caller gave: None, a callback, a list of them,
                or a `CallbackList`, which is changed in place.
            model: The model to be trained.
        """
        self.others = callbacks
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            given = keras.tree.flatten(callbacks) if callbacks else []
            self.others = [self, *given]
            return self.others
        others = callbacks.callbacks
        others[:] = [c for c in others if not isinstance(c, RemainderCallback)]
        others.insert(0, self)
        self.set_model(model)
        self.set_params(callbacks.params)
        return callbacks

    def reaches(self, reached: bool, model: Any) -> None:
        """Warns of a `fit` of the user's that does not run its callbacks.

        Args:
            reached: Whether this callback gets to Keras's `fit`, or got there.
            model: The model to be trained.
        """
        state = model._accumulation
        if reached or not state.across or state.remainder == "carry":
            return
        messages.warn_once(
            state.warned,
            "fit without callbacks",
            f"`remainder={state.remainder!r}` is seen to by a callback, but "
            f"the `fit` of class `{type(model).__name__}` does not hand its "
            "`callbacks` on to Keras's: a window that is open at the end of an "
            "epoch stays open. Let that `fit` take `callbacks` and pass them "
            "to `super().fit`; or compile with `remainder='carry'` and call "
            "`apply_accumulated_gradients()` where a window should end.",
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts with an empty window; warns if none can ever be filled."""
        self.began = True
        model: Any = self.model
        if model._accumulation.accumulates:
            processes.check_fit(model, self._share(model))
        if model._accumulation.remainder != "carry":
            model.discard_accumulated_gradients()
        self._warn_if_never_full(model)
        if model._accumulation.active:
            self._steps = model.optimizer_steps
        resuming.warn(self.others, model)

    def _share(self, model: Any) -> dict[str, int | None]:
        """What must be the same in all processes; None where not known."""
        state = model._accumulation
        batches, samples = self.params.get("steps"), self.samples
        size = state.fit_batch_size
        if not size or not samples or batches != -(-samples // size):
            samples = size = None
        return {
            "accumulation_steps": state.accumulation_steps,
            "micro_batch_size": state.micro_batch_size or 0,
            "steps_per_execution": int(model.steps_per_execution),
            "epochs": self.params["epochs"],
            "batches": batches,
            "batch_size": size,
            "samples": samples,
        }

    def on_fit_exit(self) -> None:
        """Forgets what was known of this `fit`'s batches."""
        # Not `model`: on JAX that asks for a state which an error may have
        # taken along.
        if self._model is not None:
            self._model._accumulation.shares_agree = False

    def _warn_if_never_full(self, model: Any) -> None:
        state = model._accumulation
        batches = self.params.get("steps")
        if state.remainder == "apply" or not batches:
            return
        epochs = self.params["epochs"] - keras_internals.initial_epoch(model)
        n = model.accumulation_steps
        ahead = model.open_micro_batches if state.remainder == "carry" else 0
        if ahead or windows.optimizer_steps(
            batches, n, max(epochs, 0), state.remainder
        ):
            return
        messages.warn_once(
            state.warned,
            f"never full {batches} {epochs} {n}",
            f"No window can be filled: {epochs} epoch(s) of {batches} "
            f"batch(es) with `accumulation_steps={n}` and "
            f"`remainder={state.remainder!r}` take no optimizer step, so this "
            "`fit` will not change the weights. Lower `accumulation_steps`, "
            "or use `remainder='apply'`.",
            stacklevel=2,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks at the first batch: later that would wait for the device."""
        if not self._looked:
            self._looked = True
            self._check_passes()

    def _check_passes(self) -> None:
        model: Any = self.model
        if model._accumulation.comparison is not None:
            backend.sync(model)
            model._accumulation.check_passes()

    def on_test_begin(self, logs: Any = None) -> None:
        """Deals with the remainder before `fit` validates."""
        self._close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Deals with the remainder of an epoch without validation."""
        self._close()
        fit_hooks.epoch_logs(self.others, epoch, logs)

    def _close(self) -> None:
        model: Any = self.model
        state = model._accumulation
        self._check_passes()
        if state.active and not state.entered:
            self._check_bypassed(model, state.setting[0])
        remainder = state.remainder
        if remainder == "apply":
            model.apply_accumulated_gradients()
        elif remainder == "drop":
            model.discard_accumulated_gradients()

    def _check_bypassed(self, model: Any, setting: str) -> None:
        """Raises for steps that were taken without our train step.

        What a class brings is checked by `compile`; a function that somebody
        put on the object shows only when it has run.
        """
        if model.optimizer_steps != self._steps:
            raise class_checks.trained_without(type(model), setting)
