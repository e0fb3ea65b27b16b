"""The command line: ``paceline serve | generate | inspect | selfcheck | demo``."""

from paceline.cli.app import main

__all__ = ["main"]
