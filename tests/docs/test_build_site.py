"""Tests that the site builds without a warning, and that its pages need no network and link to what is there."""

from __future__ import annotations

import pathlib
import posixpath
from html.parser import HTMLParser

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from docs import build_site
from docs.build_site import CHAPTERS, assemble, build
from tests.gateway_svc.playground.browser import missing_programs, running_browser

# Elements whose address the browser loads by itself.
_LOADED = {"script": "src", "img": "src", "link": "href", "source": "srcset", "iframe": "src"}


class Page(HTMLParser):
    """The addresses and the anchors of one page."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        if address := values.get(_LOADED.get(tag, "")):
            self.loaded.append(address)
        if tag == "a" and (address := values.get("href")):
            self.links.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The built site. Sphinx ends its build after a warning."""
    folder = tmp_path_factory.mktemp("site")
    assemble(folder / "source")
    build(folder / "source", folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: pathlib.Path) -> dict[str, Page]:
    return {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html")}


def test_every_page_is_in_the_lists_beside_it() -> None:
    named = {f"{name}.md" for names in CHAPTERS.values() for name in names}
    docs = build_site.ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert named == {name for name in written if name != "README.md" and not name.startswith("adr/0")}


def test_pages_load_nothing_from_other_servers(pages: dict[str, Page]) -> None:
    assert len(pages) > 80
    loaded = {address for page in pages.values() for address in page.loaded}
    assert len(loaded) > 20
    assert [address for address in loaded if address.startswith(("http:", "https:", "//"))] == []


def test_links_lead_to_pages_and_headings_that_exist(site: pathlib.Path, pages: dict[str, Page]) -> None:
    lost = []
    for name, page in pages.items():
        for address in [*page.links, *(loaded for loaded in page.loaded if "?" not in loaded)]:
            if ":" in address.partition("#")[0]:
                continue
            path, _, anchor = address.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if not (site / target).exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                lost.append((name, address))
    assert lost == []


def test_files_outside_of_the_docs_are_pages_of_the_site(site: pathlib.Path) -> None:
    source = (site / "repository/lookonce/status_codes.py.html").read_text("utf-8")
    assert "ErrorInfo" in source
    assert "buf.gen.go.yaml" in (site / "repository/protos.html").read_text("utf-8")
    assert 'href="../operations/security.html' in (site / "repository/SECURITY.html").read_text("utf-8")


def test_classes_have_their_methods_and_the_comments_of_their_fields(site: pathlib.Path) -> None:
    page = (site / "python.html").read_text("utf-8")
    assert "lookonce.Client.generate" in page
    assert "Image tokens that needed no row, because their KV was cached." in page


def test_a_link_to_nothing_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("# Page\n\n[there](../tests/nothing.py)\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"a page links to tests/nothing\.py, which does not exist"):
        assemble(tmp_path / "source")


@pytest.mark.skipif(bool(missing_programs()), reason="Debian's packages chromium and chromium-driver are not installed")
def test_the_search_works_from_a_folder(site: pathlib.Path) -> None:
    with running_browser() as driver:
        driver.get(f"{site.as_uri()}/search.html?q=preemption")
        found = WebDriverWait(driver, 60).until(lambda _: driver.find_elements(By.CSS_SELECTOR, "ul.search li a"))
        assert any(str(link.get_attribute("href")).startswith(site.as_uri()) for link in found)
