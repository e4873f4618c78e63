"""What a user's class may bring along, and the errors for what it may not."""

from collections.abc import Iterable


def mixin_comes_first(cls: type, mixin: type, model: type) -> None:
    """Raises if a class of `model`'s stands before the mixin in the MRO.

    Raises:
        TypeError: If it does; the stock train step would win, silently.
    """
    for base in cls.__mro__:
        if base is mixin:
            return
        if issubclass(base, model) and not issubclass(base, mixin):
            raise TypeError(
                f"`{mixin.__name__}` must stand before the model class in the "
                f"bases of `{cls.__name__}`, or its train step is never "
                "called. Received: class "
                f"{cls.__name__}({', '.join(b.__name__ for b in cls.__bases__)}"
                f"). Write: class {cls.__name__}({mixin.__name__}, "
                f"{base.__name__})."
            )


def train_step_is_used(cls: type, mixin: type, setting: str) -> None:
    """Raises if a method of the user's keeps the mixin's train step out.

    An override in front of the mixin that calls `super()` is fine; the
    compiler leaves a `__class__` cell in every function that does.

    Args:
        cls: The model class.
        mixin: The mixin.
        setting: What needs the mixin's train step, for the message.

    Raises:
        ValueError: If `cls` brings its own `train_step` or
            `make_train_function` in front of the mixin (the setting would
            have no effect), or a `train_step` behind it (the mixin's would
            replace it).
    """
    before = True
    for base in cls.__mro__:
        if base is mixin:
            before = False
            continue
        if base.__module__.startswith("keras."):
            continue
        for name in ("train_step", "make_train_function"):
            own = vars(base).get(name)
            code = getattr(own, "__code__", None)
            calls = code is not None and "__class__" in code.co_freevars
            if own is None or (before and calls):
                continue
            if not before and name == "make_train_function":
                continue  # The mixin's calls it, and it `self.train_step`.
            effect = "the setting would have no effect"
            if not before:
                effect = "it is lost"
            raise ValueError(
                f"`{setting}` needs the train step of `{mixin.__name__}`, but "
                f"`{base.__name__}` brings its own `{name}`, so {effect}. "
                f"Received: model class `{cls.__name__}`. "
                + _ways_out(
                    setting,
                    f"call `super().{name}(...)` in a class in front of the "
                    "mixin, or override `compute_loss` instead",
                )
            )


def trained_without(cls: type, setting: str) -> ValueError:
    """Returns the error for training without the mixin's train step.

    Args:
        cls: The model class.
        setting: What needs the mixin's train step.
    """
    return ValueError(
        f"`{setting}` needs the train step of `AccumulationMixin`, but "
        "training goes on without it, so the setting has no effect. Received: "
        f"a model of class `{cls.__name__}` with a `train_step` or a "
        "`train_function` set on the object, or with a `make_train_function` "
        "that does not use `self.train_step`. "
        + _ways_out(setting, "let it call the train step of the class")
    )


def _ways_out(setting: str, hint: str) -> str:
    if setting == "EffectiveStepLogger":
        return f"{hint.capitalize()}."
    pieces = (
        " It counts batches of `fit`: make `batch_size` what a micro-batch is "
        "to be, and N the batches of an optimizer step."
        if setting == "micro_batch_size"
        else ""
    )
    return (
        "Keep it and wrap *each* optimizer that it uses (a GAN has two): "
        f"`accumkit.AccumulationOptimizer(optimizer, N)`.{pieces} Or {hint}."
    )


def nothing_is_bypassed(
    cls: type, mixin: type, methods: Iterable[str], setting: str
) -> None:
    """Raises if a class overrides what the mixin's train step does not call.

    Args:
        cls: The model class.
        mixin: The mixin.
        methods: Methods that Keras's train step calls.
        setting: Our setting that would bypass them, for the message.

    Raises:
        ValueError: If the class, or one that it is made of, brings its own.
    """
    for base in cls.__mro__:
        if base is mixin or base.__module__.startswith("keras."):
            continue
        for method in methods:
            if method in vars(base):
                raise ValueError(
                    f"`{setting}` must not be used with a class that brings "
                    f"its own `{method}`: the train step of "
                    f"`{mixin.__name__}` differentiates `compute_loss` and "
                    "would bypass it. Received: model class "
                    f"`{cls.__name__}`, in which `{base.__name__}` defines "
                    f"it. Override `compute_loss` instead, or leave out "
                    f"`{setting}` and wrap the optimizer: "
                    "`accumkit.AccumulationOptimizer(optimizer, N)`."
                )
