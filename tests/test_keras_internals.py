"""A Keras that has moved one of the private names that accumkit needs."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from accumkit import keras_internals
from accumkit.keras_internals import guards

FOLDER = Path(keras_internals.__file__).parent

# What each function reads first, on an object that has nothing of it.
EMPTY = type("Empty", (), {"compute_metrics": keras.Model.compute_metrics})()
ENTRY = SimpleNamespace(_flat_losses=[object()], _metrics=[])
READ = {
    "_call_has_training_arg": lambda: keras_internals.forward(EMPTY, 0),
    "_compute_loss": lambda: keras_internals.compute_loss(EMPTY, 0, 0, 0, None),
    "_loss_tracker": lambda: keras_internals.loss_tracker(EMPTY),
    "_compile_metrics": lambda: keras_internals.update_metrics(
        EMPTY, (0, 0, None), 0
    ),
    "_compile_loss": lambda: keras_internals.compile_loss(EMPTY),
    "_aggregate_additional_loss": lambda: keras_internals.added_loss(EMPTY, 0),
    "_clear_losses": lambda: keras_internals.replace_added_losses(EMPTY, []),
    "_flat_losses": lambda: replaced(EMPTY),
    "_metrics": lambda: replaced(SimpleNamespace(_flat_losses=[])),
    "loss": lambda: replaced(ENTRY),
    "_layers": lambda: keras_internals.all_layers(EMPTY),
    "_learning_rate": lambda: keras_internals.schedule_of(EMPTY),
    "_distribution_strategy": lambda: keras_internals.distribution_strategy(
        EMPTY
    ),
    "_user_loss": lambda: bare_target(SimpleNamespace(call=print)),
    "_var_key": lambda: guarded(SimpleNamespace()),
    "_value": lambda: keras_internals.raw_value(EMPTY),
    "_initial_epoch": lambda: keras_internals.initial_epoch(EMPTY),
}


def bare_target(compiled):
    with keras_internals.unmistakable_targets(compiled):
        compiled.call(0, [0, 0])


def guarded(optimizer):
    optimizer.update_step = print
    with keras_internals.guarded_updates(optimizer, [], print):
        raise AssertionError


def replaced(compiled):
    with keras_internals.replaced_losses(compiled, print, print):
        raise AssertionError


@pytest.mark.parametrize("name", READ)
def test_a_missing_attribute_names_the_version(name):
    version = re.escape(keras.__version__)
    with pytest.raises(
        RuntimeError, match=rf"`\w+\.{name}`, that Keras {version} .*Install"
    ):
        READ[name]()


@pytest.mark.parametrize(
    ("ours", "module", "name"),
    [
        ("losses", "keras.src.backend.common.masking", "get_keras_mask"),
        (
            "optimizers",
            "keras.src.backend.common.stateless_scope",
            "get_stateless_scope",
        ),
        ("losses", "keras.src.backend.common.masking", "set_keras_mask"),
        (
            "models",
            "keras.src.backend.common.global_state",
            "get_global_attribute",
        ),
        (
            "models",
            "keras.src.random.seed_generator",
            "global_seed_generator",
        ),
        ("losses", "keras.src.losses.loss", "apply_mask"),
        ("losses", "keras.src.losses.loss", "squeeze_or_expand_to_same_rank"),
    ],
)
def test_a_missing_import_names_the_version(ours, module, name, monkeypatch):
    monkeypatch.delattr(f"{module}.{name}")
    message = rf"`{module}\.{name}`, that Keras {keras.__version__} .*Install"
    with pytest.raises(ImportError, match=message):
        # A second copy: what others imported stays whole.
        runpy.run_path(str(FOLDER / f"{ours}.py"))


def test_a_missing_module_names_the_version():
    with pytest.raises(ImportError, match=r"`keras\.src\.none\.a`, that Keras"):
        guards.imported("keras.src.none", "a")


def test_nothing_private_is_read_without_a_guard():
    """And each guarded name is tried above."""
    sources = [p.read_text(encoding="utf-8") for p in FOLDER.glob("*.py")]
    tree = ast.parse("\n".join(sources))
    bare = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    }
    assert bare <= {"_replace"}  # of named tuples, public
    imported = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert not [m for m in imported if m.startswith("keras")]
    assert len(sources) == 5
    guarded = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "private"
    }
    assert guarded - set(READ) <= {"name"}  # beside "loss"


def test_every_name_is_there():
    """On the Keras at hand: a smoke test of what the guards read."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(
        *(keras.ops.ones((2, 1)) for _ in range(2)), verbose=0, batch_size=2
    )
    compiled = keras_internals.compile_loss(model)
    with keras_internals.replaced_losses(compiled, lambda *pair: 0, print):
        assert len(compiled._flat_losses) == 1
    assert keras_internals.loss_tracker(model).name == "loss"
    assert model.layers[0] in keras_internals.all_layers(model).values()
    assert keras_internals.schedule_of(model.optimizer) is None
    assert keras_internals.initial_epoch(model) == 0
    if keras.config.backend() == "tensorflow":
        assert keras_internals.distribution_strategy(model.optimizer)
