"""``python -m qgnn``, as torchrun starts it: the command without the console script."""

import sys

from qgnn.cli.app import main

sys.exit(main())
