"""The mixin on tasks of `keras_hub`: a `fit` and a `compile` of their own."""

import keras
import numpy as np
import pytest
from models import distance

import accumkit

hub = pytest.importorskip("keras_hub", reason="keras-hub is optional")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog"]
TEXTS = ["the cat", "the dog the dog", "cat cat cat", "dog", "cat", "the"]


class Text(accumkit.AccumulationMixin, hub.models.BertTextClassifier):
    pass


class Image(accumkit.AccumulationMixin, hub.models.ViTImageClassifier):
    pass


def text(cls, preprocessor=None):
    keras.utils.set_random_seed(1)
    backbone = hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        max_sequence_length=6,
        dropout=0.0,  # draws other masks for other batches
    )
    return cls(backbone, 2, preprocessor=preprocessor, dropout=0.0)


def image(cls, preprocessor=None):
    keras.utils.set_random_seed(1)
    backbone = hub.models.ViTBackbone((4, 4, 3), 2, 1, 2, 8, 8)
    return cls(backbone, 3, preprocessor=preprocessor)


def texts_and_labels(preprocessor):
    texts = np.array((TEXTS * 3)[:14])
    y = np.random.default_rng(0).integers(0, 2, len(texts))
    return (texts if preprocessor else text_preprocessor()(texts)), y


def text_preprocessor():
    return hub.models.BertTextClassifierPreprocessor(
        hub.tokenizers.BertTokenizer(vocabulary=WORDS), sequence_length=6
    )


def image_preprocessor():
    return hub.models.ViTImageClassifierPreprocessor(
        hub.layers.ViTImageConverter(image_size=(4, 4), scale=1 / 255)
    )


def pictures_and_labels(preprocessor):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (14, 4, 4, 3)).astype("float32")
    return x, rng.integers(0, 3, len(x))


TASKS = {
    "text": (
        text,
        (hub.models.BertTextClassifier, Text),
        texts_and_labels,
        text_preprocessor,
    ),
    "image": (
        image,
        (hub.models.ViTImageClassifier, Image),
        pictures_and_labels,
        image_preprocessor,
    ),
}


@pytest.mark.parametrize(
    ("task", "preprocess"), [("text", False), ("text", True), ("image", True)]
)
def test_a_task_is_the_large_batch(task, preprocess):
    build, (plain, mixed), data, preprocessor = TASKS[task]
    x, y = data(preprocess)

    def run(cls, batch_size, **options):
        model = build(cls, preprocessor() if preprocess else None)
        model.compile(keras.optimizers.SGD(0.5), **options)
        start = model.get_weights()
        # 14 samples: a window of 8, one of 6.
        history = model.fit(x, y, batch_size, shuffle=False, verbose=0)
        return model, start, history.history

    large, start, logs = run(plain, 8)
    small, *_ = run(plain, 2)
    assert distance(small, large, start) > 1e-2
    for batch_size, options in (
        (2, {"accumulation_steps": 4}),
        (8, {"micro_batch_size": 3}),
    ):
        ours, _, our_logs = run(mixed, batch_size, **options)
        assert distance(ours, large, start) < 1e-5
        assert (ours.optimizer_steps, ours.open_micro_batches) == (2, 0)
        # Its metrics too: `"auto"` is the class's, not Keras's.
        assert set(our_logs) == set(logs)
        assert our_logs["loss"] == pytest.approx(logs["loss"], rel=1e-2)


def test_the_defaults_are_those_of_the_task():
    stock, ours = text(hub.models.BertTextClassifier), text(Text)
    for options in ({}, {"accumulation_steps": 2}):
        ours.compile(**options)
        assert type(ours.optimizer) is type(stock.optimizer)
        assert ours.optimizer.get_config() | {"name": ""} == (
            stock.optimizer.get_config() | {"name": ""}
        )
        assert ours.loss.get_config() == stock.loss.get_config()
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="the two would multiply"):
        ours.compile(accumulating, accumulation_steps=2)
    assert ours.accumulation_steps == 2
