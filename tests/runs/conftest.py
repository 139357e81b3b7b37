"""Trainers whose runs write the folders read here."""

from tests.train.conftest import flags, make

__all__ = ["flags", "make"]
