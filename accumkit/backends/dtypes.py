"""The dtype in which gradients are summed."""


def wide(dtype: str) -> str:
    """The dtype in which gradients of `dtype` are summed, float32 or wider.

    Args:
        dtype: Name of a floating-point dtype.
    """
    return "float32" if dtype in ("float16", "bfloat16") else dtype
