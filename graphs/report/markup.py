"""HTML and SVG from nested calls: all text is escaped, and only what `element` made is not."""

from html import escape

VOID = {"br", "circle", "col", "input", "line", "meta", "path"}  # may stand without content


class Markup(str):
    """HTML as it is to be written."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """One element. A trailing underscore of an attribute's name is dropped, others become dashes.

    An attribute that is True stands without a value; None and False leave it out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{escape(str(value))}"')
    head = " ".join(parts)
    if name in VOID and not content:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    """Several pieces, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c, quote=False) for c in content))
