"""Configuration of Sphinx, for ``python3 -m nox -s docs``. The build needs no network."""

from __future__ import annotations

import doctest
import logging
import os
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "integrations" / "ray"), str(DOCS / "_ext")]

import shared_rpc  # noqa: E402

project = "shared_rpc"
author = "The shared_rpc maintainers"
copyright = author
version = release = shared_rpc.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx_copybutton",
    "sphinx_design",
    # docs/_ext
    "catalogue",
    "names",
]
exclude_patterns = ["_build"]
# A glob pattern of a toctree may match no page. This warning of Sphinx has no type to suppress.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda record: "toctree glob pattern" not in str(record.msg))

# Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings are reStructuredText with fields (":param x:"), and need no conversion.
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Members that are public for other modules of the package, but not for users.
autodoc_default_options = {
    "exclude-members": "client_options,detail,engine,mechanism_info,registry,restore,revision_page,run_in,run_with,serve_with,"
    "notify"
}
# The pages on clusters are built where Ray is not installed.
autodoc_mock_imports = ["ray"]
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False

# An unresolved reference is a warning, which fails the build. Names of other projects are ignored here, because their pages are
# not fetched; names of this project without a page are resolved in _ext/names.py.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|collections|contextlib|fnmatch|inspect|os|types|typing|multiprocessing|rich|msgspec|anyio|prometheus_client)\b.*",
    ),
    ("py:.*", r"(Any|Callable|Iterable|Iterator|Sequence|Mapping|Collection|Literal|Path|PathLike|TracebackType)"),
    ("py:.*", r"Abstract(Async)?ContextManager|(BaseException|Exception|OSError|TypeError)(Group)?"),
    ("py:.*", r"(shared_rpc\..*\.)?(P|T|R|R_co)"),
]

# Doctests import the package; each page starts with a new namespace, and the environment is restored.
doctest_global_setup = "import os, shared_rpc; environment = dict(os.environ)"
doctest_global_cleanup = "os.environ.clear(); os.environ.update(environment)"
doctest_default_flags = doctest.ELLIPSIS | doctest.DONT_ACCEPT_TRUE_FOR_1
trim_doctest_flags = True

# The page on the command line includes typer's description of each command.
_made = DOCS / "_build" / "commands.md"
_made.parent.mkdir(exist_ok=True)
_made.write_text("")
for _module, _name in (("shared_rpc.cli.app", "shared-rpc"), ("shared_rpc_ray.cli", "shared-rpc cluster")):
    _words = [sys.executable, "-m", "typer", _module, "utils", "docs", "--name", _name]
    _environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])}
    _text = subprocess.run(_words, env=_environ, check=True, capture_output=True, text=True).stdout
    with _made.open("a") as _file:
        _file.write(_text[_text.index(f"## `{_name} ") :])

# Looks
html_theme = "furo"
html_title = "shared_rpc"
html_static_path = ["_static"]
html_css_files = ["shared_rpc.css"]
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a5", "color-brand-content": "#5fd3a5"},
}
pygments_style = "friendly"
pygments_dark_style = "native"
