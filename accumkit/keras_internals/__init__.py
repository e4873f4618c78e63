"""The private parts of Keras that accumkit needs, each with its reason.

Everything else in the package uses public Keras API only. Keras may move any
of these in any release: each is read through `guards`.
"""

from accumkit.keras_internals.losses import (
    added_loss,
    added_losses,
    apply_mask,
    compile_loss,
    get_keras_mask,
    replace_added_losses,
    replaced_losses,
    set_keras_mask,
    squeeze_or_expand_to_same_rank,
    unmistakable_targets,
)
from accumkit.keras_internals.models import (
    all_layers,
    build,
    compute_loss,
    computes_in_float16,
    forward,
    global_seed,
    global_seed_states,
    has_metrics,
    initial_epoch,
    loss_tracker,
    overrides_compute_loss,
    overrides_compute_metrics,
    put_back_state,
    raw_value,
    update_metrics,
)
from accumkit.keras_internals.optimizers import (
    distribution_strategy,
    guarded_updates,
    schedule_of,
    scheduled_optimizer,
    update_where,
)

__all__ = [
    "added_loss",
    "added_losses",
    "all_layers",
    "apply_mask",
    "build",
    "compile_loss",
    "compute_loss",
    "computes_in_float16",
    "distribution_strategy",
    "forward",
    "get_keras_mask",
    "global_seed",
    "global_seed_states",
    "guarded_updates",
    "has_metrics",
    "initial_epoch",
    "loss_tracker",
    "overrides_compute_loss",
    "overrides_compute_metrics",
    "put_back_state",
    "raw_value",
    "replace_added_losses",
    "replaced_losses",
    "schedule_of",
    "scheduled_optimizer",
    "set_keras_mask",
    "squeeze_or_expand_to_same_rank",
    "unmistakable_targets",
    "update_metrics",
    "update_where",
]
