"""Trains handwritten digits with PyTorch Lightning and NVFlare's patch of its Trainer.

Every process of the site runs this script. Lightning finds torchrun's ranks by itself; it only has to be told
how many there are. The patch gives the received model to every rank, and sends rank 0's.
"""

import argparse
import os

import pytorch_lightning as pl
from data import load, site_number
from lightning_model import LitDigits
from nvflare.client.lightning import FLCallback, patch
from torch.utils.data import DataLoader

import nvflare_torchrun_plugin.client as flare


class Report(pl.Callback):
    """Sends what was learned to the server, for TensorBoard."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (received,) = (c for c in trainer.callbacks if isinstance(c, FLCallback))
        loss = trainer.callback_metrics["loss"].item()
        flare.log("loss", loss, flare.AnalyticsDataType.SCALAR, global_step=received.current_round)
        if trainer.is_global_zero:
            print(
                f"{flare.get_site_name()}: {trainer.world_size} processes on {trainer.num_nodes} nodes, "
                f"accuracy before {received.metrics['accuracy']:.4f}, {trainer.global_step} steps, loss {loss:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="passes over the site's images per task")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, all processes together")
    parser.add_argument("--sites", type=int, default=2, help="sites that share the training images")
    parser.add_argument("--accelerator", default="auto", help="Lightning's: cpu, gpu, ...")
    args = parser.parse_args()

    flare.init()
    images, test = load(site_number(flare.get_site_name()), args.sites)
    share = max(1, args.batch_size // int(os.environ["WORLD_SIZE"]))
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        strategy="ddp",
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=args.epochs,
        callbacks=[Report()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    patch(trainer)
    net = LitDigits()

    # This package's is_running(): NVFlare's own is false on all ranks but 0.
    while flare.is_running():
        trainer.validate(net, DataLoader(test, batch_size=64), verbose=False)
        trainer.fit(net, DataLoader(images, batch_size=share, shuffle=True))


if __name__ == "__main__":
    main()
