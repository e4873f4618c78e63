"""Callbacks that cannot resume an accumulated run are warned of, once."""

import warnings

import keras
import pytest
from models import fit, one_weight, weight

import accumkit

SGD = keras.optimizers.SGD


def model_with(**options):
    model = one_weight()
    model.compile(SGD(0.1), "mse", **options)
    return model


@pytest.mark.filterwarnings("ignore:No window can be filled")
def test_backup_under_carry(tmp_path):
    model = model_with(accumulation_steps=2, remainder="carry")
    with pytest.warns(
        accumkit.AccumkitWarning, match="`BackupAndRestore`.*'carry'"
    ):
        fit(model, 1, 2, 3, callbacks=[keras.callbacks.BackupAndRestore(
            str(tmp_path)
        )])  # fmt: skip
    # Once for a `compile`.
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "again"))
    fit(model, 1, callbacks=[backup])


def test_what_carry_loses_is_true(tmp_path):
    """The warning's reason: the resumed run is another one."""

    def train(epochs, model, **kwargs):
        backup = keras.callbacks.BackupAndRestore(
            str(tmp_path / "b"), delete_checkpoint=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", accumkit.AccumkitWarning)
            fit(model, 1, 2, 3, epochs=epochs, callbacks=[backup])
        return weight(model)

    options = {"accumulation_steps": 2, "remainder": "carry"}
    whole = model_with(**options)
    fit(whole, 1, 2, 3, epochs=2)
    train(1, model_with(**options))
    resumed = train(2, model_with(**options))
    assert abs(resumed - weight(whole)) > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 2},
        {"accumulation_steps": 2, "remainder": "drop"},
        {"micro_batch_size": 1, "remainder": "carry"},
        {"remainder": "carry"},
    ],
)
def test_no_false_alarm(tmp_path, options):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    model = model_with(**options)
    fit(model, 1, 2, 3, callbacks=[backup])  # a warning would be an error


@pytest.mark.backend("jax")
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_by_batch(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        pytest.skip("this Keras has no OrbaxCheckpoint")

    def checkpoint(save_freq):
        return keras.callbacks.OrbaxCheckpoint(
            str(tmp_path / str(save_freq)), save_freq=save_freq
        )

    model = model_with(accumulation_steps=2)
    fit(model, 1, 2, 3, 4, callbacks=[checkpoint("epoch")])
    with pytest.warns(
        accumkit.AccumkitWarning, match=r"OrbaxCheckpoint\(save_freq=2\)"
    ):
        fit(model, 1, 2, 3, 4, callbacks=[checkpoint(2)])
    plain = model_with()
    fit(plain, 1, 2, 3, 4, callbacks=[checkpoint(3)])
