"""Several hosts on this machine, made of namespaces, for tests that need more than one (Linux, root).

``hosts.Bed`` is hosts with a network between them, ``ssh.SshBed`` adds a real sshd to each and
``slurm.SlurmBed`` a real Slurm. They start in about a second and leave nothing behind; ``fixtures`` has them
ready for tests.
"""
