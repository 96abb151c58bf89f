"""The values that `bench` finds in real studies stay as they are: see README.md in this folder."""

import pytest

from tests.freeze.compare import STUDIES, differences


@pytest.mark.parametrize("study", STUDIES)
def test_a_frozen_study_has_the_expected_values(study: str) -> None:
    assert list(differences(study)) == []
