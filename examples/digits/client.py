"""Trains handwritten digits with DistributedDataParallel: an ordinary torchrun script that talks to NVFlare.

Every process of the site runs this script and calls the same functions; what rank 0 sends is the result.

It takes one task after the other until there is no more: one, when each task starts its own processes
(launch_once = false), or all of them. Most workflows only let it train; cross-site evaluation also asks for the
model that the site has trained, and has it evaluate those of others.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from data import load, site_number
from model import DigitNet
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nvflare_torchrun_plugin.client as flare

# What the site has trained last. The ranks work in the job's folder, so the processes of a later task find it.
TRAINED = Path("trained.pt")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="passes over the site's images per task")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, all processes together")
    parser.add_argument("--sites", type=int, default=2, help="sites that share the training images")
    parser.add_argument(
        "--site-number", type=int, help="number of this site, from 0; by default from the end of its name"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    return parser.parse_args()


def choose_device(wish: str) -> torch.device:
    """This process's own GPU, or the CPU."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def evaluate(net: torch.nn.Module, test: TensorDataset) -> float:
    """The share of test images that the network reads correctly."""
    device = next(net.parameters()).device
    images, labels = (tensor.to(device) for tensor in test.tensors)
    net.eval()
    with torch.no_grad():
        right = net(images).argmax(dim=1) == labels
    return float(right.float().mean())


def train(net: torch.nn.Module, images: TensorDataset, args: argparse.Namespace, seed: int) -> int:
    """Trains on this rank's share of the images; the distributed network averages the gradients.

    Returns:
        the number of optimizer steps.
    """
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(images, seed=seed)
    share = max(1, args.batch_size // dist.get_world_size())
    loader = DataLoader(images, batch_size=share, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    device = next(net.parameters()).device
    net.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(batch.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
    return args.epochs * len(loader)


def main(distribute: Callable[[torch.nn.Module], torch.nn.Module] = DistributedDataParallel) -> None:
    """Works off the site's tasks; ``distribute`` makes a network train on all ranks together."""
    args = arguments()
    device = choose_device(args.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    flare.init()
    site = flare.get_site_name()
    number = site_number(site) if args.site_number is None else args.site_number
    images, test = load(number, args.sites)
    net = distribute(DigitNet().to(device))
    first = dist.get_rank() == 0

    while flare.is_running():
        model = flare.receive()
        started = time.monotonic()
        if flare.is_submit_model():
            flare.send(flare.FLModel(params=torch.load(TRAINED)) if first else None)
            continue

        flare.load_model(net, model)
        accuracy = evaluate(net, test)
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics={"accuracy": accuracy}))
            continue

        steps = train(net, images, args, seed=model.current_round)
        params = flare.full_params(net)
        if first:
            torch.save(params, TRAINED)
            print(
                f"{site}: round {model.current_round}, {dist.get_world_size()} processes on "
                f"{os.environ['GROUP_WORLD_SIZE']} nodes, {len(images)} images, "
                f"global accuracy {accuracy:.4f}, {time.monotonic() - started:.2f} s"
            )
        flare.send(
            flare.FLModel(
                params=params,
                metrics={"accuracy": accuracy},
                meta={"NUM_STEPS_CURRENT_ROUND": steps},
            )
        )

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
