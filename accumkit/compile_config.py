"""Our options in a compile config, and a warning where nobody reads them.

A compile config may be read by another class than the one that wrote it: of a
`Sequential` subclass `clone_model` makes a plain `Sequential`, whose `compile`
does not know our options. So they are wrapped around the optimizer. The mixin
unwraps it; anybody else deserializes the wrapping, which gives the plain
optimizer, and a warning.
"""

import warnings
from typing import Any

import keras

from accumkit.messages import AccumkitWarning

_KEY = "accumkit"
_PLACE = "optimizer"
_NAME = f"{_KEY}>CompileOptions"


@keras.saving.register_keras_serializable(_KEY)
class CompileOptions:
    """An optimizer in a config, and the options around it.

    Args:
        config: Both.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = config

    def get_config(self) -> dict[str, Any]:
        """Returns both."""
        return self.config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns the optimizer, without the options around it."""
        options = {k: v for k, v in config.items() if k != _PLACE}
        given = ", ".join(f"{k}={v!r}" for k, v in options.items())
        warnings.warn(
            f"A model compiled with {given} was copied into one that does not "
            "accumulate: the copy takes an optimizer step for every batch. "
            "`clone_model` and the wrappers for scikit-learn make a plain "
            "`Sequential` of a subclass of it. Copy it with "
            "`type(model).from_config(model.get_config())` and compile that, "
            "or give the wrapper a function that builds the model. A class "
            "with `compile_from_config` of its own passes the options to "
            "`compile` itself.",
            AccumkitWarning,
            stacklevel=2,
        )
        return keras.saving.deserialize_keras_object(config[_PLACE])


def wrap(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns a compile config with our options in it.

    Args:
        config: What Keras's or the class's own `get_compile_config` returned.
        options: The arguments of the mixin's `compile`.
    """
    if _PLACE not in config:
        # Of a class with a `compile_from_config` of its own.
        return {**config, _KEY: options}
    wrapped = CompileOptions({_PLACE: config[_PLACE], **options})
    return {**config, _PLACE: keras.saving.serialize_keras_object(wrapped)}


def unwrap(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a compile config without our options, and the options.

    Args:
        config: From a model with the mixin, or from any other.
    """
    config = dict(config)
    options = config.pop(_KEY, {})
    place = config.get(_PLACE)
    if isinstance(place, dict) and place.get("registered_name") == _NAME:
        options = dict(place["config"])
        config[_PLACE] = options.pop(_PLACE)
    elif isinstance(place, dict) and _KEY in place:
        # So accumkit 0.1 wrote it.
        config[_PLACE] = {k: v for k, v in place.items() if k != _KEY}
        options = place[_KEY]
    return config, options
