"""The page of a plan: well-formed, whole, self-contained; and, where a browser is found, readable in one."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser

import pytest
import torch
from transformers import AutoModelForCausalLM

from hyperpar_core import Override, build_plan, suggest_overrides
from hyperpar_core.plan.names import fold_names
from hyperpar_core.testing import tiny_config
from hyperpar_core.view.html import html_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "hr", "img", "input", "link"}


def planned(family, sizes, ep=1, overrides=(), **changes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    suggested = suggest_overrides(model, sizes, ep_size=ep).entries
    return build_plan(model, sizes, ep_size=ep, overrides=[*suggested, *overrides])


PLANS = {
    "one rank": ("llama", {}, 1),
    "sequence parallel": ("qwen3", {"dp": 2, "tp": 2}, 1),
    "packed": ("phi3", {"tp": 2}, 1),
    "shared heads": ("llama", {"tp": 4}, 1),
    "cp, tp and ep": ("qwen3_moe", {"cp": 2, "tp": 2}, 4),
}


class Page(HTMLParser):
    """Checks that tags are balanced, and gathers what the tests look at."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.attributes, self.text, self.codes = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1] == tag, (self.stack[-3:], tag)
        self.stack.pop()

    def handle_data(self, data):
        self.text.append(data)
        if self.stack and self.stack[-1] == "code":
            self.codes.append(data)


@pytest.mark.parametrize("case", PLANS)
def test_the_page_is_balanced_fetches_nothing_and_runs_nothing(case):
    family, sizes, ep = PLANS[case]
    text = html_page(planned(family, sizes, ep), dp=sizes.get("dp", 1))
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action") and not a[2].startswith("#")]
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert text.startswith("<!doctype html>") and ("meta", "name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("case", PLANS)
def test_every_boundary_and_every_parameter_is_on_the_page(case):
    family, sizes, ep = PLANS[case]
    plan = planned(family, sizes, ep)
    page = Page(html_page(plan))
    named = " ".join(page.codes)
    for contract in plan.boundaries:
        if contract.template == "stack" and contract.in_src == contract.in_dst:
            continue
        shown = {contract.fqn, *fold_names(c.fqn for c in plan.boundaries if c.fqn.split(".")[-1] == contract.fqn.split(".")[-1])}
        assert any(name in named for name in shown), contract.fqn
        for parameter in contract.params:
            assert parameter in page.codes, (contract.fqn, parameter)


def test_each_picture_says_in_words_what_it_shows_and_each_table_can_be_scrolled_by_keyboard():
    page = Page(html_page(planned("qwen3_moe", {"cp": 2, "tp": 2}, 4)))
    pictures = [tag for tag in page.tags if tag == "svg"]
    said = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    nested = sum(1 for tag, name, value in page.attributes if (tag, name) == ("svg", "x"))
    assert len(said) == len(pictures) - nested > 20 and all(said)
    assert any("cut along the sequence over cp" in text for text in said)
    regions = [a for a in page.attributes if a[1:] == ("role", "region")]
    assert len(regions) == sum(1 for a in page.attributes if a[1:] == ("tabindex", "0")) > 5


def test_a_picture_cuts_what_the_layout_cuts_and_shows_the_order_of_cp():
    from torch.distributed.tensor import Partial, Replicate, Shard

    from hyperpar_core.view.slices import layout_sentence, slices_svg

    def cells(layout, sizes, **options):
        return slices_svg(layout, sizes, 1, 2, "x", **options).count('class="cell"')

    assert cells({"tp": Shard(1)}, {"tp": 4}) == 4
    assert cells({"tp": Replicate()}, {"tp": 4}) == 1
    assert cells({"cp": Shard(1), "tp": Shard(2)}, {"cp": 2, "tp": 2}) == 4
    zigzag = slices_svg({"cp": Shard(1)}, {"cp": 2}, 1, 2, "x", zigzag=True)
    assert re.findall(r">(cp\d)<", zigzag) == ["cp0", "cp1", "cp1", "cp0"]
    # what a cp rank holds is two chunks one behind the other, and that is what tp cuts
    both = slices_svg({"cp": Shard(1), "tp": Shard(1)}, {"cp": 2, "tp": 2}, 1, 2, "x", zigzag=True)
    assert re.findall(r">(cp\d tp\d)<", both) == ["cp0 tp0", "cp1 tp0", "cp1 tp1", "cp0 tp1"]
    odd = slices_svg({"cp": Shard(1), "tp": Shard(1)}, {"cp": 2, "tp": 3}, 1, 2, "x", zigzag=True)
    assert odd.count('class="cell"') == 8  # the middle rank's part is half in one chunk and half in the other
    assert "--hatch" in slices_svg({"tp": Partial()}, {"tp": 2}, 1, 2, "x")
    assert layout_sentence({"tp": Partial()}, {"tp": 2}) == "partial: each tp rank holds a summand"
    assert "(the first 8 of each axis drawn)" in slices_svg({"tp": Shard(1)}, {"tp": 64}, 1, 2, "x")


def nasty(module, x):
    return x


def make_nasty(*, module, note='<script>alert("&")</script>'):
    return nasty


def test_names_options_and_notes_are_escaped():
    make_nasty.__qualname__ = '<script>alert("&")</script>'
    entry = Override(match="*.mlp", local_compute_fn=make_nasty, region_dispatch=True)
    text = html_page(planned("llama", {"tp": 2}, overrides=[entry]))
    assert "<script" not in text and "&lt;script&gt;" in text
    Page(text)


# ---- in a browser


def pixels(path):
    """(width, height, rows of RGB bytes) of a PNG as browsers write it."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    depth, colour = data[24], data[25]
    assert depth == 8 and colour in (2, 6)
    size = 3 if colour == 2 else 4
    packed, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    raw, rows, before = zlib.decompress(packed), [], bytearray(width * size)
    for y in range(height):
        kind, line = raw[y * (width * size + 1)], bytearray(raw[y * (width * size + 1) + 1 : (y + 1) * (width * size + 1)])
        for x in range(len(line)):
            a = line[x - size] if x >= size else 0
            b, c = before[x], before[x - size] if x >= size else 0
            if kind == 4:
                near = a + b - c
                line[x] = (line[x] + min((abs(near - v), i, v) for i, v in enumerate((a, b, c)))[2]) & 255
            else:
                line[x] = (line[x] + (0, a, b, (a + b) // 2)[kind]) & 255
        rows.append(bytes(line))
        before = line
    return width, height, size, rows


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_in_both_colour_schemes_on_a_phone(tmp_path, scheme):
    page = tmp_path / "plan.html"
    # the sum of what sticks out to the right, told by the title: a phone must not have to scroll sideways
    probe = "<script>document.title = 'overflow ' + (document.documentElement.scrollWidth - innerWidth)</script></body>"
    text = html_page(planned("qwen3_moe", {"cp": 2, "tp": 2}, 4)).replace("<details>", "<details open>")
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    picture = tmp_path / "page.png"
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=520,900",
        f"--user-data-dir={tmp_path / 'profile'}",
        *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
    ]  # fmt: skip
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=100)
    width, height, size, rows = pixels(picture)
    assert (width, height) == (520, 900)
    corner = rows[2][2 * size]
    assert corner < 60 if scheme == "dark" else corner > 200
    assert len({rows[y][x * size : x * size + 3] for y in range(0, height, 7) for x in range(0, width, 7)}) > 12
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], check=True, capture_output=True, timeout=100, text=True)
    assert "<title>overflow 0</title>" in done.stdout
