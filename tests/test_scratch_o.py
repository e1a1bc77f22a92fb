import pytest
from tests.trainers.test_audio import *
from tests.trainers.test_audio import made
@pytest.mark.parametrize("case", [Case(ONE, ONE, 2, packing=True, audio=ONE), Case(ONE, ONE, 1, packing=False, audio=ONE), Case(SEQUENCE, ONE, 1, packing=False, audio=ONE)], ids=str)
def test_o(case, made):
    e=run(made, case); print(case, e); assert_exact(e)
