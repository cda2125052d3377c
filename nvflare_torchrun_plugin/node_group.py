"""The component of a job that describes its node group, and where other components find the description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from nvflare_torchrun_plugin.description.group_description import GROUP_KEYS, PROPERTY, parse


class NodeGroupProvider(FLComponent):
    """Component of a job that says which nodes run its tasks, for sites that do not say it themselves.

    It sets the FL context property ``node_group`` before the run starts. A site's own
    ``local/node_group.yaml`` goes before it, and only a job with the bring-your-own-code right may have it.
    """

    def __init__(
        self,
        nodes: int | str | Sequence[str | Mapping[str, object]],
        transport: str | Sequence[str] | None = None,
        master_port_range: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        forward_env: Sequence[str] | None = None,
        python: str | None = None,
        stage: str | None = None,
        on_busy: str | None = None,
        busy_timeout: float | None = None,
        join: Mapping[str, object] | None = None,
    ) -> None:
        """Check and keep the description.

        Args:
            nodes: number of nodes on the site's own host, or a list with a host name, or a dict with
                ``host`` and perhaps ``address``, ``nproc_per_node`` and ``python``, for each node; or ``auto``:
                the scheduler's allocation around the client job.
            transport: how a command is started on a node: ``local`` (all nodes are the site's host; the
                default), ``ssh``, ``srun``, ``join`` (the nodes dial in), or a list of words with ``{host}``, and
                perhaps ``{command}``. With
                ``auto`` the default is what suits the scheduler.
            master_port_range: first and last port for the rendezvous; default 29400 to 30399.
            env: environment variables for the processes on every node; default none.
            forward_env: patterns of variables that go from the client job to the nodes; default ``NCCL_*``,
                ``GLOO_*``, ``UCX_*``, ``HF_*`` and ``PYTHONPATH``.
            python: path of the Python interpreter on the nodes; default: the path of the site's own.
            stage: whether the nodes get a copy of the job's ``custom`` folder: ``auto`` (those that do not see
                it; the default), ``always`` or ``never``.
            on_busy: what to do while another job of the site uses a node: ``wait`` (the default), ``fail``, or
                ``share`` it.
            busy_timeout: seconds to wait for a busy node; default 3600.
            join: for the transport ``join``: ``file`` (a join file made beforehand), ``ports`` (first and last),
                ``wait`` (seconds for a node that is not there; default 60).

        Raises:
            NodeGroupError: a value is wrong. Whether the hosts suit the site is found out there.
        """
        super().__init__()
        # Unchanged and under these names: so the Job API finds them when it exports a job.
        self._nodes = nodes
        self._transport = transport
        self._master_port_range = master_port_range
        self._env = env
        self._forward_env = forward_env
        self._python = python
        self._stage = stage
        self._on_busy = on_busy
        self._busy_timeout = busy_timeout
        self._join = join
        parse(self.described(), type(self).__name__, None)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Set the property when the run is about to start."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            fl_ctx.set_prop(PROPERTY, self.described(), private=True, sticky=True)

    def described(self) -> dict[str, object]:
        """Return the description, as the property holds it."""
        values = {key: getattr(self, f"_{key}") for key in GROUP_KEYS}
        return {key: value for key, value in values.items() if value is not None}


def property_of(fl_ctx: FLContext) -> object:
    """Return what a component of the job has set as the node group, or None."""
    value: object = fl_ctx.get_prop(PROPERTY)
    return value
