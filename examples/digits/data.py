"""Handwritten digits that ship with scikit-learn, divided among the sites.

1797 images of 8 x 8 pixels. One in five is held out: the test set, which is the same for all sites. The rest
is dealt out so that every image belongs to exactly one site.
"""

import re

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset


def site_number(site_name: str) -> int:
    """The number, counted from 0, of a site that is named like NVFlare's own: ``site-1`` is 0.

    Raises:
        ValueError: the name does not end in a number of at least 1.
    """
    match = re.search(r"([1-9][0-9]*)$", site_name)
    if match is None:
        raise ValueError(f"the name of site {site_name!r} does not end in a number: say --site-number")
    return int(match.group(1)) - 1


def load(site: int, sites: int) -> tuple[TensorDataset, TensorDataset]:
    """The training images of one site, and the test images.

    Args:
        site: number of the site, from 0.
        sites: how many sites share the training images.

    Raises:
        ValueError: there is no such site.
    """
    if not 0 <= site < sites:
        raise ValueError(f"site number {site} is not among {sites} sites, which count from 0: raise --sites")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.long)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    mine = train[site::sites]
    return TensorDataset(images[mine], labels[mine]), TensorDataset(images[test], labels[test])
