"""Whatever replaces the weights as a whole empties the open window."""

import keras
import numpy as np
import pytest
from models import Net, column, fit, mlp, one_weight, ones, weight

SGD = keras.optimizers.SGD


def by_set_weights(model, good, path):
    model.set_weights(good.get_weights())


def by_load_weights(model, good, path):
    good.save_weights(path)
    model.load_weights(path)


def by_saving_api(model, good, path):
    good.save_weights(path)
    keras.saving.load_weights(model, path)


def by_state_tree(model, good, path):
    tree = model.get_state_tree()
    (values,) = good.get_weights()
    names = tree["trainable_variables"]
    (layer,) = names
    names[layer]["kernel"] = values
    model.set_state_tree(tree)


WAYS = [by_set_weights, by_load_weights, by_saving_api, by_state_tree]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [3, 4])
def test_good_weights_stay_good_after_a_nan(way, n, tmp_path, mode):
    model, good = one_weight(), one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=n, **mode)
    good.compile(SGD(0.1), "mse", accumulation_steps=n, **mode)
    model.train_on_batch(ones(1), column(np.nan))
    model.train_on_batch(ones(1), column(1))
    assert model.open_micro_batches == 2
    way(model, good, str(tmp_path / "w.weights.h5"))
    assert model.open_micro_batches == 0
    for _ in range(n):
        model.train_on_batch(ones(1), column(1))
    # One step of the mean of n ones from zero; a NaN would have stayed.
    assert weight(model) == pytest.approx(0.2)
    assert int(model.optimizer.iterations.numpy()) == 1


@pytest.mark.filterwarnings("ignore:No window can be filled")
def test_early_stopping_under_carry(mode):
    """It puts the best weights back; what was open belonged to others."""
    model = one_weight()
    model.compile(
        SGD(0.1), "mse", accumulation_steps=2, remainder="carry", **mode
    )
    stop = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    )
    fit(model, 1, 1, 1, epochs=5, callbacks=[stop])
    assert model.open_micro_batches == 0


@pytest.mark.parametrize("way", ["self.model", "closure"])
def test_in_the_middle_of_fit(way, mode):
    """Also on JAX, where `fit` has the state and the model does not."""

    class Put(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:  # the second window has one of its two
                target = self.model if way == "self.model" else model
                target.set_weights([np.array([[5.0]], "float32")])
                assert model.open_micro_batches == 0

    model = one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=2, **mode)
    fit(model, 0, 0, 1, 5, 5, callbacks=[Put()])
    # 5 is the minimum of what comes after it.
    assert weight(model) == pytest.approx(5.0)


@pytest.mark.backend("torch")
def test_a_state_dict_of_torch():
    model = one_weight()
    good = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):  # compiled twice, hooked once
        model.compile(SGD(0.1), "mse", accumulation_steps=2)
        model.train_on_batch(ones(1), column(np.nan))
    model.load_state_dict(good)
    assert model.open_micro_batches == 0
    for _ in range(2):
        model.train_on_batch(ones(1), column(1))
    assert weight(model) == pytest.approx(0.2)
    assert len(model._load_state_dict_post_hooks) == 1


def test_state_without_weights_keeps_the_window():
    model = one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    model.train_on_batch(ones(1), column(1))
    model.set_state_tree({"metrics_variables": {}})
    assert model.open_micro_batches == 1
    model.train_on_batch(ones(1), column(1))
    assert weight(model) == pytest.approx(0.2)


def test_one_layer_alone_keeps_the_window():
    model = one_weight()
    model.compile(SGD(0.1), "mse", accumulation_steps=2)
    model.train_on_batch(ones(1), column(1))
    model.layers[0].set_weights([np.ones((1, 1))])
    assert model.open_micro_batches == 1


def test_without_accumulation_nothing_is_different():
    model, stock = mlp(Net), mlp(keras.Model)
    for each in (model, stock):
        each.compile("sgd", "mse")
        each.set_weights([w + 1 for w in each.get_weights()])
    for a, b in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.backend("jax")
@pytest.mark.parametrize(
    "method",
    ["compute_loss_and_updates", "stateless_call", "stateless_compute_loss"],
)
def test_34_what_the_train_step_would_bypass(method):
    """Keras's train step on JAX calls it, ours does not: refused."""

    def own(self, *args, **kwargs):
        return getattr(super(Own, self), method)(*args, **kwargs)

    Own = type("Own", (Net,), {method: own})
    model = mlp(Own)
    for options in ({"accumulation_steps": 2}, {"micro_batch_size": 2}):
        with pytest.raises(ValueError, match=f"its own `{method}`"):
            model.compile("sgd", "mse", **options)
    model.compile("sgd", "mse")  # stock Keras
    with pytest.raises(ValueError, match=f"its own `{method}`"):
        model.accumulation_steps = 2
    assert model.accumulation_steps == 1


def test_a_train_step_on_the_object_stays_there(mode):
    model = one_weight()
    ours = model.train_step
    model.train_step = own = lambda *args: ours(*args)
    model.compile(SGD(0.1), "mse", accumulation_steps=2, **mode)
    fit(model, 1, 1)
    assert model.train_step is own
    assert weight(model) == pytest.approx(0.2)
