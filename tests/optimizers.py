"""Plain models with `AccumulationOptimizer`, for the tests of it."""

import keras
from models import column, fit_in_order, one_weight, ones, weight

SGD = keras.optimizers.SGD


def plain(optimizer, loss="mse", build=one_weight, cls=keras.Sequential, **kw):
    model = build(cls)
    model.compile(optimizer, loss, **kw)
    return model


def one_by_one(model, *y):
    """The weight after each micro-batch."""
    seen = []
    for value in y:
        model.train_on_batch(ones(1), column(value))
        seen.append(weight(model))
    return seen


def train(build, cls, data, batch, optimizer, loss="mse", **options):
    callbacks = options.pop("callbacks", [])
    model = plain(optimizer, loss, build, cls, **options)
    start, _ = fit_in_order(model, data[:2], batch, callbacks=callbacks)
    return model, start


class Weighing(keras.Model):
    """Keras's own train step, told what a micro-batch weighs."""

    def train_step(self, *args):
        x, _ = args[-1]
        known = keras.ops.shape(x)[0]
        if "int" in keras.backend.standardize_dtype(x.dtype):
            known = keras.ops.sum(keras.ops.cast(x != 0, "float32"))
        optimizer = self.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        with optimizer.micro_batch_weight(known):
            return super().train_step(*args)
