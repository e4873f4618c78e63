"""Arguments on their way to a method that a user's class may bring."""

import inspect
from collections.abc import Iterator
from typing import Any

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Arguments:
    """What a caller gave, to be handed on just so.

    A class behind the mixin may have another signature than Keras, and
    defaults of its own. So what was given by position stays so, and nothing is
    filled in.

    Args:
        model: The model whose method was called.
        mixin: The class that hands the arguments on to those behind it.
        method: The method's name.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    def __init__(
        self,
        model: Any,
        mixin: type,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.args = list(args)
        self.kwargs = dict(kwargs)
        self._names: list[str] = []
        self._keywords: set[str] | None = None
        for function in behind(type(model), mixin, method):
            bound = function.__get__(model, type(model))
            parameters = inspect.signature(bound).parameters.values()
            if self._keywords is None:
                self._keywords = {p.name for p in parameters}
                self._any_keyword = _has(parameters, "VAR_KEYWORD")
            names = [p.name for p in parameters if p.kind in _POSITIONAL]
            self._names += names[len(self._names) :]
            if not _has(parameters, "VAR_POSITIONAL"):
                break
            # `*args` is for the next one to name.

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the argument `name`, `default` where it was not given."""
        at = self._position(name)
        if at is not None:
            return self.args[at]
        return self.kwargs.get(name, default)

    def put(self, name: str, value: Any) -> bool:
        """Puts `value` where `name` was given, else beside the keywords.

        Returns:
            Bool, False if the method knows no such argument; then nothing is
            changed.
        """
        at = self._position(name)
        if at is not None:
            self.args[at] = value
        elif self._any_keyword or name in (self._keywords or ()):
            self.kwargs[name] = value
        else:
            return False
        return True

    def _position(self, name: str) -> int | None:
        if name in self.kwargs or name not in self._names:
            return None
        at = self._names.index(name)
        return at if at < len(self.args) else None


def _has(parameters: Any, kind: str) -> bool:
    return any(p.kind.name == kind for p in parameters)


def behind(cls: type, mixin: type, method: str) -> Iterator[Any]:
    """Yields the functions `method` of the classes behind the mixin.

    Args:
        cls: A class with the mixin among its bases.
        mixin: The mixin.
        method: The method's name.
    """
    mro = cls.__mro__
    for base in mro[mro.index(mixin) + 1 :]:
        if method in vars(base):
            yield vars(base)[method]
