"""The network that sites and server share: the server keeps it, every site trains it."""

import torch
from torch import nn


class DigitNet(nn.Module):
    """A small convolutional network for 8 x 8 grey images of the digits 0 to 9."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores per digit, shape (n, 10), for images of shape (n, 1, 8, 8)."""
        return self.classifier(self.features(images).flatten(1))
