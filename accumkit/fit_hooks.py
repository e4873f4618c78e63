"""What `AccumulationMixin.fit` tells callbacks that Keras does not tell.

A callback may have two hooks more: `on_epoch_logs(epoch, logs)`, before any
callback's `on_epoch_end`, for one that writes into the logs that others read;
and `on_fit_exit()`, for what must also happen when `fit` raises, after which
Keras does not call `on_train_end`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras


def each(callbacks: Any) -> Iterator[Any]:
    """Yields callbacks, those in the lists of Keras's among them too.

    Args:
        callbacks: A `CallbackList` or a list of callbacks.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    for callback in list(callbacks):
        yield callback
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from each(callback)


def epoch_logs(callbacks: Any, epoch: int, logs: Any) -> None:
    """Lets callbacks write into the logs of an epoch.

    Args:
        callbacks: A `CallbackList` or a list of callbacks.
        epoch: The epoch, counted from 0.
        logs: What `on_epoch_end` is given.
    """
    for callback in each(callbacks):
        if hasattr(callback, "on_epoch_logs"):
            callback.on_epoch_logs(epoch, logs)


@contextlib.contextmanager
def leaving(callbacks: Any) -> Iterator[None]:
    """Calls `on_fit_exit` of all callbacks when the block is left.

    An exception in the block is what its caller gets to see: what the hooks
    raise then, on a model that may have lost its values, does not replace it.

    Args:
        callbacks: A `CallbackList` or a list of callbacks.
    """
    try:
        yield
    except BaseException:
        for hook in _exits(callbacks):
            with contextlib.suppress(Exception):
                hook()
        raise
    # All of them run, also after one that raises.
    with contextlib.ExitStack() as stack:
        for hook in reversed(_exits(callbacks)):
            stack.callback(hook)


def _exits(callbacks: Any) -> list[Any]:
    return [
        callback.on_fit_exit
        for callback in each(callbacks)
        if hasattr(callback, "on_fit_exit")
    ]
