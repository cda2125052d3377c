"""A job of many rounds while processes are killed and hosts go and come back, all at random (``make chaos``).

``plan`` draws the faults from a seed, ``run`` runs the job and lets them happen, ``check`` says what the job owes.
"""
