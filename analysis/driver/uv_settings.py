"""pip's indexes, mirrors and certificates as variables of uv: lines for a shell, from `pip config list` on stdin.

    python -m pip config list | python analysis/driver/uv_settings.py

reproduce.sh runs this file before anything is installed, so it imports the standard library only.
"""

import ast
import os
import shlex
import sys
from collections.abc import Iterable, Mapping

# pip's option -> uv's variable, and the separator of its values.
_VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
}
_SECTIONS = ("global.", "install.", ":env:.")  # a later one overrules an earlier one
_FALSE = ("", "0", "f", "false", "n", "no", "off")


def uv_settings(config: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make uv look for packages where pip does; those set in the environment are not changed.

    The lines of `pip config list` are such as `global.index-url='https://example.org/simple'`.
    """
    pairs = [line.partition("=")[::2] for line in config]
    options = {
        name.removeprefix(section): ast.literal_eval(value).split()
        for section in _SECTIONS
        for name, value in pairs
        if name.startswith(section)
    }
    # pip uses all indexes alike; uv would take all versions from the first index that has the package.
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for option, (variable, between) in _VARIABLES.items():
        if options.get(option):
            settings[variable] = between.join(options[option])
    if " ".join(options.get("no-index", [])).lower() not in _FALSE:
        settings["NO_INDEX"] = "--no-index"  # uv has no variable for it: reproduce.sh passes it as an option
    return {name: value for name, value in settings.items() if name not in environment}


if __name__ == "__main__":
    for name, value in uv_settings(sys.stdin, os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
