import sys

from paceline.cli.app import main

if __name__ == "__main__":  # the engine's process imports this module again, and must not run it
    sys.exit(main())
