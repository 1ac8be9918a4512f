"""Print docs/config.md: every setting with its default, limits and meaning.

.venv/bin/python -m scripts.config_docs > docs/config.md
"""

from __future__ import annotations

import inspect
import json

from relay.base.config import Config
from relay.cli.config import Setting, known_settings

HEAD = """\
# Settings

Made from `relay/base/config.py` by `python -m scripts.config_docs`; a test compares them.

The settings are in `config.json` in the home; what the file leaves out has its default.
`relay init` writes the file with every default.

    relay config show delivery                       # values, with their meaning
    relay config set delivery.ack_timeout_s 2m       # checks the file, changes it
    relay config set --unset delivery.ack_timeout_s  # back to the default
    relay config check                               # after an edit by hand

`relay config set` has a running relay read the file, and says whether the relay uses it. After an
edit by hand, `relay config check` and SIGHUP do the same (`kill -HUP` the pid of `relay status`, or
`systemctl --user reload agent-relay`). Every setting takes effect then, without a restart; a file
that is not valid changes nothing, and `relay status` reports it.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    sections: dict[str, list[Setting]] = {}
    for name, setting in known_settings().items():
        sections.setdefault(name.rpartition(".")[0], []).append(setting)
    for section, settings in sections.items():
        about = (
            inspect.getdoc(type(getattr(Config(), section)))
            if section
            else "Settings outside of a section."
        )
        rows = "\n".join(map(_row, settings))
        parts.append(
            f"## {section or 'General'}\n\n{about}\n\n"
            f"| setting | default | unit | allowed | meaning |\n|---|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    default = setting.default
    if isinstance(default, dict):
        text = "; ".join(f"`{name}`: `{' '.join(words)}`" for name, words in default.items())
    elif isinstance(default, tuple):
        text = ", ".join(f"`{word}`" for word in default) or "empty"
    else:
        text = f"`{json.dumps(default)}`" if default != "" else "empty"
    cells = (f"`{setting.name}`", text, setting.unit, setting.allowed, setting.meaning)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
