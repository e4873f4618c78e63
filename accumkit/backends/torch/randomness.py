"""Random numbers of torch's own: `Dropout` without a seed draws them."""

from typing import Any

import torch


def state() -> Any:
    """States of torch's generators."""
    cuda = torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []


def put_back(value: Any) -> None:
    """Puts them back.

    Args:
        value: What `state` returned.
    """
    cpu, cuda = value
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
