"""Several processes on JAX: their shares of the batches are compared.

`keras.distribution` has each process bring its share of a batch. What the
global batch looks like, each process works out from its own share alone; with
unequal ones it traces a program of its own, whose collectives may still fit
those of the others: the weights then drift apart without a word. With unequal
numbers of batches one process waits for ever.

A comparison is itself a collective, in which all must take part, so it cannot
be made where *one* process meets a new shape. Two moments are common to all.
When `fit` begins: with arrays everything about all batches is known there, one
comparison is enough, and it costs nothing later. And before each batch, the
end of the data and an error in it included: that is done for everything else
(datasets, generators, `train_on_batch`), where no process can know what the
others will draw. It makes the host wait for the step before, and for a few
numbers to go round.
"""

import functools
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accumkit import keras_internals

# Instead of a number of samples.
_ENDED, _FAILED, _UNKNOWN = -1, -2, -3
_WORDS = {_ENDED: "no batch", _FAILED: "an error", _UNKNOWN: "unknown"}


def check_strategy(setting: str, model: Any = None) -> None:
    """Nothing to refuse when a model is compiled."""


def check_fit(model: Any, share: dict[str, int | None]) -> None:
    """Compares over the processes what is known when `fit` begins.

    Args:
        model: The model.
        share: By what it is called, numbers that must be the same for all;
            None where one is not known.

    Raises:
        ValueError: On all processes, if they differ.
    """
    state = model._accumulation
    state.shares_agree = False
    devices = _shared_devices(model.variables)
    if len(_processes(devices)) > 1:
        numbers = {
            name: _UNKNOWN if number is None else number
            for name, number in share.items()
        }
        _compare(devices, numbers)
        state.shares_agree = None not in share.values()


def watch(model: Any) -> None:
    """Has the train function compare each batch that it draws.

    Args:
        model: The model.

    Raises:
        ValueError: If each of several processes would train its own model.
    """
    if jax.process_count() == 1:
        return
    if keras.distribution.distribution() is None:
        raise ValueError(
            "Accumulation in several processes needs a distribution: nothing "
            "would bring their gradients together, and each would train a "
            "model of its own. Received: "
            f"{jax.process_count()} processes and no distribution. Call "
            "`keras.distribution.set_distribution(keras.distribution."
            "DataParallel(auto_shard_dataset=False))` before you build the "
            "model."
        )
    if not isinstance(model.train_function, _Watched):
        model.train_function = _Watched(model, model.train_function)


def is_first(model: Any) -> bool:
    """Whether this process is the one that writes files."""
    first = 0
    if keras.distribution.distribution() is not None:
        first = min(_processes(_shared_devices(model.variables)), default=0)
    return jax.process_index() == first


class _Watched:
    """A train function of Keras's; the batches that it gets are compared."""

    def __init__(self, model: Any, function: Any):
        self._model = model
        self._function = function

    def __call__(self, train_state: Any, iterator: Any) -> Any:
        if self._model._accumulation.shares_agree:
            return self._function(train_state, iterator)
        devices = _devices(jax.tree.leaves(train_state))
        if len(_processes(devices)) < 2:
            return self._function(train_state, iterator)
        try:
            batches = _drawn(
                iterator, int(self._model.steps_per_execution), devices
            )
        except Exception:
            keras_internals.put_back_state(self._model, train_state)
            raise
        return self._function(train_state, iter(batches))


def _drawn(iterator: Any, count: int, devices: list[Any]) -> list[Any]:
    """Draws the batches of an execution, compared with those of the others."""
    batches: list[Any] = []
    sizes = [_ENDED] * count
    error: Exception | None = None
    try:
        for index in range(count):
            batches.append(next(iterator))
            sizes[index] = jax.tree.leaves(batches[-1])[0].shape[0]
    except StopIteration as ended:
        error = ended
    except Exception as failure:
        sizes[len(batches)] = _FAILED
        error = failure
    try:
        _compare(
            devices,
            {
                f"samples of global batch {index + 1}": size
                for index, size in enumerate(sizes)
            },
        )
    except ValueError:
        # Where drawing failed, that is what to say.
        if error is None or isinstance(error, StopIteration):
            raise
    if error is not None and not (batches and isinstance(error, StopIteration)):
        raise error
    return batches


def _compare(devices: list[Any], numbers: dict[str, int]) -> None:
    """Raises on all processes if their numbers differ."""
    mesh = Mesh(np.array(devices), ("devices",))
    row = np.array([list(numbers.values())]).astype("int32")
    rows = jax.make_array_from_single_device_arrays(
        (len(devices), row.shape[1]),
        NamedSharding(mesh, PartitionSpec("devices")),
        [
            jax.device_put(row, device)
            for device in devices
            if device.process_index == jax.process_index()
        ],
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    table = np.asarray(_gathered(everywhere)(rows).addressable_data(0))
    differing = []
    for column, name in enumerate(numbers):
        of = {
            device.process_index: int(table[index, column])
            for index, device in enumerate(devices)
        }
        if len(set(of.values())) > 1:
            told = ", ".join(
                f"{_WORDS.get(number, number)} in process {process}"
                for process, number in of.items()
            )
            differing.append(f"{name}: {told}")
    if differing:
        raise ValueError(
            "All processes must bring equal shares of every batch, or their "
            f"weights drift apart. Received: {'; '.join(differing)}. Give "
            "all of them equally many samples in batches of the same sizes "
            "(leave out what is over), and the same options."
        )


@functools.lru_cache(maxsize=8)
def _gathered(sharding: Any) -> Any:
    return jax.jit(lambda a: a, out_shardings=sharding)


def _shared_devices(variables: list[Any]) -> list[Any]:
    if jax.process_count() == 1:
        return []
    return _devices([variable.value for variable in variables])


def _devices(arrays: list[Any]) -> list[Any]:
    """The devices that arrays are spread over, in one order everywhere."""
    found = {d for array in arrays for d in array.sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def _processes(devices: list[Any]) -> set[int]:
    return {device.process_index for device in devices}
