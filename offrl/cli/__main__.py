"""`python -m offrl.cli`: the command `offrl`, for torchrun and environments without scripts.

Like the command, it imports nothing from the working folder, which `-m` puts first on the module path: a stranger's
folder may hold `hydra_plugins` or a plugin's entry points. PYTHONPATH=. says that modules of your own are there.
"""

import os
import sys

import offrl

if (
    not getattr(sys.flags, "safe_path", False)  # python -P
    and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(offrl.__file__)))
):
    del sys.path[0]

from offrl.cli.main import main

sys.exit(main())
