import pytest

from tests.support.guard_rig import Rig


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()
