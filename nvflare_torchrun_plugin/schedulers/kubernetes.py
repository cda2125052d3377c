"""Kubernetes: a LeaderWorkerSet, or an Indexed Job, of a JobSet or not."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import NodeGroupError, shown
from nvflare_torchrun_plugin.schedulers import checks
from nvflare_torchrun_plugin.schedulers.found import MAX_HOSTS, Found, Host

KUBECTL = ("kubectl", "exec", "-i", "{host}", "--")
"""Transport to a pod whose name is the host's."""


def leader_worker_set(environ: Mapping[str, str]) -> Found:
    """Kubernetes LeaderWorkerSet: the leader's address is ``<set>-<group>.<subdomain>.<namespace>``, its first
    word the leader's pod, and a worker's has ``-<index>`` after that word (LWS documentation, "Labels,
    Annotations and Environment Variables" and "Concepts"), in the set's subdomain as in one per group.

    A set whose groups go by hash instead of number, or whose leader is known by its IP address alone, does not
    tell the names of its workers.
    """
    checks.index_zero(environ, "LWS_WORKER_INDEX", "the leader")
    size = _count(environ, "LWS_GROUP_SIZE")
    address = checks.required(environ, "LWS_LEADER_ADDRESS")
    leader, domain = _pod(address, "LWS_LEADER_ADDRESS", "[0-9]+", "'<set>-<group>.<subdomain>.<namespace>'")
    hosts = (Host(leader, address), *(_worker(leader, domain, index) for index in range(1, size)))
    return Found(
        f"Kubernetes LeaderWorkerSet (LWS_LEADER_ADDRESS={address}, LWS_GROUP_SIZE={size})", hosts, KUBECTL
    )


def indexed_job(environ: Mapping[str, str]) -> Found:
    """Kubernetes Indexed Job, also as a part of a JobSet: the host name of a pod is ``<job>-<index>``, and its
    domain the headless service that the template's ``subdomain`` names (Kubernetes, "Job with Pod-to-Pod
    Communication"; JobSet, ``network``). Kubernetes sets JOB_COMPLETION_INDEX; the manifest must say the rest.

    The *name* of a pod is its host name and five characters that nobody knows beforehand, hence the transport.
    """
    checks.index_zero(environ, "JOB_COMPLETION_INDEX", "index 0")
    size = _count(environ, "NNODES", " in the Job's manifest")
    address = checks.required(environ, "MASTER_ADDR", " in the Job's manifest")
    leader, domain = _pod(address, "MASTER_ADDR", "0", "the address of index 0, '<job>-0.<service>'")
    job = leader.removesuffix("-0")
    hosts = tuple(_worker(job, domain, index) for index in range(size))
    return Found(f"Kubernetes Job {job} (MASTER_ADDR={address}, NNODES={size})", hosts, _exec_in_job(job))


def _exec_in_job(job: str) -> tuple[str, ...]:
    """Transport to the pod that is an index of the job right now, found by the labels that Kubernetes puts on
    it ("Well-Known Labels", Kubernetes 1.28 or newer)."""
    labels = f"batch.kubernetes.io/job-name={job},batch.kubernetes.io/job-completion-index"
    return (
        "sh",
        "-c",
        # No braces: they are the template's.
        f'pod=$(kubectl get pods -o name --field-selector status.phase=Running -l "{labels}=$(expr "$1" :'
        ' ".*-\\([0-9]*\\)")") && shift && exec kubectl exec -i "$pod" -- "$@"',
        "kubectl",
        "{host}",
    )


def _pod(address: str, name: str, ordinal: str, form: str) -> tuple[str, str]:
    """Return the first word of a pod's address, and what comes after it."""
    # A label of the domain name system, an ordinal, and at least one more label.
    match = re.fullmatch(rf"([a-z0-9][a-z0-9-]{{0,60}}-{ordinal})((?:\.[a-z0-9-]{{1,63}})+)", address)
    if not match or len(address) > 253:
        raise NodeGroupError(f"{name} is {shown(address)}: must be {form}, from which the others' names follow")
    return match[1], match[2]


def _worker(stem: str, domain: str, index: int) -> Host:
    return Host(f"{stem}-{index}", f"{stem}-{index}{domain}")


def _count(environ: Mapping[str, str], name: str, at: str = "") -> int:
    return checks.integer(checks.required(environ, name, at), name, 1, MAX_HOSTS)
