"""Whether the nodes of a group fit together, judged by what their agents found; nothing has been started yet."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from nvflare_torchrun_plugin import wire

Found = tuple[str, wire.Hello, wire.Ready]
"""A node: its name in the group, and its agent's first two frames."""


def check(
    nodes: Sequence[Found], nproc_per_node: Sequence[int | str], *, spans_hosts: bool
) -> tuple[dict[int, str], list[str]]:
    """Compare each node with node rank 0, on which the client job runs.

    Args:
        nodes: all nodes, in the order of their ranks.
        nproc_per_node: processes on each, or torchrun's word for a number.
        spans_hosts: whether they are several hosts.

    Returns:
        For each node rank that cannot take part, why; and what is only worth a warning.
    """
    complaints: dict[int, str] = {}
    warnings = []
    gpu_host = host_with_gpus(nodes)
    first_host, first, _ = nodes[0] if nodes else ("", None, None)
    for node_rank, ((host, hello, ready), wanted) in enumerate(zip(nodes, nproc_per_node, strict=True)):
        complaint = ready.error or lacks_gpu(hello, wanted, gpu_host)
        if node_rank > 0 and first is not None:
            complaint = complaint or disagrees(first_host, first, host, hello)
            complaint = complaint or (misled(ready) if spans_hosts else "")
            warnings += differences(first_host, first, node_rank, host, hello)
        if complaint:
            complaints[node_rank] = complaint
    return complaints, warnings


def host_with_gpus(nodes: Sequence[Found]) -> str | None:
    """Return the first node that has GPUs, None when none has."""
    return next((host for host, hello, _ in nodes if hello.gpus), None)


def misled(ready: wire.Ready) -> str:
    """Return what is wrong with the master address as the node understands it, nothing when all is well."""
    if not ready.address or not _is_loopback(ready.address):
        return ""
    return (
        f"the master address means {ready.address} there, the node's own loopback: give node rank 0 an"
        " address that every node can reach (nodes: [{host: ..., address: ...}, ...])"
    )


def differences(first_host: str, first: wire.Hello, node_rank: int, host: str, hello: wire.Hello) -> list[str]:
    """Return a sentence for each version that differs, and may."""
    return [
        f"node {node_rank} ({host}) has {what} {theirs}, node 0 ({first_host}) has {ours}"
        for what, ours, theirs in (
            ("Python", first.python, hello.python),
            ("nvflare", first.nvflare, hello.nvflare),
        )
        if _minor(ours) != _minor(theirs)
    ]


def processes(wanted: int | str, hello: wire.Hello | None) -> int | str:
    """Return what torchrun is told for a node: ``auto`` made definite where the agent could count.

    torchrun's own ``auto`` falls back to CPUs when CUDA does not work, and counts those of the whole host.
    """
    if wanted != "auto" or hello is None or hello.gpus is None:
        return wanted
    return "gpu" if hello.gpus else hello.cores


def disagrees(first_host: str, first: wire.Hello, host: str, hello: wire.Hello) -> str:
    """Return which version differs and must not, nothing when none does."""
    for package, ours, theirs in (
        ("nvflare-torchrun-plugin", first.version, hello.version),
        ("torch", _minor(first.torch), _minor(hello.torch)),
    ):
        if ours != theirs:
            here, there = (first.torch, hello.torch) if package == "torch" else (ours, theirs)
            return (
                f"{package} is {there or 'not installed'} on node {host}, but {here or 'not installed'} on node"
                f" {first_host}: install the same version on both, or name another interpreter (python)"
            )
    return ""


def lacks_gpu(hello: wire.Hello, wanted: int | str, gpu_host: str | None) -> str:
    """Return that the node has no GPU although it needs one, nothing when all is well."""
    if hello.gpus != 0:
        return ""
    if wanted == "gpu":
        return "nproc_per_node is 'gpu', but no GPU is in sight there"
    if wanted == "auto" and gpu_host is not None:
        return (
            f"nproc_per_node is 'auto' and node {gpu_host} has GPUs, but none is in sight there: give that node a"
            " number (nproc_per_node) or leave it out"
        )
    return ""


def _minor(version: str | None) -> str:
    return ".".join((version or "").split("+")[0].split(".")[:2])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
