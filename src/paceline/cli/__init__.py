"""The command line: ``paceline serve | generate | inspect | selfcheck | demo | bench``."""

from paceline.cli.app import main

__all__ = ["main"]
