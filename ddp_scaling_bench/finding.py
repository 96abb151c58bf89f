"""A finding: something that was found out about a run, a cell or a study, as values with a sentence.

Each kind of finding is one dataclass beside the code that finds it: its fields are the values, and
:attr:`Finding.message` and :attr:`Finding.remedy` say them; a text without values is a class attribute.
Nothing reads or compares these sentences. Files and JSON output keep kind and values. This module needs only
the standard library: jobs write findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # typing has it since Python 3.11
    dataclass_transform = lambda **_: lambda cls: cls  # noqa: E731

Severity = Literal["error", "warning", "info"]


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Frozen:
    """The subclasses are frozen dataclasses with keyword-only arguments, without a decorator.

    They share these methods: to compile six for each of 150 classes took a fifth of the start of `bench`.
    """

    kind: ClassVar[str]
    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, *, kind: str = "") -> None:
        if kind:
            cls.kind = kind
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        cls._defaults = {one.name: _default(one) for one in fields(cls)}  # type: ignore[arg-type]

    def __init__(self, **values: Any) -> None:
        given = self._defaults | values
        wrong = given.keys() - self._defaults.keys()
        wrong |= {name for name, value in given.items() if value is MISSING}
        if wrong:
            raise TypeError(f"{type(self).__name__}: missing or unknown: {', '.join(sorted(wrong))}")
        vars(self).update(given)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(name)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(name)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._values() == self._values()

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__qualname__}({', '.join(values)})"


class Finding(_Frozen):
    """The base of all findings; a subclass is a frozen dataclass without a decorator.

        class HotNode(Finding, kind="hot-node"):
            celsius: float

            def _message(self) -> str:
                return f"the node is at {self.celsius:g} degrees"

    Attributes:
        kind: the name of this kind of finding, such as ``shared-cores``.
        heading: its title in lists of findings; empty if it appears only within other texts.
        subject: the affected cells, runs or nodes, or quantities of one run; empty if all are affected.
        severity: ``error`` if the numbers of the subject are not valid, ``warning`` if they may be affected,
            ``info`` if not.
    """

    heading: ClassVar[str] = ""
    subject: tuple[str, ...] = ()
    severity: Severity = "warning"

    def _message(self) -> str:
        raise NotImplementedError

    def _remedy(self) -> str:
        return ""

    @property
    def message(self) -> str:
        """What was found, in words."""
        return self._message()

    @property
    def remedy(self) -> str:
        """What to change because of it; empty if there is no advice."""
        return self._remedy()

    @property
    def values(self) -> dict[str, Any]:
        """The values by name as JSON contains them, without those that have their defaults."""
        return {name: value for name, value in _set_fields(self).items() if name not in _SHARED}

    def as_json(self) -> dict[str, Any]:
        """Return the finding as it is stored."""
        rest = {"values": self.values, "severity": self.severity}
        return {"kind": self.kind, "subject": list(self.subject), **rest}

    @property
    def identity(self) -> str:
        """What findings of several runs that are shown once have in common: by default, the message."""
        return self.message

    def told(self) -> dict[str, Any]:
        """Return the finding as it is printed with ``--json``: as it is stored, and in words."""
        return {**self.as_json(), "message": self.message}

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


_SHARED = ("subject", "severity")


def _set_fields(entry: Any) -> dict[str, Any]:
    own = ((one, getattr(entry, one.name)) for one in fields(entry))
    return {one.name: _plain(value) for one, value in own if value != _default(one)}


def _plain(value: Any) -> Any:
    """Return a value of a finding, or a part of it, for JSON."""
    if isinstance(value, Finding):
        return value.as_json()
    if is_dataclass(value):
        return _set_fields(value)
    if isinstance(value, Mapping):
        return {name: _plain(own) for name, own in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


#: The findings that files contain, by kind.
RECORDED: dict[str, type[Recorded]] = {}


class Recorded(Finding):
    """A finding that a job writes to env.json, or bench to the ledger, and that is read back."""

    #: Whether `bench verify` shows it: it says that a run differs from its plan, or that values are missing.
    verified: ClassVar[bool] = False
    #: Read strictly: other names or types of values are those of another version or of a damaged file.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    def __init_subclass__(cls, *, kind: str = "") -> None:
        super().__init_subclass__(kind=kind)
        if kind:
            same = RECORDED.setdefault(kind, cls)
            assert same.__qualname__ == cls.__qualname__, f"two classes of kind {kind}"
            RECORDED[kind] = cls


def messages(findings: Iterable[Finding]) -> str:
    """Return some findings in words, joined by semicolons."""
    return "; ".join(one.message for one in findings)


def with_remedies(findings: Iterable[Finding]) -> str:
    """Return some findings in words, each with its remedy, joined by semicolons."""
    return "; ".join(text for one in findings for text in (one.message, one.remedy) if text)
