"""What the tests of layers share."""

import pytest

from threads import one_thread

_one_thread = pytest.fixture(autouse=True, scope="package")(one_thread)
