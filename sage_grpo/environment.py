"""Environment variables that the package reads."""

TOKEN_VARIABLE = "SAGE_REWARD_TOKEN"  # what a client of a reward server proves itself with
HOSTS_VARIABLE = "SAGE_REWARD_HOSTS"  # to which servers a configuration file may send it
