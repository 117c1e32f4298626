"""`python -m outrider`."""

import sys

from outrider.cli.main import main

sys.exit(main())
