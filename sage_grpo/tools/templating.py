"""Pages and texts from the files in templates/. HTML escapes every value; only our own drawings are `Markup`."""

import re
from base64 import b64encode
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from sage_grpo.runs.history import as_float, column
from sage_grpo.tools.paired import aligned, number

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("sage_grpo.tools"),
    autoescape=jinja2.select_autoescape(["html"], default_for_string=False),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def inline_svg(svg: str, label: str) -> Markup:
    """A matplotlib SVG, in which text is already escaped, as an element of a page.

    Removes its prologue, metadata, namespaces, and all ids without references.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") + 4 :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", re.sub(r'<g id="[^"]*">', "<g>", svg))
    return Markup('<svg role="img" aria-label="{}"').format(label) + Markup(svg)


ENVIRONMENT.filters |= {"number": number, "known": as_float, "form": format}
ENVIRONMENT.filters |= {"column": column, "total": np.nansum, "most": np.nanmax}  # of a metric
ENVIRONMENT.filters["data_uri"] = lambda path: (
    f"data:video/mp4;base64,{b64encode(path.read_bytes()).decode()}"
)
ENVIRONMENT.filters["columns"] = lambda text: aligned(
    [line.split("|") for line in text.splitlines() if line]
)
ENVIRONMENT.filters["billions"] = lambda value, form=".1f": format(value / 1e9, form)


def render(template: str, **values: Any) -> str:
    return ENVIRONMENT.get_template(template).render(values) + "\n"


def sentence(template: str, **values: Any) -> str:
    """A short template in one line."""
    return " ".join(ENVIRONMENT.from_string(template).render(values).split())
