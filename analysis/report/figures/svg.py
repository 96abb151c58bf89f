"""From matplotlib's SVG to one that a page can hold: small, safe, themed, with words on its points.

matplotlib writes a DOCTYPE, metadata, style sheets and style attributes (which a strict
Content-Security-Policy refuses), and ids that collide when two figures share a page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from xml.etree import ElementTree

from analysis.report.figures.palette import CSS_NAMES, SURFACE

Element = ElementTree.Element

_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT_SIZE = re.compile(r"([\d.]+)px")
_FONT_WEIGHT = re.compile(r"(?:^|\s)(bold|[5-9]00)\s")
_FONTS = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


def tidy(raw: str, *, name: str, title: str, description: str, tips: Mapping[str, Sequence[str]]) -> Element:
    """Return the figure as a tree without namespaces, styles or outside references.

    Args:
        raw: what matplotlib wrote.
        name: begins every id, so that figures can share a page.
        title: what the figure is.
        description: what it shows, for who cannot see it.
        tips: by the gid of an artist, the words for each of its marks, in order.
    """
    root = ElementTree.fromstring(raw)  # noqa: S314 (our own text of a moment ago)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if _XLINK_HREF in element.attrib:
            element.set("href", element.attrib.pop(_XLINK_HREF))
    _remove(root, {"metadata", "style"})
    for element in root.iter():
        _attributes_for_style(element)
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
    for gid, words in tips.items():
        _add_tips(root, gid, words)
    _rename_ids(root, name)
    root.set("role", "img")
    root.set("aria-label", f"{title}. {description}")
    root.set("stroke-linejoin", "round")
    root.set("stroke-linecap", "butt")
    root.attrib.pop("version", None)
    return root


def standalone(root: Element, *, title: str, description: str) -> str:
    """Return a file's text: light colours on a white ground, with title and description."""
    own = deepcopy(root)
    own.set("xmlns", "http://www.w3.org/2000/svg")
    own.set("font-family", _FONTS)
    ground = ElementTree.Element("rect", {"width": "100%", "height": "100%", "fill": SURFACE})
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag)
        element.text = text
        own.insert(place, element)
    own.insert(2, ground)
    text = ElementTree.tostring(own, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def inline(root: Element) -> str:
    """Return the markup for a page: as wide as its box, its colours the page's variables."""
    own = deepcopy(root)
    for name in ("width", "height"):
        own.attrib.pop(name, None)
    for element in own.iter():
        for name in ("fill", "stroke"):
            colour = element.get(name, "").lower()
            if colour in CSS_NAMES:
                element.set(name, f"var({CSS_NAMES[colour]})")
    return ElementTree.tostring(own, encoding="unicode")


def _remove(root: Element, tags: set[str]) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in tags or (child.tag == "defs" and all(c.tag in tags for c in child)):
                parent.remove(child)


def _attributes_for_style(element: Element) -> None:
    """Turn a style attribute into presentation attributes; fonts stay the page's own."""
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            if size := _FONT_SIZE.search(value):
                element.set("font-size", size.group(1))
            if weight := _FONT_WEIGHT.search(value):
                element.set("font-weight", weight.group(1))
        elif name and name != "font-family":
            element.set(name, value.removesuffix("px") if name == "font-size" else value)


def _add_tips(root: Element, gid: str, words: Sequence[str]) -> None:
    """Give each mark of one artist its words, as a title that a pointer can find."""
    group = next((element for element in root.iter("g") if element.get("id") == gid), None)
    assert group is not None, f"no artist has the gid {gid}"
    marks = list(group.iter("use")) or [e for e in group.iter("path") if e.get("d")][:1]
    assert len(marks) == len(words), f"{gid}: {len(marks)} marks, {len(words)} tips"
    for mark, text in zip(marks, words, strict=True):
        title = ElementTree.Element("title")
        title.text = text
        mark.insert(0, title)
        mark.set("class", "mark")


def _rename_ids(root: Element, name: str) -> None:
    """Begin every id that is referred to with the figure's name; drop the others."""
    used = {match for e in root.iter() for value in e.attrib.values() for match in _REFERENCE.findall(value)}
    used |= {href[1:] for e in root.iter() if (href := e.get("href", "")).startswith("#")}
    names = {old: f"{name}-{place}" for place, old in enumerate(sorted(used), 1)}
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in names:
            element.set("id", names[old])
        for key, value in element.attrib.items():
            if key == "href" and value.startswith("#"):
                element.set(key, f"#{names[value[1:]]}")
            elif "url(#" in value:
                element.set(key, _REFERENCE.sub(lambda match: f"url(#{names[match.group(1)]})", value))
