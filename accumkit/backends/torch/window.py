"""A window of gradients on torch.

Autograd's own `.grad` is the sum where the window belongs to a train step: a
loss is multiplied by its weight, `backward` adds to `.grad`, and what it holds
is divided once. No second buffer, no synchronization with the device: counts
are Python numbers, and a weight that is a tensor stays one. Only where 16 bits
would round the sum away, and where gradients are handed in by somebody who may
clear them, are there sums apart.
"""

from typing import Any

import keras
import torch

from accumkit import recording


def replica_id() -> int:
    """The replica that the calling code works for; there is only one."""
    return 0


class Window:
    """Sums of gradients on their way to one optimizer step.

    Args:
        optimizer: The optimizer that takes the step.
        accumulation_steps: N, batches in a full window.

    Attributes:
        across: Whether a window spans several batches.
        variables: Those of the train step that was run last.
        recorder: A `WindowRecorder`, or None.
    """

    def __init__(self, optimizer: Any, accumulation_steps: int):
        self.optimizer = optimizer
        self.across = accumulation_steps > 1
        self.variables: list[Any] = []
        self.recorder: Any = None
        self._steps = self._size = accumulation_steps
        self._batches = self._pieces = 0
        self._denominator: Any = 0
        # By `id` of their variable, which is kept beside.
        self._sums: dict[int, tuple[Any, Any]] = {}
        # Whether what lies in `.grad` belongs to the window.
        self._owns_grad = False

    def track(self, variables: list[Any]) -> None:
        """Notes what a train step trains.

        Args:
            variables: Its trainable variables.
        """
        if variables is self.variables:
            return
        if self._owns_grad and self._pieces:
            # Frozen since: its gradient must not lie there when it thaws.
            today = {id(v) for v in variables}
            for variable in self.variables:
                if id(variable) not in today:
                    variable.value.grad = None
        self.variables = variables
        if not self.optimizer.built:
            self.optimizer.build(variables)

    @property
    def traveling_variables(self) -> list[Any]:
        """None: a train step on torch reaches its variables by itself."""
        return []

    def is_empty(self) -> bool:
        """Whether no earlier batch has been added."""
        return self._pieces == 0

    def clear_grad(self) -> None:
        """Takes `.grad` for the window, whatever was left in there."""
        self._owns_grad = True
        for variable in self.variables:
            variable.value.grad = None

    @torch.no_grad()
    def add_grad(self, late: Any, divisor: Any) -> None:
        """Adds what a backward pass left in `.grad`, where it may stay.

        Args:
            late: What the gradients are to be multiplied by, or None.
            divisor: Its share of what the sums are divided by, or None.
        """
        if divisor is not None:
            self._denominator = self._denominator + divisor
        for variable in self.variables:
            gradient = variable.value.grad
            narrow = variable.dtype in ("float16", "bfloat16")
            if gradient is None or (late is None and not narrow):
                continue
            dtype = torch.float32 if narrow else gradient.dtype
            gradient = gradient.to(dtype)
            if late is not None:
                gradient = gradient * late
            if id(variable) in self._sums:
                self._sums[id(variable)][1].add_(gradient)
            else:
                self._sums[id(variable)] = (variable, gradient)
            variable.value.grad = None

    @torch.no_grad()
    def add(
        self, gradients: list[Any], late: Any = None, divisor: Any = 1
    ) -> None:
        """Adds gradients that are the caller's.

        Args:
            gradients: One for each of `variables`; None where there is none.
            late: What they are to be multiplied by, or None.
            divisor: Its share of what the sums are divided by.
        """
        self._denominator = self._denominator + divisor
        totals, added = [], []
        for variable, gradient in zip(self.variables, gradients, strict=True):
            if gradient is None:
                continue
            narrow = gradient.dtype in (torch.float16, torch.bfloat16)
            wide = gradient.to(torch.float32) if narrow else gradient
            if late is not None:
                wide = wide * late
            if id(variable) in self._sums:
                totals.append(self._sums[id(variable)][1])
                added.append(wide)
            else:
                own = wide.clone() if wide is gradient else wide
                self._sums[id(variable)] = (variable, own)
        if totals:
            torch._foreach_add_(totals, added)  # pyright: ignore

    def close_full(self, pieces: int = 1) -> None:
        """Counts a batch; takes the optimizer step if the window is full.

        Args:
            pieces: In how many micro-batches the batch was worked off.
        """
        self._batches += 1
        self._pieces += pieces
        if self._batches >= self._size:
            self.apply()

    def take(self, gradients: list[Any], weight: Any = None) -> None:
        """Adds a micro-batch and closes the window if that fills it.

        Args:
            gradients: One for each variable, or None.
            weight: What it weighs, None for 1.
        """
        if isinstance(weight, torch.Tensor):
            weight = weight.detach()
        self.add(gradients, weight, 1 if weight is None else weight)
        self.close_full()

    def stateless_take(self, *values: Any) -> Any:
        """Raises: the window lies in tensors that are changed in place."""
        raise ValueError(
            "`stateless_apply` is not supported with the torch backend. "
            "Received: an AccumulationOptimizer. Call `apply`."
        )

    @torch.no_grad()
    def apply(self) -> None:
        """Takes the optimizer step of the open window."""
        if self.variables:
            gradients = [self._sum(v) for v in self.variables]
            divisor = self._divisor()
            if divisor is not None:
                present = [g for g in gradients if g is not None]
                if present:
                    torch._foreach_div_(present, divisor)  # pyright: ignore
            self._hand_over(gradients)
        self.discard()

    def discard(self) -> None:
        """Empties the window."""
        if self._owns_grad:
            self.clear_grad()
        self._sums.clear()
        self._denominator = 0
        self._batches = self._pieces = 0
        self._size = self._steps

    def forget_traces(self) -> None:
        """Nothing to do: nothing is traced."""

    def set_steps(self, accumulation_steps: int) -> None:
        """Sets N from the next window on.

        Args:
            accumulation_steps: N, batches in a full window.
        """
        self._steps = accumulation_steps
        self.across = self.across or accumulation_steps > 1
        if not self._batches:
            self._size = accumulation_steps

    def open_batches(self) -> int:
        """How many batches the open window holds."""
        return self._batches

    def open_micro_batches(self) -> int:
        """How many micro-batches it holds."""
        return self._pieces

    def _sum(self, variable: Any) -> Any:
        if id(variable) in self._sums:
            return self._sums[id(variable)][1]
        return variable.value.grad if self._owns_grad else None

    def _divisor(self) -> Any:
        denominator = self._denominator
        # Without weight there is no gradient either: 0 / 1 is 0.
        if isinstance(denominator, torch.Tensor):
            return torch.where(denominator == 0, 1, denominator)
        return None if denominator in (0, 1) else denominator

    def _hand_over(self, gradients: list[Any]) -> None:
        optimizer, recorder = self.optimizer, self.recorder
        if recorder is None:
            optimizer.apply(gradients, self.variables)
            return
        rate = keras.ops.copy(optimizer.learning_rate)
        before = keras.ops.copy(optimizer.iterations)
        norm = 0.0
        if recorder.gradient_norm:
            scale = optimizer.scale_loss(torch.ones(()))
            norm = recording.gradient_norm(gradients, scale)
        optimizer.apply(gradients, self.variables)
        recorder.close(rate, norm, optimizer.iterations - before)
