"""Makes the digits job with NVFlare's Job API; the same job as from the template torchrun_fedavg_pt.

python job.py                                  run it in NVFlare's simulator
python job.py --export --export-dir jobs       write it to jobs/digits, for: nvflare job submit -j jobs/digits
"""

import argparse
from pathlib import Path

from model import DigitNet
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import Recipe

from nvflare_torchrun_plugin.executor import TorchrunExecutor
from nvflare_torchrun_plugin.node_group import NodeGroupProvider


def main() -> None:
    parser = argparse.ArgumentParser(
        epilog="--export --export-dir DIR: write the job to DIR/digits, do not run it"
    )
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2, help="nodes per site; here all of them are this host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workspace", default="simulation", help="folder for the simulator's run")
    # NVFlare takes --export and --export-dir off the command line itself.
    args = parser.parse_args()

    job = BaseFedJob(name="digits", initial_model=DigitNet(), min_clients=args.sites, key_metric="accuracy")
    job.to_server(FedAvg(num_clients=args.sites, num_rounds=args.rounds))

    executor = TorchrunExecutor(
        script="client.py",
        script_args=["--sites", str(args.sites), "--device", "cpu"],
        nproc_per_node=1,
        params_exchange_format="pytorch",
        train_with_evaluation=True,
    )
    job.to_clients(executor, tasks=["train"])
    # A site with a local/node_group.yaml of its own uses that.
    job.to_clients(NodeGroupProvider(nodes=args.nodes, transport="local"))
    here = Path(__file__).parent
    for name in ("client.py", "data.py", "model.py"):
        job.add_file_to_clients(str(here / name))
    # The sites have the package installed: its sources need not travel with the job.
    job.set_app_packages(["nvflare_torchrun_plugin"])

    Recipe(job).execute(SimEnv(num_clients=args.sites, workspace_root=args.workspace))


if __name__ == "__main__":
    main()
