"""The warnings of accumkit and how they are raised."""

import warnings


class AccumkitWarning(UserWarning):
    """Base class of every warning that accumkit gives.

    Example:

    ```python
    import warnings

    warnings.filterwarnings("ignore", category=accumkit.AccumkitWarning)
    ```
    """


def warn_once(seen: set[str], key: str, text: str, stacklevel: int = 3) -> None:
    """Gives a warning the first time that `key` is met in `seen`.

    Args:
        seen: Keys of the warnings given so far, changed in place. It lives as
            long as the thing that the warning is about, for example one
            `compile`.
        key: What the warning is about.
        text: The warning.
        stacklevel: As in `warnings.warn`, counted from the caller.
    """
    if key in seen:
        return
    seen.add(key)
    warnings.warn(text, AccumkitWarning, stacklevel=stacklevel)
