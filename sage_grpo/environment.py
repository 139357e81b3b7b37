"""Environment variables that the package reads."""

TOKEN_VARIABLE = "SAGE_REWARD_TOKEN"  # secret that a client of a reward server sends
HOSTS_VARIABLE = "SAGE_REWARD_HOSTS"  # servers to which a configuration file may send it
