"""Environment variables that the package reads or sets."""

import os

TOKEN_VARIABLE = "SAGE_REWARD_TOKEN"  # secret that a client of a reward server sends
HOSTS_VARIABLE = "SAGE_REWARD_HOSTS"  # servers to which a configuration file may send it


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user decided; torch reads this when it is imported.

    Spinning threads take the cores from each other on a busy machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
