"""The catalogue is complete and consistent, and its expressions are fast on any input."""

from __future__ import annotations

import re
import string

import pytest

from bench.doctor import diagnose
from bench.doctor.catalogue import HINT, KINDS, SLOW, Signature, load
from bench.doctor.diagnosis import IDLE_CORES
from bench.doctor.scan import Scan

SIGNATURES = load().signatures


def identifier(signature: Signature) -> str:
    return f"{signature.name}-{signature.kind}"


@pytest.mark.parametrize("signature", SIGNATURES, ids=identifier)
def test_a_signature_matches_its_own_example(signature: Signature) -> None:
    scan = Scan("example", load()).read(signature.example)
    assert signature in [hit.signature for hit in scan.hits]


@pytest.mark.parametrize("signature", [s for s in SIGNATURES if s.is_cause], ids=identifier)
def test_the_example_of_a_signature_is_diagnosed_as_its_cause(signature: Signature) -> None:
    # A hint needs a message about other processes or the end of the job.
    log = signature.example + (
        "\nsrun: error: n1: task 0: Exited with exit code 1\n" * (signature.kind == HINT)
    )
    found = [cause.cause for cause in diagnose({"-": log}, facts=frozenset({IDLE_CORES})).causes]
    assert signature.name in found


def test_every_cause_has_a_signature_of_a_known_kind() -> None:
    shown = [signature for signature in SIGNATURES if signature.is_cause]
    assert {signature.name for signature in shown} == {*load().causes}
    assert {signature.kind for signature in SIGNATURES} == set(KINDS)
    assert {signature.kind for signature in SIGNATURES if signature.severity == SLOW} == {KINDS[0]}


def test_every_cause_has_an_explanation_and_a_remedy() -> None:
    for name, info in load().causes.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert info.explanation.endswith(".")
        assert info.remedy.endswith((".", ")"))


def test_texts_of_a_signature_name_only_groups_of_its_pattern() -> None:
    for signature in SIGNATURES:
        for text in (signature.explanation, signature.remedy):
            fields = {name for _, name, _, _ in string.Formatter().parse(text) if name}
            assert fields <= set(signature.pattern.compiled.groupindex), (signature.name, fields)


def test_conditions_name_existing_facts_and_causes() -> None:
    names = {signature.name for signature in SIGNATURES} | {IDLE_CORES}
    for signature in SIGNATURES:
        assert set(signature.needs) | set(signature.unless) <= names, signature.name


def test_words_are_lower_case_letters_only() -> None:
    for signature in SIGNATURES:
        assert signature.words, signature.name
        for words in signature.words:
            assert all(re.fullmatch(rb"[a-z]+", word) for word in words), (signature.name, words)
            assert any(len(word) >= 3 for word in words), (signature.name, words)


def test_no_pattern_has_an_unbounded_repetition_of_a_broad_class() -> None:
    classes = re.compile(r"\[(?!\^)(?:\\.|[^\]])*\]")
    unbounded = re.compile(r"(?<!\\)\.[*+]|\\[SDW][*+]|\[\^[^\]]*\][*+]")
    for signature in SIGNATURES:
        for pattern in (signature.pattern, signature.near):
            bare = classes.sub("", pattern.text) if pattern else ""
            assert not unbounded.search(bare), (signature.name, bare)
