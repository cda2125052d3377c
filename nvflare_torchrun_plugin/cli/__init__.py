"""The console command ``nvflare-torchrun``: what people ask of node groups from a shell.

One file per verb, each a typer command; :mod:`.verbs` puts them together, :mod:`.app` is what
the command runs, :mod:`.output` is how all of them speak.
Nothing outside this folder imports it: what a node or a client job runs needs neither typer nor rich.
"""
