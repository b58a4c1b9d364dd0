"""`python -m offrl.cli`: the command `offrl`, for torchrun and environments without scripts."""

import sys

from offrl.cli.main import main

sys.exit(main())
