"""Pages from templates: `frame.html` is what all have in common, `page.css` how they look."""

from __future__ import annotations

import datetime
from importlib import resources
from typing import Any

__all__ = ["GENERATOR", "render"]

GENERATOR = "ebbflow report"


def render(template: str, **content: Any) -> str:
    """The page as text. All of the content is escaped, unless it is `Markup`: our own figures and styles."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("ebbflow", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    files = resources.files("ebbflow.report")
    return environment.get_template(template).render(
        **content,
        generator=GENERATOR,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(files.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(files.joinpath("page.js").read_text(encoding="utf-8")),
    )
