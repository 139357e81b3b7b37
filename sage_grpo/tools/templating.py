"""Pages from the templates of report/ and prefer/. HTML escapes every value; only our own drawings are `Markup`."""

import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sage_grpo.files.foreign import read_bytes
from sage_grpo.tools.paired import number

MAX_VIDEO_BYTES = 1 << 30

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.ChoiceLoader(
        [
            jinja2.PackageLoader("sage_grpo.tools.report"),
            jinja2.PackageLoader("sage_grpo.tools.prefer"),
        ]
    ),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    return ENVIRONMENT.get_template(template).render(values) + "\n"


def inline_svg(svg: str, label: str) -> Markup:
    """A matplotlib SVG, in which text is already escaped, as an element of a page.

    Removes its prologue, metadata, namespaces, and all ids without references.
    """
    attributes_and_content = svg[svg.index("<svg") + len("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", attributes_and_content, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    return Markup('<svg role="img" aria-label="{}"').format(label) + Markup(text)


def data_uri(video: Path) -> str:
    """An mp4 file as a link that needs no other file."""
    return f"data:video/mp4;base64,{b64encode(read_bytes(video, MAX_VIDEO_BYTES)).decode()}"


ENVIRONMENT.filters["number"] = number
ENVIRONMENT.filters["data_uri"] = data_uri
