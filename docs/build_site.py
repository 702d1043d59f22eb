"""Builds the documentation as a site in build/site, which needs no network: `make docs-site`.

The pages of `docs/` are copied to a folder for Sphinx. What they link to outside of `docs/` (other texts, source code,
folders) becomes pages of the site, too. A link to nothing, a page that no list of pages has, and every other warning of
Sphinx end the build.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "build/site-source"
SITE = ROOT / "build/site"
# The lists of pages beside every page of the site. A name is that of a file in docs/, without its ending.
CHAPTERS = {
    "Start": ["tutorial"],
    "Ask": ["sdk", "gateway", "command-line", "playground", "other-languages"],
    "Run": [
        f"operations/{name}"
        for name in (
            "README", "deploying", "new-model", "security", "cache-server", "adapters", "forgetting", "tuning", "gpu",
            "observability", "slow-request", "runbook",
        )
    ],
    "Extend": ["adding-a-family", "adding-a-device"],
    "Look up": ["models", "contract", "python", "operations/settings", "track-record"],
    "Understand": [
        "why-digest-and-offset", "when-it-does-not-pay", "architecture", "encoder", "decoder", "shared", "performance",
        "log", "adr/README",
    ],
}  # fmt: skip
_DOCS = "docs/"
# Files from outside of docs/ get pages in this folder of the site.
_OUTSIDE = "repository/"
_INDEX = "README.md"
# The target of a Markdown link or image, or of an HTML image. A scheme or a leading # leads out of the repository.
_TARGET = re.compile(r"""(?<=\]\()[^)\s:#]+(?=[)#])|(?<=\ssrc=")[^":#]+(?=")|(?<=srcset=")[^":#]+(?=")""")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_PICTURES = {".png", ".svg"}
_LANGUAGES = {".py": "python", ".ts": "typescript", ".toml": "toml", ".yaml": "yaml", ".h": "cpp", ".cpp": "cpp"}


def assemble(source: pathlib.Path) -> None:
    """Writes the folder that Sphinx reads. Raises ValueError for a link to nothing."""
    shutil.rmtree(source, ignore_errors=True)
    pending = [str(path.relative_to(ROOT)) for path in (ROOT / _DOCS).rglob("*.md")]
    done = set(pending)
    while pending:
        path = pending.pop()
        file = source / _page(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in _PICTURES:
            shutil.copyfile(ROOT / path, file)
            continue
        text = _text(path)
        targets = {_resolve(path, target) for target in _targets(text)} if _is_markdown(path) else set()
        pending += targets - done
        done |= targets
        file.write_text(_finished(path, text), "utf-8")


def build(source: pathlib.Path, site: pathlib.Path) -> None:
    """Builds the site from an assembled folder. Raises CalledProcessError after a warning."""
    shutil.rmtree(site, ignore_errors=True)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(ROOT / _DOCS)]
    doctrees = ["-d", str(source.with_name(f"{source.name}-trees"))]
    subprocess.run([sys.executable, "-m", "sphinx", *options, *doctrees, str(source), str(site)], check=True, cwd=ROOT)
    # Sphinx copies the pictures of Markdown, and leaves those of HTML out.
    for picture in (path for path in source.rglob("*") if path.suffix in _PICTURES):
        copied = site / picture.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copied)


def _text(path: str) -> str:
    """Returns the Markdown of one file or folder of the repository. Raises ValueError if it is not there."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(f"{item.name}/" if item.is_dir() else item.name for item in file.iterdir())
        listed = "\n".join(f"* `{name}`" for name in names if not name.startswith((".", "__")))
        return f"# `{path}`\n\nThis folder of the repository has:\n\n{listed}\n"
    if not file.exists():
        raise ValueError(f"a page links to {path}, which does not exist")
    text = file.read_text("utf-8")
    if _is_markdown(path):
        return text
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    return f"# `{path}`\n\n{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"


def _finished(path: str, text: str) -> str:
    """Returns a page as Sphinx gets it: links to pages of the site, and the lists of pages that begin here."""
    here = posixpath.dirname(_page(path))

    def link(target: str) -> str:
        return posixpath.relpath(_page(_resolve(path, target)), here)

    if _is_markdown(path):
        text = _with_targets(text, link)
    if path == f"{_DOCS}{_INDEX}":
        lists = [_toctree(title, [_page(f"{_DOCS}{name}.md") for name in names]) for title, names in CHAPTERS.items()]
        return "\n".join([text, *lists])
    if path == f"{_DOCS}adr/{_INDEX}":
        return f"{text}\n{_toctree('', sorted(name.name for name in (ROOT / _DOCS / 'adr').glob('0*.md')))}"
    # Sphinx asks that a page that is in no list says so.
    return text if path.startswith(_DOCS) else f"---\norphan: true\n---\n\n{text}"


def _toctree(title: str, pages: list[str]) -> str:
    caption = [f":caption: {title}"] if title else []
    return "\n".join(["```{toctree}", ":hidden:", ":maxdepth: 1", *caption, "", *pages, "```", ""])


def _page(path: str) -> str:
    """Returns the name of a file or folder of the repository among the files for Sphinx."""
    if (ROOT / path / _INDEX).exists():
        path = f"{path}/{_INDEX}"
    if path.startswith(_DOCS):
        name = path.removeprefix(_DOCS)
        return posixpath.join(posixpath.dirname(name), "index.md") if posixpath.basename(name) == _INDEX else name
    suffix = pathlib.PurePosixPath(path).suffix
    return f"{_OUTSIDE}{path}" if suffix in {".md", *_PICTURES} else f"{_OUTSIDE}{path}.md"


def _is_markdown(path: str) -> bool:
    return path.endswith(".md") or (ROOT / path / _INDEX).exists()


def _resolve(path: str, target: str) -> str:
    """Returns the repository's path of a target on the page at `path`, without a slash at its end."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    resolved = posixpath.normpath(posixpath.join(folder, target))
    return f"{resolved}/{_INDEX}" if (ROOT / resolved / _INDEX).exists() else resolved


def _targets(text: str) -> Iterator[str]:
    yield from _TARGET.findall(_FENCED.sub("", text))


def _with_targets(text: str, replace: Callable[[str], str]) -> str:
    """Returns Markdown with the targets of its links replaced; fenced code stays as it is."""
    parts, last = [], 0
    for fence in _FENCED.finditer(text):
        parts += [_TARGET.sub(lambda match: replace(match[0]), text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _TARGET.sub(lambda match: replace(match[0]), text[last:])])


if __name__ == "__main__":
    assemble(SOURCE)
    build(SOURCE, SITE)
    print(SITE / "index.html")
