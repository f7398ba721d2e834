"""``python -m qgnn.cli``: the command without the console script."""

import sys

from qgnn.cli.app import main

sys.exit(main())
