"""One of two processes that train together; `test_processes` starts them.

`python process_worker.py RANK ADDRESS FOLDER`: leaves there, as JSON, what came
out of each case.
"""

import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

RANK, ADDRESS, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

if keras.config.backend() == "jax":
    keras.distribution.initialize(ADDRESS, 2, RANK)
else:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{ADDRESS}", rank=RANK, world_size=2
    )

from models import Net, mlp, regression_data  # noqa: E402

from accumkit import callbacks  # noqa: E402


def share(samples):
    """Every second sample: 71 make 36 and 35."""
    return [array[RANK::2] for array in regression_data(samples)]


def compiled(**options):
    model = mlp(Net)
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def batches(sizes, fail_at=None):
    """A generator of batches of these sizes, different in each process."""
    x, y, _ = share(100)
    for index, size in enumerate(sizes):
        if index == fail_at:
            raise OSError("no such file")
        yield x[:size], y[:size]


def fit(model, data, epochs=1, **options):
    """Fits arrays or a generator."""
    x, y, weights = data if isinstance(data, list) else (data, None, None)
    return outcome(
        model,
        model.fit,
        x,
        y,
        sample_weight=weights,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    )


def outcome(model, train, *args, **kwargs):
    """The error or nothing, and the weights that are left."""
    error = None
    try:
        with warnings.catch_warnings():
            # What a generator that ends makes Keras say.
            warnings.simplefilter("ignore", UserWarning)
            train(*args, **kwargs)
    except (ValueError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    weights = [np.asarray(w).tolist() for w in model.get_weights()]
    return {"error": error, "weights": weights, "steps": model.optimizer_steps}


def together():
    """Cases of JAX, where two processes train one model."""
    yield "no distribution", fit(compiled(accumulation_steps=2), share(64))

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
    for samples in (64, 70, 71):
        model = compiled(accumulation_steps=2)
        log = callbacks.EffectiveStepLogger(FOLDER / f"{samples}.csv")
        found = fit(model, share(samples), 2, batch_size=8, callbacks=[log])
        found["rows"] = log.frame["samples"].tolist()
        yield f"{samples} samples", found

    yield "pieces", fit(compiled(micro_batch_size=3), share(70), 2)
    yield "options", fit(compiled(micro_batch_size=3 + RANK), share(64))

    for name, *sizes in (
        ("equal batches", [8, 5, 8, 3], [8, 5, 8, 3]),
        ("unequal batches", [8, 8, 8, 4], [8, 8, 8, 3]),
        ("fewer batches", [8, 8, 8, 8], [8, 8, 8]),
    ):
        model = compiled(accumulation_steps=2)
        yield name, fit(model, batches(sizes[RANK]))

    data = batches([8] * 5, fail_at=[None, 2][RANK])
    yield "failing data", fit(compiled(accumulation_steps=2), data)

    model = compiled(accumulation_steps=2, steps_per_execution=3)
    yield "in one execution", fit(model, batches([8] * 4 + [8 - RANK]))

    model = compiled(accumulation_steps=2)
    x, y, _ = share(20)
    for name, size in (("one batch", 8), ("one unequal batch", 8 - RANK)):
        data = x[:size], y[:size]
        yield name, outcome(model, model.train_on_batch, *data)


def apart():
    """Cases of torch, where they would train two models."""
    for name, options in (
        ("window", {"accumulation_steps": 2}),
        ("pieces", {"micro_batch_size": 3}),
    ):
        model = compiled(**options)
        yield name, fit(model, share(64))
        x, y, _ = share(16)
        found = outcome(model, model.train_on_batch, x, y)
        yield f"train_on_batch of a {name}", found
    log = callbacks.EffectiveStepLogger(FOLDER / "stock.csv")
    found = fit(compiled(), share(64), callbacks=[log])
    yield "stock", found | {"rows": log.frame["samples"].tolist()}


if __name__ == "__main__":
    results = together() if keras.config.backend() == "jax" else apart()
    path = FOLDER / f"{RANK}.json"
    path.write_text(json.dumps(dict(results)))
