"""What tests share. Asserts here show their values as those of tests do."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py")))
