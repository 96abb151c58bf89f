"""Messages about wrong values and keys of a file, and what to write instead, from findings of pydantic."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ddp_scaling_bench.units import short_name

from .document import Document, Place
from .field_types import did_you_mean, option_of_sbatch, synonym_of
from .schema import CORES, LIMITS, UNKNOWN_KEY, Matrix, Site, TargetsFile
from .workload import NamedCommand

#: Message and remedy for each kind of finding of pydantic; `value` is the wrong value.
_WHOLE_NUMBER = ("must be a whole number, not {value}", "write a number such as 4")
_NUMBER = ("must be a number, not {value}", "write a number such as 0.5")
_MAPPING = (
    "must be a mapping (key: value), not {value}",
    "write its keys below it in indented lines",
)
_MESSAGES = {
    "list_type": ("must be a list, not {value}", "write [{value}]"),
    "literal_error": ("cannot be {value}", ""),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), _WHOLE_NUMBER),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    "finite_number": ("must be a finite number, not {value}", ""),
    "bool_type": ("must be true or false, not {value}", "write one of them without quotes"),
    "string_type": ("must be text, not {value}", 'put it in quotes: "{value}"'),
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "too_short": ("is an empty list", "give it at least one value, or remove the key"),
    "string_too_short": ("is empty", "give it a value, or remove it"),
    "greater_than_equal": ("must be at least {ge}, not {value}", "write a number that is at least {ge}"),
    "greater_than": (
        "must be greater than {gt:g}, not {value}",
        "write a number that is greater than {gt:g}",
    ),
    "less_than_equal": ("must be at most {le}, not {value}", "write a number that is at most {le}"),
    "less_than": ("must be less than {lt}, not {value}", "write a number that is less than {lt}"),
}
#: Keys of Slurm and of other trainers, with what to write instead.
_GPUS, _BATCHES = "gpus_per_node: [4] below `axes:`", "- {mode: weak, per_gpu_batch: [8]} below `scaling:`"
#: An entry of `scaling` for the keys of mode weak.
_BATCH_OF = {key: f"{{mode: weak, {key}: [8]}}" for key in ("per_gpu_batch", "per_replica_batch")}
_FOREIGN_KEYS = {
    **dict.fromkeys(("gres", "gpus", "num_gpus", "gpus_per_task", "ntasks", "world_size"), _GPUS),
    **dict.fromkeys(("batch", "batch_size", "train_batch_size", "micro_batch_size"), _BATCHES),
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "per_device_train_batch_size"), _BATCHES),
}
#: An entry of each list of mappings.
_ENTRIES = {
    "scaling": "{mode: strong, global_batch: [352]}",
    "targets": "{efficiency: 0.75}",
    **dict.fromkeys(("include", "exclude"), "{nodes: 4}"),
}
#: The last part of a place where numbers are written.
_SIZES = re.compile(r"nodes|\w+_per_node|model_parallel|\w*batch")
#: A variable as a shell sets it.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=.*")
#: Remedies for required keys that are missing.
_EXAMPLES = {
    "scaling": "add `scaling: [{mode: strong, global_batch: [352]}]`, or mode weak with per_gpu_batch",
    "mode": "write mode: strong or mode: weak",
    "name": "write {name: NAME, run: COMMAND}, or only the command",
    "run": "write {name: NAME, run: COMMAND}",
    "runtime": "add runtime: apptainer, singularity or pyxis",
}
#: The files that docs/matrix.md describes; docs/analysis.md describes profiles.
_FILES: dict[type[BaseModel], str] = {
    Matrix: "the matrix",
    Site: "a site file",
    TargetsFile: "the file with targets",
}


def add_findings(document: Document, error: ValidationError, root: type[BaseModel]) -> None:
    """Add every finding of a validation error to the document's problems; ``root`` is the file's model."""
    found = [one for one in error.errors() if _is_unknown_key(one)]
    unknown = [_without_index(_place(one), document) for one in found]
    top: list[Place] = [place for place in unknown if len(place) == 1]
    if root is Matrix and _is_no_matrix(document, top):
        what = f"none of its keys is one of a matrix ({', '.join(map(_dotted, top[:3]))}, ...)"
        document.add_problem(1, what, "start from `bench init`, or from an example in matrices/")
        return
    for finding in error.errors():
        place = _without_index(_place(finding), document)
        if not _is_unknown_key(finding) and any(place[: len(one)] == one for one in unknown):
            continue
        if not _follows_from(finding, place, unknown, document):
            document.add_problem(place, *_message(finding, place, root, document))


def _is_no_matrix(document: Document, unknown: list[Place]) -> bool:
    """Return whether a file with several keys has none of a matrix, and none that is similar."""
    known = [
        *_known_keys((), Matrix),
        *(key for section in _SECTIONS for key in _known_keys((section,), Matrix)),
    ]
    keys = [str(place[-1]).lower() for place in unknown]
    return len(document.content) == len(unknown) > 1 and not any(
        synonym_of(key) in known or get_close_matches(key, known, cutoff=0.74) for key in keys
    )


def _follows_from(finding: Any, place: Place, unknown: list[Place], document: Document) -> bool:
    """Return whether an unknown key explains another finding: a missing key, or an empty section."""
    *section, key = place
    beside = [one for one in unknown if list(one[:-1]) == section]
    names = [str(one[-1]) for one in beside]
    if finding["type"] != "missing":
        return finding["input"] is None and not {*names}.isdisjoint(_known_keys(place, Matrix))
    values = [document.value(one) for one in beside]
    is_within = any(isinstance(value, dict) and key in value for value in values)
    return bool(
        get_close_matches(str(key), names)
        or is_within
        or any(one[-1] == key for one in unknown)
        or (section and beside)
    )


def _place(finding: Any) -> Place:
    return tuple(part for part in finding["loc"] if part != "[key]")


def _without_index(place: Place, document: Document) -> Place:
    """Return the place of a target as the file has it: targets can be one mapping, which becomes a list."""
    targets = document.content.get("targets") if isinstance(document.content, dict) else None
    if place[:1] != ("targets",) or len(place) < 2 or not isinstance(targets, dict):
        return place
    limits = [key for key in targets if key in LIMITS]
    return ("targets", *(place[2:] or limits[int(place[1]) :][:1]))


def _is_unknown_key(finding: Any) -> bool:
    """Return whether pydantic or the schema's own check of axes reported an unknown key."""
    own = str(finding.get("ctx", {}).get("error")) == UNKNOWN_KEY
    return finding["type"] in ("extra_forbidden", "invalid_key") or own


def _message(finding: Any, place: Place, root: type[BaseModel], document: Document) -> tuple[str, str]:
    """Return the message and the remedy for a finding of pydantic."""
    kind, value, name, context = finding["type"], finding["input"], _dotted(place), finding.get("ctx", {})
    if _is_unknown_key(finding):
        return _unknown_key(place, root, document)
    if kind == "missing":
        example = _EXAMPLES.get(str(place[-1]), f"add {place[-1]}: VALUE")
        return f"key '{place[-1]}' is missing in {_dotted(place[:-1]) or _file(root)}", example
    if place == ("axes", "tasks_per_node") and isinstance(value, str):
        remedy = f"write a list such as [1, 2, 4], or `tasks_per_node: {CORES}` (executor local)"
        return f"{name} cannot be {_shown(value)}", remedy
    if kind == "value_error":
        if value is None:
            return f"{name} has no value", "add one, or remove the key"
        message = f"{name}: {context['error']}"
        return _shortened(message, value), ""
    if kind not in _MESSAGES:
        return f"{name}: {finding['msg']}, not {_shown(value)}", "see docs/matrix.md"
    what, remedy = (text.format_map({**context, "value": _shown(value)}) for text in _MESSAGES[kind])
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"])
        remedy = did_you_mean(str(value), allowed, cutoff=0.6, all_in=_document_of(root))
        if place[0] == "scaling" and "did you mean" not in remedy:
            remedy += "; write one entry for each mode"
    if _MESSAGES[kind] == _MAPPING and 0 < len(keys := _known_keys(place, root)) < 4:
        remedy = f"write its keys ({', '.join(keys)}) below it in indented lines"
    return f"{name} {what}", _remedy(kind, value, place) or remedy


def _remedy(kind: str, value: Any, place: Place) -> str:
    """Return the remedy for a value of a wrong kind; empty for that of :data:`_MESSAGES`."""
    section, key = str(place[0]), str(place[-1])
    entry = _ENTRIES.get(section, "")
    is_number, is_mapping = "number" in _MESSAGES[kind][0], _MESSAGES[kind] == _MAPPING
    if entry and len(place) == 1 and (kind == "list_type" or value == []):
        return f"write entries in [ ], such as {section}: [{entry}]"
    if entry and len(place) == 2 and is_mapping:
        return f"write an entry such as {entry}"
    if isinstance(value, list):
        if entry and len(place) > 2:
            return "write one entry for each value"
        if place[:2] == ("cluster", "env") and len(place) > 2:
            return f'write "{",".join(map(str, value))}", or to compare values, `env.{key}` below `axes:`'
        if section == "workload" and len(place) == 2 and key in _known_keys(("axes",), Matrix):
            return "to compare values, write the list below `axes:`"
    if is_mapping or kind == "string_type":
        return _remedy_of_text(value, key, is_mapping=is_mapping)
    if kind == "list_type":
        return _remedy_of_list(value, key, is_axis=section == "axes")
    if not isinstance(value, str):
        return f"write {value:.0f}" if isinstance(value, float) and is_number and value.is_integer() else ""
    text = value.strip().replace("_", "")
    if not is_number:
        return ""
    if text.isdigit():
        return "remove the quotes" if text == value and text[0] != "0" else f"write {int(text)}"
    is_whole = _MESSAGES[kind] == _WHOLE_NUMBER
    if not is_whole and (share := re.fullmatch(r"[<>= ]*(\d+(?:\.\d+)?)\s*(%?)", text)):
        return f"write {float(share[1]) / (100 if share[2] else 1):g}"
    if numbers := _numbers(value):
        return f"write each number as an entry of the list: {', '.join(numbers)}"
    if not re.fullmatch(r"[\d.]+\s?[A-Za-z]+", text):
        return ""
    return (
        "write it with all its digits" if is_whole else "write only the number; docs/matrix.md names its unit"
    )


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text such as ``1, 2 4``; an empty list for another text."""
    numbers = re.split(r"[,;\s]+", text.strip())
    return numbers if all(re.fullmatch(r"[1-9][0-9]*", number) for number in numbers) else []


def _remedy_of_text(value: Any, key: str, *, is_mapping: bool) -> str:
    """Return the remedy for a value that must be a text, or a mapping."""
    if written := _ASSIGNMENT.fullmatch(str(_first(value))) if key == "env" else None:
        return f"write each as {written[1]}: VALUE"
    if is_mapping:
        if key in ("output", "columns", "units"):
            is_plain = isinstance(value, str) and ":" not in value
            return f"write {key}: {{throughput: {value if is_plain else 'VALUE'}}}"
        if isinstance(value, list):
            return "write its keys in indented lines without dashes"
        if isinstance(value, str) and (written := re.fullmatch(r"\s*([\w.]+)\s*=\s*(.+)", value)):
            return f"write {written[1]}: {written[2]} in an indented line below it"
        return ""
    if isinstance(value, list):
        is_joined = key in ("partition", "nodelist", "exclude", "constraint", "reservation")
        return f'write "{",".join(map(str, value))}"' if is_joined and _are_texts(value) else "write one text"
    if isinstance(value, dict) and len(value) == 1 and _are_texts([*value.values()]):
        return f"put the whole line into quotes: '{_dotted(value)}: {_first([*value.values()])}'"
    return (
        'write a text, such as ""' if value is None else "write one text" if isinstance(value, dict) else ""
    )


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _remedy_of_list(value: Any, key: str, *, is_axis: bool) -> str:
    """Return the remedy for a value that must be a list."""
    if is_axis and key == "command" and isinstance(value, dict):
        return "write a list of {name: NAME, run: COMMAND}"
    if isinstance(value, str):
        if "\n" in value.strip():
            return "write each line as an entry that begins with a dash"
        if _SIZES.fullmatch(key):
            return f"write numbers in [ ], such as [{', '.join(_numbers(value) or ['1', '2', '4'])}]"
        if re.fullmatch(r"[\w.@-]+(,\s*[\w.@-]+)+", value):
            return f"write [{', '.join(value.replace(',', ' ').split())}]"
        if key == "hosts":
            return "write the names of hosts in [ ], such as [gpu1, gpu2]"
        return "write it in [ ]" if len(value) > 60 else ""
    if isinstance(value, dict) and _SIZES.fullmatch(key):
        return "write numbers in [ ], such as [1, 2, 4]"
    if isinstance(value, dict) and key == "env_from":
        return f"write only the names: [{', '.join(map(str, value))}]"
    if isinstance(value, dict) and value and key in _ENTRY_OF_PAIR:
        return f"write [{_ENTRY_OF_PAIR[key].format(*next(iter(value.items())))}]"
    if value is None:
        return "write values in [ ], or remove the key"
    return "write only values in [ ], without keys" if isinstance(value, dict) else ""


#: Entries of lists for the first key and value of a mapping.
_ENTRY_OF_PAIR = {"directives": '"--{}={}"', "mounts": '"{}:{}"', "hosts": "{{host: {}, processes: {}}}"}


def _shortened(text: str, value: Any) -> str:
    """Return a message with a shortened value, if it contains a long one."""
    if not isinstance(value, str) or len(value) <= 60 or len(text) <= 200:
        return text
    return text.replace(repr(value), _shown(value)).replace(value, f"{value[:57]}...")


def finding_in_words(finding: Any, root: type[BaseModel]) -> str:
    """Return a finding of pydantic about values that are in no file, and its remedy, in words."""
    return "; ".join(filter(None, _message(finding, _place(finding), root, Document("", "", {}))))


def _first(value: Any) -> Any:
    """Return the first entry of a list, or another value itself."""
    return value[0] if isinstance(value, list) and value else value


_SECTIONS = ("workload", "cluster", "axes", "scaling")


def _unknown_key(place: Place, root: type[BaseModel], document: Document) -> tuple[str, str]:
    *section, key = place
    value = document.value(place)
    what = f"unknown key '{short_name(key)}' in {_dotted(section) or _file(root)}"
    return what, _remedy_of_key(
        section, str(key).replace("-", "_").lstrip("_"), str(key), value, root, document
    )


def _remedy_of_key(
    section: list[str | int], key: str, written: str, value: Any, root: type[BaseModel], document: Document
) -> str:
    """Return the remedy for a key that a section does not have; ``key`` is ``written`` with underscores."""
    known = _known_keys(tuple(section), root)
    others = [name for name in _SECTIONS if key in _known_keys((name,), root)]
    is_section = section in ([], ["workload"], ["cluster"], ["axes"]) or section[:1] == ["scaling"]
    name, _, rest = key.partition(".")
    if key in known:
        return f"write {key}"
    if (key == "args" or (key == "env" and section != [])) and is_section:
        return f"to compare values, write `{key}.NAME: [VALUE, ...]` below `axes:`"
    if rest and name in ("args", "env") and is_section:
        return f"write `{written}: [{value if value and name == 'args' else 'VALUE'}]` below `axes:`"
    has_command = document.value(("workload", "command")) and not get_close_matches(key, known, cutoff=0.74)
    if section == ["axes"] and (written.startswith("-") or (has_command and not others)):
        return f"for an argument of the command, write `args.{written.lstrip('-')}: [VALUE, ...]`"
    if is_section and key.isupper() and "_" in key:
        one = f"`env: {{{key}: VALUE}}` below `cluster:`"
        return f"for a variable, write {one}, or to compare values `env.{key}: [VALUE, ...]` below `axes:`"
    if isinstance(value, list) and section and key in _known_keys((), Matrix) and root in _FILES:
        return "write it at the top level of the matrix"
    if others and is_section:
        if section == [] and document.value((others[0],)) is None and (others[0],) in document.lines:
            return f"indent it, because it belongs to `{others[0]}:`"
        if others == ["axes"] and isinstance(value, str | int) and not isinstance(value, bool):
            return f"write it once, as a list below `axes:`, such as `{key}: [{value}]`"
        if others == ["scaling"]:
            return f"write it below `scaling:`, such as - {_BATCH_OF.get(key, _ENTRIES['scaling'])}"
        return f"write it below `{others[0]}:`"
    if key in _FOREIGN_KEYS and is_section:
        is_set = _FOREIGN_KEYS[key] == _GPUS and document.value(("axes", "gpus_per_node"))
        return "remove it: axes.gpus_per_node sets it" if is_set else f"write {_FOREIGN_KEYS[key]}"
    if key in _known_keys((), Matrix) and root in _FILES:
        return "write it at the top level of the matrix"
    if key in _known_keys((), Site) and root is Matrix:
        return "write it into the site file, which alone can have it"
    return _remedy_within(section, key, written, value, root, document)


def _remedy_within(
    section: list[str | int], key: str, written: str, value: Any, root: type[BaseModel], document: Document
) -> str:
    """Return the remedy for a key that no section has: what its own section may contain instead."""
    known = _known_keys(tuple(section), root)
    is_nested = isinstance(value, dict) and not {*value}.isdisjoint(known)
    if option := _option_with(written, tuple(section), root):
        return f"write {option}: {written}" + ", and the keys below it beside it" * is_nested
    if is_nested:
        return f"remove this line, and write its keys into {_dotted(section) or _file(root)} itself"
    entry = document.value(tuple(section))
    if "command" in section and isinstance(entry, dict) and "name" not in entry and isinstance(value, str):
        return f"write {{name: {written}, run: COMMAND}}"
    remedy = did_you_mean(key, known, cutoff=0.74, all_in=_document_of(root))
    if section != ["cluster"] or "did you mean" in remedy:
        return remedy
    how = option_of_sbatch(key.replace("_", "-"))
    if how.startswith("write "):
        return f"for an option of sbatch, {how}; docs/matrix.md lists all keys"
    return how if how.startswith("use ") else f"remove it: {how}"


def place_of(setting: str) -> str:
    """Return what to write into a matrix for a setting of Slurm or of a trainer; empty if it is unknown."""
    key = synonym_of(setting)
    for section in ("cluster", "workload", "axes"):
        if key in _known_keys((section,), Matrix):
            return f"`{key}` below `{section}:`"
    top = f"`{key}` at the top level"
    return top if key in _known_keys((), Matrix) else _FOREIGN_KEYS.get(setting, "")


def _document_of(root: type[BaseModel]) -> str:
    return "docs/matrix.md" if root in _FILES else "docs/analysis.md"


def _file(root: type[BaseModel]) -> str:
    return _FILES.get(root, "the file")


def _model_at(section: Place, root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model of a section of a file with the model ``root``."""
    model: type[BaseModel] | None = root
    for part in section:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = NamedCommand if part == "command" else field and next(_models(field.annotation), None)
    return model


def _known_keys(section: Place, root: type[BaseModel]) -> list[str]:
    """Return the keys that a section of a file with the model ``root`` can contain."""
    if (model := _model_at(section, root)) is None:
        return []
    named = ["env.NAME", "args.NAME"] if model.model_config["extra"] == "allow" else []
    return [*model.model_fields, *named]


def _option_with(word: str, section: Place, root: type[BaseModel]) -> str:
    """Return the first key of a section that can have a word as its value, such as ``precision`` for bf16."""
    model = _model_at(section, root)
    fields = model.model_fields.items() if model else ()
    return next((name for name, field in fields if word in _words(field.annotation)), "")


def _words(kind: Any) -> list[Any]:
    """Return the words that a value of a type such as ``Literal["a", "b"] | None`` can be."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return (
        [] if get_origin(kind) in (dict, list) else [word for part in get_args(kind) for word in _words(part)]
    )


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type such as ``list[Host] | None``."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _models(part)


def without_unknown_keys(content: dict[str, Any], error: ValidationError) -> Any:
    """Return the matrix without its unknown keys, to find the problems of the others, too."""
    rest: Any = copy.deepcopy(content)
    for *section, key in map(_place, filter(_is_unknown_key, error.errors())):
        if section[:1] == ["targets"] and isinstance(rest["targets"], dict):
            section = ["targets"]  # a mapping, which is checked as a list
        functools.reduce(operator.getitem, section, rest).pop(key, None)
    return rest


def _dotted(place: Iterable[str | int]) -> str:
    """Return ``axes.nodes[2]`` for ("axes", "nodes", 2)."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
        return f"the list [{_shown(value[0])}]" if isinstance(value, list) and len(value) == 1 else kind
    text = "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
