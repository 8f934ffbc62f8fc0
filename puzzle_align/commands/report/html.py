"""HTML elements, in which every text is escaped: files are a stranger's."""

from html import escape

# Control characters, for which a page shows nothing.
_SEEN = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}


class Html(str):
    """Text that is HTML already."""


def element(name: str, *content: str, **attributes: object) -> Html:
    """An element with its content, escaped unless it is ``Html``, and attributes.

    In an attribute's name an underscore at the end is left out, another is a hyphen.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: str) -> Html:
    """The parts one after the other, escaped unless they are ``Html``."""
    return Html("".join(p if isinstance(p, Html) else escape(p.translate(_SEEN)) for p in content))
