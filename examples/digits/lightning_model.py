"""The network of the Lightning example; the server keeps it, so it needs pytorch-lightning as well."""

import pytorch_lightning as pl
import torch
from model import DigitNet
from torch.nn.functional import cross_entropy


class LitDigits(pl.LightningModule):
    """Learns to read the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitNet()
        self.lr = 0.05

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        right = self.net(images).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
