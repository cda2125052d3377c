"""``python -m nvflare_torchrun_plugin.cli``: the console command where it is not on the PATH."""

from .app import main

main()
