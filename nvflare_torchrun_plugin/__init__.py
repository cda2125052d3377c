"""Runs each NVFlare task as one torchrun job over a group of nodes.

Importing this package imports neither torch nor nvflare: the translator and the node agent live in
it and start in milliseconds.

Where to begin to read, in the order of a task's way through the modules: ``executor`` (NVFlare's task),
``job_run`` and ``planning`` (attempts, and what one of them is: ``launch``), ``supervisor`` and ``relay`` (the
thread in NVFlare's client job process, the "CJ", and what NVFlare starts in place of a trainer), ``group`` with
``roster`` and ``bring_up`` (one attempt, its nodes, their start), ``channel`` (one agent's connection), ``wire``
(what they say), ``node_agent`` with ``rank_port`` (on each node), ``torchrun_node`` (the translator: the
``NVFL_*`` variables of ``contract`` to torchrun's command line), ``rank`` with ``agent_link`` and ``run_program``
(in each rank), and back to ``verdict``. Where the nodes come from: ``group_choice``, ``node_group``,
``site_file``, ``schedulers``, ``transports``.
"""

__version__ = "0.1.0"
