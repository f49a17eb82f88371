"""Hooks of the documentation site (mkdocs.yml), which generate pages from the code each time the site is built.

- `commands.md`: below each heading `## unheard NAME`, the usage, arguments, options and examples of that command.
- `run-file.md`: in place of `<!-- run file tables -->`, every table and key with type, default and meaning.
- `api.md`: in place of `<!-- public names -->`, every name of `import unheard` from its docstring (mkdocstrings).
- `errors.md`: in place of `<!-- error tree -->`, a table of the exceptions with their meanings.
- `decisions/index.md`: a list of all decisions, unless the folder has its own index.
- `changelog.md`: the text of CHANGELOG.md.

On every page, inline code that names a source file, an example or a test becomes a link to a page with the text of that
file, at the line in question, so that a reader can check a claim without leaving the site. Tests call the functions of
this module directly.
"""

import ast
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "unheard"


def import_this_checkout() -> None:
    """Make `unheard` and `reproduction` of this checkout importable. Hooks must call this again when they run.

    MkDocs restores `sys.path` after it has loaded the hooks, so a change at import time would be lost.
    """
    for folder in (str(ROOT), str(ROOT / "src")):
        if folder not in sys.path:
            sys.path.insert(0, folder)


FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
"""A fenced block of code."""
INLINE_CODE = re.compile(r"(?<![\[`])`([^`\n]+)`(?![`\]])")
"""Inline code that is not part of a link."""


# ---------------------------------------------------------------------------------------------------------------- commands


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the whole name and the command, for every command of a Typer application that is not hidden.

    Args:
        group: The application or one of its groups of commands.
        name: The name of the group, such as `unheard`.
    """
    for verb, command in group.commands.items():
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}", command


@cache
def all_commands() -> dict[str, Any]:
    """Return every command of `unheard` and of `python -m reproduction` by its whole name."""
    import typer.main
    from reproduction.cli.main import app as reproduction

    from unheard.cli.main import app

    return dict(commands(typer.main.get_command(app), "unheard")) | dict(
        commands(typer.main.get_command(reproduction), "python -m reproduction")
    )


def command_section(name: str) -> str:
    """Return the generated Markdown of one command: usage, a table of options for each panel of its help, examples."""
    command = all_commands()[name]
    positional = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    usage = " ".join([name, *(p.metavar or p.name for p in positional), *(["[OPTIONS]"] if options else [])])
    parts = [f"```text\n{usage}\n```"]
    panels: dict[str, list[Any]] = {}
    for parameter in (*positional, *options):
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(parameter)
    for panel, parameters in panels.items():
        rows = [_parameter_row(p) for p in parameters]
        heading = [f"**{panel}**"] if panel else []
        parts += [*heading, "\n".join(["| argument or option | meaning | default |", "| --- | --- | --- |", *rows])]
    if examples := _examples(command.epilog or ""):
        parts.append("```bash\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _parameter_row(parameter: Any) -> str:
    """Return the row of one argument or option: its names, its help with the choices, and its default."""
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name}`"
    else:
        names = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    choices = getattr(parameter.type, "choices", None)
    is_listed = choices and all(_value(choice) in (parameter.help or "") for choice in choices)
    listed = f" One of {', '.join(f'`{_value(choice)}`' for choice in choices)}." if choices and not is_listed else ""
    repeated = " May be repeated." if parameter.multiple and "repeated" not in (parameter.help or "") else ""
    if parameter.required:
        default = "required"
    elif isinstance(parameter.show_default, str):  # a default in words
        default = _plain(parameter.show_default)
    elif parameter.default in (None, (), []) or callable(parameter.default):
        default = ""
    elif isinstance(parameter.default, bool):
        default = "yes" if parameter.default else "no"
    else:
        default = f"`{_value(parameter.default)}`"
    return _row(names, _plain(parameter.help or "") + listed + repeated, default)


def _value(value: Any) -> str:
    """Return a default or a choice as text; enumerations as their value, lists separated by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    return str(getattr(value, "value", value))


def _plain(text: str) -> str:
    """Return a help text as Markdown: without the markup of Rich, and with `<` escaped."""
    text = re.sub(r"\[/?(?:bold|dim|italic|red|green|yellow|cyan|b|i)\]", "", text)
    return text.replace("<", "&lt;").replace("\\[", "[")


def _row(*cells: str) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _examples(epilog: str) -> list[str]:
    """Return the example lines of a command's epilog, without its heading."""
    lines = [_plain(line.strip()) for line in epilog.splitlines()]
    return [line for line in lines if line and line.rstrip(":") not in ("Examples", "Example")]


def commands_page(markdown: str) -> str:
    """Return `commands.md` with the generated part of each command at the end of its section.

    Commands without a section are added at the end, with their help text.
    """
    head, *sections = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    parts, written = [head], set()
    for section in sections:
        name = section.splitlines()[0].removeprefix("## ").strip()
        generated = command_section(name) if name in all_commands() else ""
        parts.append(f"{section.rstrip()}\n\n{generated}\n")
        written.add(name)
    for name in all_commands():
        if name not in written:
            parts.append(
                f"## {name}\n\n{_plain(inspect.cleandoc(all_commands()[name].help or ''))}\n\n{command_section(name)}\n"
            )
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------------- run file


def run_file_tables() -> dict[str, dict[str, type]]:
    """Return the class of each kind of each table of a run file.

    A table that has no key `kind` has one class, under the empty name.
    """
    import unheard
    from unheard.mechanism.plan import KINDS
    from unheard.training.round import SERVERS
    from unheard.training.run import MODELS, Corpus, Privacy

    return {
        "corpus": {"": Corpus},
        "privacy": {"": Privacy},
        "model": MODELS,
        **KINDS,
        "schedule": {"": unheard.Change},
        "server": SERVERS,
        "evaluation": {"": unheard.Evaluation},
        "training": {"": unheard.Training},
        "engine": {"": unheard.EngineChoice},
    }


def run_file_page(markdown: str) -> str:
    """Return `run-file.md` with the generated tables in place of the marker."""
    from unheard.training.run import DEFAULTS, REQUIRED

    parts = []
    for table, kinds in run_file_tables().items():
        title = f"[[{table}]]" if table == "schedule" else f"[{table}]"
        default = DEFAULTS.get(table, {}).get("kind")
        status = "Required." if table in REQUIRED else f'Default: `kind = "{default}"`.' if default else "Optional."
        parts.append(f"### `{title}` {{ #{table} }}\n\n{status}")
        for kind, cls in kinds.items():
            if kind:
                parts.append(f'#### `kind = "{kind}"` {{ #{table}-{kind.replace("_", "-")} }}')
            parts.append(first_paragraph(cls))
            fields = [field for field in dataclasses.fields(cls) if field.init]
            rows = [_field_row(cls, field) for field in fields]
            if rows:
                parts.append("\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]))
            elif kind:
                parts.append("No keys.")
    return markdown.replace("<!-- run file tables -->", "\n\n".join(parts))


def _field_row(cls: type, field: "dataclasses.Field[Any]") -> str:
    """Return the row of one key of a run file: name, type, default and meaning."""
    if field.default is not dataclasses.MISSING:
        default = "none" if field.default is None else f"`{_toml(field.default)}`"
    elif field.default_factory is not dataclasses.MISSING:
        default = f"`{_toml(field.default_factory())}`"
    else:
        default = "required"
    return _row(f"`{field.name}`", type_in_words(cls, field.name), default, meanings(cls).get(field.name, ""))


def _toml(value: Any) -> str:
    """Return a default as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return "{}" if value == {} else "[]" if value == () else str(value)


def type_in_words(cls: type, name: str) -> str:
    """Return the type of a key in words for a reader of TOML, such as `whole number`; choices are listed.

    Args:
        cls: The class of the part.
        name: The name of the key.
    """
    hint = typing.get_type_hints(cls)[name]
    allowed = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", tuple: "list", dict: "table"}
    named = []
    for item in allowed:
        origin = typing.get_origin(item) or item
        if origin is typing.Literal:
            named += [f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in typing.get_args(item)]
        elif item is not type(None):
            named.append(words.get(origin, getattr(origin, "__name__", str(origin))))
    return " or ".join(named)


def first_paragraph(cls: type) -> str:
    """Return the first paragraph of the docstring of a class, on one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each field of a part: its attribute docstring, else its line under Args or Attributes.

    If the docstring says "The arguments are those of `TiedLSTM`", the meanings of that class are included.
    """
    by_field: dict[str, str] = {}
    if refers := re.search(r"The arguments are those of `(\w+)`", inspect.getdoc(cls) or ""):
        by_field |= meanings(getattr(inspect.getmodule(cls), refers[1]))
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            by_field |= _from_args(inspect.getdoc(base) or "") | _from_attributes(base)
    return by_field


def _from_attributes(cls: type) -> dict[str, str]:
    """Return the attribute docstrings of a class by the name of the field."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts


def _from_args(docstring: str) -> dict[str, str]:
    """Return the texts under `Args:` and `Attributes:` of a docstring by name."""
    texts: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ \t]+.*\n?|\n)*)", docstring, re.MULTILINE):
        for name, text in re.findall(r"^ {4}(\w+)(?: \([^)]*\))?:((?:.*\n?(?: {5,}.*\n?)*))", section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


# -------------------------------------------------------------------------------------------------------- API and other pages


def public_names() -> dict[str, list[str]]:
    """Return the public names of `unheard` by the package that defines them, in the order of `__init__.pyi`."""
    groups: dict[str, list[str]] = {}
    for node in ast.parse((SRC / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            groups.setdefault(node.module.split(".")[0], []).extend(
                f"unheard.{node.module}.{alias.name}" for alias in node.names
            )
    return groups


TITLES = {
    "corpus": "Corpus",
    "models": "Models",
    "updates": "User updates",
    "mechanism": "Mechanism: sampling, clipping, averaging, noise",
    "engines": "Engines",
    "training": "Training",
    "evaluation": "Evaluation",
    "privacy": "Accounting",
    "errors": "Errors",
}
"""The headings of the API page by package, in the order of the page."""


def api_page(markdown: str) -> str:
    """Return `api.md` with every public name in place of the marker, by package in the order of `TITLES`."""
    parts = []
    order = list(TITLES)
    for package, names in sorted(public_names().items(), key=lambda item: order.index(item[0])):
        parts.append(f"## {TITLES[package]} {{ #api-{package} }}")
        parts += [f"::: {name}\n    options:\n      heading_level: 3" for name in names]
    return markdown.replace("<!-- public names -->", "\n\n".join(parts))


def errors_page(markdown: str) -> str:
    """Return `errors.md` with a table of the exceptions in place of the marker, each below its base class."""
    from unheard import errors

    def rows(cls: type, depth: int) -> list[str]:
        """Return the row of an exception and the rows of its subclasses, indented by depth."""
        children = [row for child in cls.__subclasses__() for row in rows(child, depth + 1)]
        return [_row(f"{'&emsp;' * 2 * depth}`{cls.__name__}`", first_paragraph(cls)), *children]

    table = ["| exception | raised when |", "| --- | --- |", *rows(errors.UnheardError, 0)]
    return markdown.replace("<!-- error tree -->", "\n".join(table))


def decisions_index() -> str:
    """Return a page that lists all decisions by number, with the title of each."""
    lines = ["# Decisions", "", "Each page states one decision, the reasons, and what was measured or rejected.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ").strip()
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- links into the source


@cache
def tests_by_name() -> dict[str, tuple[str, int]]:
    """Return the file, relative to the repository, and the line of each test function by its name."""
    places = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := re.match(r"def (test_\w+)\(", line):
                places[match[1]] = (path.relative_to(ROOT).as_posix(), number)
    return places


def repository_file(name: str) -> str | None:
    """Return the path, relative to the repository, of a file that a page names; None if there is no such file.

    Args:
        name: A path relative to the repository (with a folder), or relative to src/unheard.
    """
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|sh|yaml|toml)", name):
        return None
    for base in (ROOT, SRC):
        if (base / name).is_file() and (base != ROOT or "/" in name):
            return (base / name).relative_to(ROOT).as_posix()
    return None


def line_of_comment(path: str, sentence: str) -> int | None:
    """Return the line of the `# DP:` comment that contains a sentence; None if there is none.

    Args:
        path: A file, relative to the repository.
        sentence: The sentence, which may be broken over several lines in the file.
    """
    lines = (ROOT / path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if "# DP:" in line:
            following = " ".join(text.strip().removeprefix("#").strip() for text in lines[number : number + 8])
            if sentence in f"{line.split('# DP:', 1)[1].strip()} {following}":
                return number
    return None


def link_to_source(code: str, up: str, line: int | None = None) -> str | None:
    """Return a Markdown link for inline code that names a file or a test; None if it names neither.

    Args:
        code: The inline code.
        up: The relative path from the page to the docs folder.
        line: The line that the link leads to; None for the top of the file. The line of a test is known.
    """
    if code in tests_by_name():
        path, line = tests_by_name()[code]
    elif (path := repository_file(code)) is None:
        return None
    _linked.add(path)
    return f"[`{code}`]({up}source/{path}.md{f'#line-{line}' if line else ''})"


_linked: set[str] = set()
"""Repository files that a page links to; each becomes a page under source/."""


def with_links(markdown: str, page: str) -> str:
    """Return a page with links to the pages under source/.

    Inline code that names a file or a test becomes a link, and links to files outside docs/ are redirected.

    Args:
        markdown: The text of the page.
        page: The path of the page, relative to docs/.
    """
    up = "../" * page.count("/")

    def rewrite(text: str) -> str:
        """Return a text without fenced code, with all links."""
        text = joined_references(_outside_links(text, page, up))
        linked = "\n".join(_link_line(line, up) for line in text.split("\n"))
        return CLAIMS.sub(_claims, linked)

    pieces, start = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [rewrite(markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*pieces, rewrite(markdown[start:])])


REFERENCE = re.compile(r"^→ .*(?:\n  \S.*)*", re.MULTILINE)
"""A reference of the privacy argument ("→ ..."), with its continuation lines, which begin with two spaces."""
CLAIMS = re.compile(r"(?:^→ .*\n?)+", re.MULTILINE)
"""Consecutive references of the privacy argument, each on one line."""


def joined_references(markdown: str) -> str:
    """Return a text with each reference of the privacy argument on one line."""
    return REFERENCE.sub(lambda match: re.sub(r"\n +", " ", match[0]), markdown)


def _claims(match: "re.Match[str]") -> str:
    """Return consecutive references of the privacy argument as one block, with a paragraph for each."""
    lines = match[0].strip().split("\n")
    return '\n<div class="claims" markdown>\n\n' + "\n\n".join(lines) + "\n\n</div>\n\n"


def _link_line(line: str, up: str) -> str:
    """Return a line of a page with links for its inline code.

    A reference that quotes a `# DP:` comment links to the line of the comment.
    """
    if line.startswith(("    ", "#", ":::")):
        return line
    claim = re.match(r"(?:→|- )\s*`([\w/]+\.py)` “([^”]+)”", line)

    def replace(match: "re.Match[str]") -> str:
        number = None
        if claim and match[1] == claim[1] and (path := repository_file(claim[1])):
            number = line_of_comment(path, claim[2])
        return link_to_source(match[1], up, number) or match[0]

    return INLINE_CODE.sub(replace, line)


def _outside_links(text: str, page: str, up: str) -> str:
    """Return a text whose links to repository files outside docs/ lead to pages of the site instead."""

    def replace(match: "re.Match[str]") -> str:
        target = (ROOT / "docs" / page).parent.joinpath(match[1]).resolve()
        if not target.is_file() or target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        if path in ("CHANGELOG.md",):
            return f"]({up}changelog.md)"
        _linked.add(path)
        return f"]({up}source/{path}{'' if path.endswith('.md') else '.md'})"

    return re.sub(r"\]\(([\w./=-]+)\)", replace, text)


def source_page(path: str) -> str:
    """Return a page with the text of one file of the repository, with an HTML id for each line of code."""
    text = (ROOT / path).read_text()
    head = "---\nsearch:\n  exclude: true\nhide:\n  - navigation\n  - toc\n---\n"
    if path.endswith(".md"):
        return head + re.sub(r"\]\((?!https?:|#)[^)]*\)", "](#)", text)
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_for_filename

    # Write raw HTML, so that MkDocs finds the id of each line and can check links to it.
    code = highlight(text, get_lexer_for_filename(path), HtmlFormatter(linespans="line", wrapcode=True))
    return f"{head}# `{path}`\n\n{code}\n"


# ----------------------------------------------------------------------------------------------------------------- the hooks

GENERATED = {"commands.md": commands_page, "run-file.md": run_file_page, "api.md": api_page, "errors.md": errors_page}
"""The function that fills each generated page, by the path of the page."""


def rendered(page: str, markdown: str) -> str:
    """Return the Markdown of a page of docs/ as the site shows it, with generated parts and links."""
    return with_links(GENERATED.get(page, lambda text: text)(markdown), page)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that have no file in docs/. MkDocs calls this hook once per build."""
    from mkdocs.structure.files import File

    import_this_checkout()

    def add(name: str, text: str) -> None:
        """Add a generated page, unless docs/ has a file of this name."""
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=text))

    add("changelog.md", (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("))
    add("decisions/index.md", decisions_index())
    for file in [file for file in files if file.src_uri.endswith(".md")]:
        rendered(file.src_uri, file.content_string)  # only to collect the linked files in `_linked`
    for path in sorted(_linked):
        add(f"source/{path}{'' if path.endswith('.md') else '.md'}", source_page(path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the generated pages and turn names of files and tests into links. MkDocs calls this hook for each page."""
    name = page.file.src_uri
    return markdown if name.startswith("source/") else rendered(name, markdown)
