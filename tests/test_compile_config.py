"""Our options in a compile config, and who reads it."""

import keras
import numpy as np
import pytest
from models import Net, Stack, column, fit, mlp, one_weight, ones, weight

import accumkit

SGD = keras.optimizers.SGD
OPTIONS = {
    "accumulation_steps": 4,
    "micro_batch_size": 2,
    "remainder": "drop",
    "weighting": "uniform",
}


def options_of(model):
    state = model._accumulation
    return {name: getattr(state, name) for name in OPTIONS}


def compiled(cls, *args, build=one_weight, **kwargs):
    model = build(cls)
    model.compile(SGD(0.1, name="sgd"), *args, **kwargs)
    return model


@pytest.mark.parametrize("build", [one_weight, mlp])
def test_without_options_it_is_the_plain_models(build):
    pair = (Stack, keras.Sequential)
    if build is mlp:
        pair = (Net, keras.Model)
    ours, plain = (compiled(cls, "mse", build=build) for cls in pair)
    assert ours.get_compile_config() == plain.get_compile_config()
    assert build(pair[0]).get_compile_config() == {}
    ours.accumulation_steps = 2
    assert ours.get_compile_config() != plain.get_compile_config()
    ours.accumulation_steps = 1
    assert ours.get_compile_config() == plain.get_compile_config()


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_kept(name):
    model = compiled(Stack, "mse", **{name: OPTIONS[name]})
    again = one_weight()
    again.compile_from_config(model.get_compile_config())
    assert options_of(again) == options_of(model)
    assert again.get_compile_config() == model.get_compile_config()


def test_the_form_of_the_first_release_is_read():
    config = compiled(Stack, "mse").get_compile_config()
    config["optimizer"]["accumkit"] = dict(OPTIONS)
    model = one_weight()
    model.compile_from_config(config)
    assert options_of(model) == OPTIONS
    assert "accumkit" in config["optimizer"]  # not ours to change


def test_a_copy_that_does_not_accumulate_is_warned_of():
    """`clone_model` makes a plain `Sequential` of a subclass."""
    stack = compiled(Stack, "mse", accumulation_steps=2)
    with pytest.warns(accumkit.AccumkitWarning, match="accumulation_steps=2"):
        clone = keras.models.clone_model(stack)
    assert type(clone) is keras.Sequential
    fit(clone, 1, 2, batch_size=2)
    assert weight(clone) == pytest.approx(0.3)
    # Nothing is lost, so nothing is said.
    keras.models.clone_model(compiled(Stack, "mse"))
    for model in (Stack.from_config(stack.get_config()), one_weight()):
        model.compile(SGD(0.1), "mse", accumulation_steps=2)
        fit(model, 1, 2)
        assert weight(model) == pytest.approx(0.3)
    clone = keras.models.clone_model(
        compiled(Net, "mse", build=mlp, accumulation_steps=2)
    )
    assert (type(clone), clone.accumulation_steps) == (Net, 2)


def test_a_functional_class_with_a_constructor_of_its_own():
    class Sized(Net):
        def __init__(self, inputs, outputs, units=3, **kwargs):
            super().__init__(inputs, outputs, **kwargs)
            self.units = units

    model = compiled(Sized, "mse", build=mlp, micro_batch_size=2)
    with pytest.warns(accumkit.AccumkitWarning, match="micro_batch_size=2"):
        clone = keras.models.clone_model(model)
    assert not isinstance(clone, accumkit.AccumulationMixin)


def test_the_wrappers_for_scikit_learn():
    pytest.importorskip("sklearn")
    x, y = ones(4), column(1, 2, 3, 4)[:, 0]
    kwargs = {"fit_kwargs": {"batch_size": 1, "verbose": 0}}
    model = compiled(Stack, "mse", accumulation_steps=4)
    wrapper = keras.wrappers.SKLearnRegressor(model, **kwargs)
    with pytest.warns(accumkit.AccumkitWarning, match="does not accumulate"):
        wrapper.fit(x, y)
    wrapper = keras.wrappers.SKLearnRegressor(
        lambda X, y: compiled(Stack, "mse", accumulation_steps=4),
        **kwargs,
    )
    wrapper.fit(x, y)
    assert weight(wrapper.model_) == pytest.approx(0.5)


# A compile of one's own.


class Tempered(keras.Sequential):
    """As Keras says that one should: with a config of its own."""

    def compile(self, optimizer, temperature=3.0, **kwargs):
        super().compile(optimizer, loss="mse", **kwargs)
        self.temperature = temperature


@keras.saving.register_keras_serializable("accumkit_tests")
class Configured(Tempered):
    def get_compile_config(self):
        return {"sgd": self.optimizer, "temperature": self.temperature}

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(config.pop("sgd"), **config)


@keras.saving.register_keras_serializable("accumkit_tests")
class Extended(Tempered):
    def get_compile_config(self):
        config = super().get_compile_config()
        return {**config, "temperature": self.temperature}

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(config["optimizer"], config["temperature"])


@keras.saving.register_keras_serializable("accumkit_tests")
class MixedConfigured(accumkit.AccumulationMixin, Configured):
    pass


@keras.saving.register_keras_serializable("accumkit_tests")
class MixedExtended(accumkit.AccumulationMixin, Extended):
    pass


@pytest.mark.parametrize("cls", [MixedConfigured, MixedExtended])
@pytest.mark.parametrize("options", [OPTIONS, {}])
def test_a_class_with_a_config_of_its_own(tmp_path, cls, options):
    model = compiled(cls, 5.0, **options)
    fit(model, 1, 2, 3, 4)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert again.temperature == 5.0
    assert options_of(again) == options_of(model)
    np.testing.assert_array_equal(weight(again), weight(model))
    assert again.optimizer_steps == model.optimizer_steps


def test_a_class_without_one_says_so_as_in_stock_keras(tmp_path):
    @keras.saving.register_keras_serializable("accumkit_tests")
    class Mixed(accumkit.AccumulationMixin, Tempered):
        pass

    model = compiled(Mixed, 5.0, accumulation_steps=2)
    path = tmp_path / "model.keras"
    model.save(path)
    with pytest.warns(UserWarning, match="`compile\\(\\)` was not called"):
        again = keras.models.load_model(path)
    assert again.accumulation_steps == 1


def test_a_class_in_front_passes_them_itself():
    class Front(Stack):
        def compile(self, optimizer, temperature=3.0, **kwargs):
            super().compile(optimizer, loss="mse", **kwargs)
            self.temperature = temperature

        def get_compile_config(self):
            config = super().get_compile_config()
            return {**config, "temperature": self.temperature}

        def compile_from_config(self, config):
            config = keras.saving.deserialize_keras_object(config)
            self.compile(config["optimizer"], config["temperature"])

    model = compiled(Front, 5.0, accumulation_steps=2)
    again = one_weight(Front)
    with pytest.warns(accumkit.AccumkitWarning, match="passes the options"):
        again.compile_from_config(model.get_compile_config())
    assert isinstance(again.optimizer, SGD)
