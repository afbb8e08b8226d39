"""Makes the modules of this folder importable, as `python tests/security/fuzz.py` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
