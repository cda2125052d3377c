"""The network of the Hugging Face example: a tiny vision transformer with random weights, nothing to download."""

from transformers import ViTConfig, ViTForImageClassification


class DigitsForImageClassification(ViTForImageClassification):
    """Reads the digits in images of 8 x 8 pixels; the server makes it without arguments.

    By the end of its name transformers knows what its loss is.
    """

    def __init__(self) -> None:
        super().__init__(
            ViTConfig(
                image_size=8,
                patch_size=4,
                num_channels=1,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                hidden_dropout_prob=0.0,
                initializer_range=0.2,
                num_labels=10,
            )
        )
