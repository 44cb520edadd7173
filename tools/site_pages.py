"""Add pages to the documentation site: commands, public names, and the files outside docs/ that pages link to.

mkdocs calls the functions named ``on_…``. griffe, which reads the docstrings, calls ``Docstrings``.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import shardio
import shardio.testing
from shardio.cli.main import NO_BREAK, PANELS, _list_parameters, load_command

ROOT = Path(__file__).parents[1]

GROUPS = {
    "load": ("Load", ["datasets", "loader", "device", "world", "shared"]),
    "pack": ("Pack and read", ["packing", "reading", "shards", "decoding"]),
    "check": ("Check and measure", ["diagnosis", "check"]),
    "transforms": ("Transforms", ["transforms"]),
    "train": ("Train", ["train"]),
    "testing": ("Conformance tests", ["testing"]),
    "errors": ("Errors", ["errors"]),
}
"""The title of each reference page, and the folders and modules whose public names it shows."""

SHOWN = {"", ".c", ".h", ".md", ".py", ".sh", ".toml", ".txt", ".yaml"}
"""The suffixes of files outside docs/ that get a page. Links to other files become plain text."""

LINK = re.compile(
    r"^(`{3,}).*?^\1 *$|`[^`\n]+`"  # Links in code stay unchanged.
    r"|(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README as the first page, the reference, and a page for each file outside docs/ that a page links to."""
    first = (ROOT / "README.md").read_text("utf-8")
    for name, text in {"index": first, "cli": describe_commands(), "api": list_names(), **describe_names()}.items():
        files.append(File.generated(config, f"{name}.md", content=text))
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for target in set(find_targets(page.content_string, page.src_uri)) - files.src_uris.keys():
            path = repository_path(target)
            if target.startswith("files/") and (ROOT / path).exists():
                file = File.generated(config, target, content=show_file(path), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(file)
                pages.append(file)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links between files of the repository to links between pages."""
    uri = page.file.src_uri

    def change(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        target = find_page(match["target"], uri)
        if target is None:
            return match["text"]
        anchor = "" if target.endswith(".md.md") else match["anchor"] or ""
        return f"{match['mark']}[{match['text']}]({relpath(target, dirname(uri) or '.')}{anchor})"

    return LINK.sub(change, markdown)


def on_env(env: object, config: MkDocsConfig, files: Files) -> None:
    """Add llms.txt, a list of the pages, for use by language models (https://llmstxt.org)."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for group in config.nav or []:
        for title, names in group.items():
            lines += ["", f"## {title}", ""]
            parts = [entry["Decisions"] if isinstance(entry, dict) else [entry] for entry in names]
            for file in map(files.get_file_from_path, itertools.chain(*parts)):
                assert file is not None
                assert file.page is not None
                lines.append(f"- [{file.page.title}]({file.url})")
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))


def repository_path(uri: str) -> str:
    """Return the path of a page's file in the repository."""
    if uri == "index.md":
        return "README.md"
    path = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    return path.removesuffix(".md") if (ROOT / path.removesuffix(".md")).is_file() else path


def find_page(link: str, uri: str) -> str | None:
    """Return the page that a link on a page leads to, or None if the target is not shown."""
    path = normpath(join(dirname(repository_path(uri)), link))
    if (ROOT / path).is_dir():
        path += "/README.md"
        if not (ROOT / path).exists():
            return None
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = Path(path).suffix
    return f"files/{path}{'' if suffix == '.md' else '.md'}" if suffix in SHOWN else None


def find_targets(text: str, uri: str) -> Iterator[str]:
    """Yield the pages that a page links to."""
    for match in LINK.finditer(text):
        if match["target"] and (target := find_page(match["target"], uri)):
            yield target


def show_file(path: str) -> str:
    """Return a page that shows a file."""
    text = (ROOT / path).read_text("utf-8")
    if not path.endswith(".md"):
        text = f"# {path}\n\n````{Path(path).suffix.removeprefix('.')}\n{text}````\n"
    return f"---\nsearch: {{exclude: true}}\n---\n{text}"


def describe_commands() -> str:
    """Return the page of commands, grouped by the panels of ``shardio --help``."""
    lines = ["# Commands", "", "`shardio COMMAND --help` shows the same text in a terminal."]
    for panel, commands in PANELS.items():
        lines += ["", f"## {panel}"]
        for name in commands:
            command = load_command(name)
            context = typer.Context(command, info_name=f"shardio {name}")
            text = escape(inspect.cleandoc(command.help or ""))
            text = re.sub(r"^Example: (.*)", r"```sh\n\1\n```", text, flags=re.MULTILINE)
            usage = " ".join([f"shardio {name}", *command.collect_usage_pieces(context)])
            lines += ["", f"### shardio {name}", "", "```text", usage, "```", "", text]
            sections = defaultdict[str, list[str]](list)
            for heading, (parameter, description) in _list_parameters(command, context):
                if parameter != "--help":
                    sections[heading] += ["", f"`{parameter}`", f":   {escape(description)}"]
            for heading, section in sections.items():
                lines += ["", f"**{heading}**", *section]
    return "\n".join(lines).replace(NO_BREAK, "-")


def escape(text: str) -> str:
    """Return text escaped so that Markdown shows it unchanged."""
    return re.sub(r"([\\`*_{}\[\]#])", r"\\\1", text).replace("<", "&lt;")


def public_names() -> dict[str, list[str]]:
    """Return the public names on each reference page."""
    page_of = {folder: page for page, (_, folders) in GROUPS.items() for folder in folders}
    names: dict[str, list[str]] = {page: [] for page in GROUPS}
    values = {name: getattr(shardio, name) for name in shardio.__all__}
    folder_of = {name: value.__module__.split(".")[1] for name, value in values.items() if not inspect.ismodule(value)}
    for name in sorted(folder_of, key=lambda name: list(page_of).index(folder_of[name])):
        names[page_of[folder_of[name]]].append(f"shardio.{name}")
    for folder in ("check", "transforms", "train"):
        names[folder] += [f"shardio.{folder}.{name}" for name in sorted(import_module(f"shardio.{folder}").__all__)]
    for module in pkgutil.iter_modules(shardio.testing.__path__, "shardio.testing."):
        classes = (name for name in vars(import_module(module.name)) if name.endswith("Tests"))
        names["testing"] += [f"{module.name}.{name}" for name in classes]
    return names


def describe_names() -> dict[str, str]:
    """Return the pages of the public names."""
    pages = {}
    for page, names in public_names().items():
        parts = [f"# {GROUPS[page][0]}", *(f"::: {name}" for name in names)]
        pages[f"api/{page}"] = "\n\n".join([*parts, ""])
    return pages


def list_names() -> str:
    """Return the page that lists all public names."""
    lines = ["# Python", "", "Every public name, with the first sentence of its documentation."]
    for page, names in public_names().items():
        lines += ["", f"## {GROUPS[page][0]}", ""]
        for name in names:
            first = (inspect.getdoc(pkgutil.resolve_name(name)) or "").partition("\n\n")[0].replace("\n", " ")
            lines.append(f"- [`{name.removeprefix('shardio.')}`][{name}]: {to_markdown(first)}")
    return "\n".join(lines)


DOCUMENTED = {name for names in public_names().values() for name in names}


def to_markdown(text: str) -> str:
    """Return a docstring's text with links instead of roles, and with its examples as code."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("shardio.").removeprefix("packing.")
        path = f"shardio.{name}"
        return f"[`{name}`][{path}]" if path in DOCUMENTED else f"`{match[1].rpartition('.')[2]}`"

    def fence(match: re.Match[str]) -> str:
        return f"```pycon\n{re.sub(' +# doctest: .*', '', match[0])}```\n"

    text = re.sub(r":[a-z]+:`~?([\w.]+)`", link, text)
    text = re.sub(r"(?<![/\w])docs/([\w-]+)\.md", r"[docs/\1.md](../\1.md)", text)
    return re.sub(r"^>>> .*\n(?:\S.*\n)*", fence, f"{text}\n", flags=re.MULTILINE).removesuffix("\n")


class Docstrings(griffe.Extension):
    """An extension that converts docstrings to Markdown and shows the arguments that ``takes`` adds to constructors."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Replace the arguments of constructors whose signature is set at run time."""
        for kind in filter(inspect.isclass, map(pkgutil.resolve_name, DOCUMENTED)):
            if pkg.name == "shardio" and hasattr(kind.__init__, "__signature__"):
                init = pkg[f"{kind.__module__}.{kind.__name__}.__init__".removeprefix("shardio.")]
                signature = inspect.signature(kind.__init__)
                init.parameters = griffe.Parameters(*map(convert_parameter, signature.parameters.values()))
                init.docstring = griffe.Docstring(
                    to_markdown(inspect.cleandoc(kind.__init__.__doc__ or "")), parent=init
                )


def convert_parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    """Return a parameter as a griffe object."""
    empty = inspect.Parameter.empty
    return griffe.Parameter(
        parameter.name,
        annotation=None if parameter.annotation is empty else str(parameter.annotation),
        kind=griffe.ParameterKind[parameter.kind.name.lower()],
        default=None if parameter.default is empty else repr(parameter.default),
    )
