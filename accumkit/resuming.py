"""Keras's callbacks that cannot resume an accumulated run, and a warning."""

from typing import Any

import keras

from accumkit import fit_hooks, messages


def warn(callbacks: Any, model: Any) -> None:
    """Warns of callbacks of a `fit` that would not resume where it stopped.

    Args:
        callbacks: A `CallbackList` or a list of callbacks.
        model: The model with the mixin that is about to be trained.
    """
    state = model._accumulation
    if not state.across:
        return
    # Not in every Keras that we support.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for callback in fit_hooks.each(callbacks):
        frequency = getattr(callback, "save_freq", None)
        if isinstance(callback, orbax) and isinstance(frequency, int):
            messages.warn_once(
                state.warned,
                "orbax by batch",
                f"`OrbaxCheckpoint(save_freq={frequency})` numbers its files "
                "by batches, and when training resumes it takes the number of "
                "optimizer steps for that of batches: with "
                f"`accumulation_steps={state.accumulation_steps}` it starts "
                "again at a number that it has used, and what it saves is "
                "refused or lost. Use `save_freq='epoch'`.",
                stacklevel=2,
            )
        if (
            isinstance(callback, keras.callbacks.BackupAndRestore)
            and state.remainder == "carry"
        ):
            messages.warn_once(
                state.warned,
                "backup under carry",
                "`BackupAndRestore` saves no open window, and under "
                "`remainder='carry'` an epoch may end in the middle of one: a "
                "run that is resumed goes on without its gradients. Use "
                "`remainder='apply'`, or make the batches of an epoch a "
                "multiple of `accumulation_steps="
                f"{state.accumulation_steps}`.",
                stacklevel=2,
            )
