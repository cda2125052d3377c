"""Trains handwritten digits with Hugging Face's Trainer and NVFlare's patch of it.

Every process of the site runs this script, and the Trainer finds torchrun's ranks by itself. The patch gives the
received model to every rank, and sends rank 0's.
"""

import argparse
import os

import nvflare.client.hf as nvflare_hf
import torch
from data import load, site_number
from hf_model import DigitsForImageClassification
from torch.utils.data import TensorDataset
from transformers import EvalPrediction, Trainer, TrainingArguments

import nvflare_torchrun_plugin.client as flare


def records(images: TensorDataset) -> list[dict[str, torch.Tensor]]:
    """The images as the Trainer takes them."""
    return [{"pixel_values": image, "labels": label} for image, label in images]


def accuracy(seen: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((seen.predictions.argmax(axis=1) == seen.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="passes over the site's images per task")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, all processes together")
    parser.add_argument("--sites", type=int, default=2, help="sites that share the training images")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU though there is a GPU")
    args = parser.parse_args()

    flare.init()
    site = flare.get_site_name()
    images, test = load(site_number(site), args.sites)
    trainer = Trainer(
        model=DigitsForImageClassification(),
        args=TrainingArguments(
            output_dir="hf",
            use_cpu=args.cpu,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            per_device_train_batch_size=max(1, args.batch_size // int(os.environ["WORLD_SIZE"])),
            logging_strategy="epoch",
            # Each task begins with a new optimizer: its state would travel from task to task by a checkpoint,
            # which every node would have to see.
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=records(images),
        eval_dataset=records(test),
        compute_metrics=accuracy,
    )
    nvflare_hf.patch(trainer, restore_state=False, stream_metrics=True)

    # NVFlare's is_running() waits for the task in a collective of the ranks, which has a time limit. This
    # package's does not: the task is there when NVFlare asks.
    while flare.is_running() and nvflare_hf.is_running():
        before = trainer.evaluate()
        trainer.train()
        if trainer.is_world_process_zero():
            print(
                f"{site}: {trainer.args.world_size} processes on {os.environ['GROUP_WORLD_SIZE']} nodes, "
                f"accuracy before {before['eval_accuracy']:.4f}, {trainer.state.global_step} steps"
            )


if __name__ == "__main__":
    main()
