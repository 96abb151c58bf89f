"""Releases of Slurm are found in the Debian mirror by suite and number; `make releases` runs the tests on each."""

import time

import pytest

from tests.cluster.containers import ClusterError
from tests.cluster.plugin import release_or_skip
from tests.cluster.roots import Apt, SuiteMissingError


def test_a_suite_that_the_mirror_does_not_have_is_named(tmp_path):
    with pytest.raises(SuiteMissingError) as caught:
        Apt(tmp_path / "apt", "trixie", mirror=f"file:{tmp_path}/mirror").version()
    assert str(caught.value) == "the Debian mirror does not have the suite trixie"


def test_a_suite_without_a_valid_signature_is_not_used(tmp_path):
    suite = tmp_path / "mirror/dists/trixie"
    suite.mkdir(parents=True)
    (suite / "Release").write_text(
        f"Suite: trixie\nDate: {time.strftime('%a, %d %b %Y %H:%M:%S UTC', time.gmtime())}\n"
    )
    with pytest.raises(ClusterError) as caught:
        Apt(tmp_path / "apt", "trixie", mirror=f"file:{tmp_path}/mirror").version()
    assert not isinstance(caught.value, SuiteMissingError)
    assert "is not signed" in str(caught.value)


def test_only_a_suite_that_the_mirror_does_not_have_is_skipped_in_ci(monkeypatch):
    def fail(error: ClusterError) -> None:
        def find(name: str) -> None:
            raise error

        monkeypatch.setattr("tests.cluster.plugin.find_release", find)

    monkeypatch.setenv("CI", "true")
    fail(SuiteMissingError("the Debian mirror does not have the suite trixie"))
    with pytest.raises(pytest.skip.Exception, match=r"^the Debian mirror does not have the suite trixie$"):
        release_or_skip("trixie")
    fail(ClusterError("another Slurm release needs patchelf"))
    with pytest.raises(pytest.fail.Exception, match=r"^another Slurm release needs patchelf$"):
        release_or_skip("trixie")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"^another Slurm release needs patchelf$"):
        release_or_skip("trixie")
