"""The entry point of `python -m fa2_lab`."""

import sys

from fa2_lab.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
