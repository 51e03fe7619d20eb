"""The report's page: whole, safe whatever the names are, small, and the same figures as the plan."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import html5lib
import pytest

import pplan
from pplan.api.html_report import report
from pplan.api.page import page_content
from pplan.api.page.page_content import _costs_origin
from pplan.cost_models.quantities import format_bytes, format_seconds, percent
from pplan.planner.plan_file import ProfileReference

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "<!--<script>",
    "]]></style><style>*{display:none}",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe",
    "\x1b[31mred\x07\u2028\u2066",
    "&lt;&amp;&#60;",
    "javascript:alert(1)//\\u003c",
]
STEERS = {"Cc", "Cf", "Zl", "Zp", "Cs"}


def profile_of(names: Sequence[str], model: str = "toy") -> pplan.Profile:
    """Layers of these names; the first are the heaviest."""

    def layer(index: int, name: str) -> dict[str, Any]:
        costs = [
            {
                "micro_batch_size": size,
                "forward_seconds": 1e-3 * size * (1 + 1 / (1 + index)),
                "backward_seconds": 2e-3 * size,
                "output_bytes": 2**18 * size,
                "saved_bytes": 2**20 * size,
            }
            for size in (1, 2)
        ]
        return {"name": name, "kind": name, "parameter_bytes": 2**20, "costs": costs}

    content = {"schema": 1, "model": model, "device": "cuda:0", "device_name": model, "dtype": "float32"}
    layers = [layer(index, name) for index, name in enumerate(names)]
    return pplan.Profile.parse(json.dumps(content | {"layers": layers}), "test")


def planned(
    profile: pplan.Profile, balance: Sequence[int], micro_batches: int, schedule: str = "1f1b"
) -> pplan.Plan:
    return pplan.import_plan(
        ",".join(map(str, balance)),
        profile,
        mini_batch=micro_batches,
        micro_batches=micro_batches,
        schedule=schedule,
        memory_bytes=2**34,
        bandwidth=1e10,
        latency=5e-6,
        recompute="never",
    )


def parse(html: str) -> Any:
    """The page's tree. Fails for a page that is not HTML by the standard's own parsing."""
    parser = html5lib.HTMLParser(namespaceHTMLElements=False)
    tree = parser.parse(html)
    assert parser.errors == []
    return tree


def texts(element: Any) -> str:
    return "".join(element.itertext())


@pytest.fixture(scope="module")
def toy() -> tuple[pplan.Profile, pplan.Plan]:
    profile = profile_of([f"layers.{number}" for number in range(10)])
    return profile, planned(profile, (3, 3, 4), 8)


def test_hostile_names_stay_names() -> None:
    profile = profile_of(HOSTILE, model=HOSTILE[0])
    html = report(planned(profile, (4, 6), 4), profile).html
    tree = parse(html)
    scripts = tree.findall(".//script")
    assert [script.get("type") for script in scripts] == ["application/json", None, None, None, None]
    assert tree.findall(".//img") == []
    assert len(tree.findall(".//style")) == 1
    for element in tree.iter():
        attributes = {} if callable(element.tag) else element.attrib
        assert not [name for name in attributes if name.lower().startswith("on")], attributes
        assert not any(str(value).startswith(("http", "//", "javascript")) for value in attributes.values())
    data = json.loads(scripts[0].text)
    shown = [texts(row.findall("td")[1]) for row in tree.findall(".//table[@data-sortable]/tbody/tr")]
    assert data["names"] == shown
    for name, own in zip(HOSTILE, shown, strict=True):
        assert own == name if name.isprintable() else own.isprintable()
        assert "49" not in own
    steering = [one for one in html if unicodedata.category(one) in STEERS and one != "\n"]
    assert steering == []


def test_nothing_but_its_own_scripts_runs_and_nothing_is_loaded(
    toy: tuple[pplan.Profile, pplan.Plan],
) -> None:
    tree = parse(report(toy[1], toy[0]).html)
    policy = next(
        meta.get("content") for meta in tree.findall(".//meta") if meta.get("http-equiv") is not None
    )
    hashes = [
        base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
        for script in tree.findall(".//script")[1:]
    ]
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == len(hashes) == 4
    assert all(f"'sha256-{each}'" in policy for each in hashes)
    assert [link.get("href")[:1] for link in tree.findall(".//a")] == ["#"] * len(tree.findall(".//a"))
    targets = {element.get("id") for element in tree.iter() if not callable(element.tag)}
    assert {link.get("href")[1:] for link in tree.findall(".//a")} <= targets


def test_the_tables_have_the_plans_figures(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    profile, plan = toy
    explanation = pplan.explain(plan, profile)
    tree = parse(report(plan, profile, explanation=explanation).html)
    tables = {texts(table.find("caption")): table for table in tree.findall(".//table[caption]")}
    rows = tables["Stages; time per micro-batch"].findall("tbody/tr")
    for row, stage in zip(rows, plan.stages, strict=True):
        cells = [texts(cell) for cell in row.findall("td")]
        assert cells[2] == str(stage.layers)
        assert cells[-2] == format_bytes(stage.memory_bytes)
        assert cells[5] == format_seconds(stage.forward_seconds)
    timeline = pplan.simulate(plan, profile)
    other = {
        texts(row[0]): texts(row[1])
        for row in tables["Other schedules on the same cuts and micro-batches"].findall("tbody/tr")
    }
    assert (
        other["1f1b"] == format_seconds(timeline.step_seconds) == format_seconds(plan.prediction.step_seconds)
    )
    for schedule in ("gpipe", "zb-h1", "naive"):
        simulated = pplan.simulate(plan, profile, schedule=schedule)
        assert other[schedule] == format_seconds(simulated.step_seconds)
    changes = [texts(row[0]) for row in tables["What-if (one change at a time)"].findall("tbody/tr")]
    assert changes == [change.change for change in explanation.what_if]
    data = json.loads(tree.find(".//script").text)
    unit = data["timeline"]["step"] / data["timeline"]["units"]
    for device, own in enumerate(data["timeline"]["devices"]):
        spans = [span for span in timeline.spans if span.stage == device]
        assert own["kinds"] == "".join(span.action.kind for span in spans)
        assert own["m"] == [span.action.micro_batch for span in spans]
        ends = [sum(own["wait"][: i + 1]) + sum(own["run"][: i + 1]) for i in range(len(spans))]
        assert [end * unit for end in ends] == pytest.approx([span.end for span in spans], abs=2 * unit)


def test_what_is_not_there_is_said(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    page = texts(parse(report(toy[1]).html))
    for words in (
        "not in the plan: it was not at hand",
        "Sensitivity and what-ifs were not computed",
        "No frontier",
        "The plan was not checked",
    ):
        assert words in page


def test_no_section_is_empty(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    for html in (report(toy[1]).html, report(toy[1], toy[0], others=[toy[1]]).html):
        tree = parse(html)
        links = [link.get("href") for link in tree.findall(".//nav/a")]
        assert links == [f"#{section.get('id')}" for section in tree.findall(".//main/section")]
        assert all(len(section) > 1 for section in tree.findall(".//main/section"))


def test_plans_side_by_side(toy: tuple[pplan.Profile, pplan.Plan], tmp_path: Path) -> None:
    """The page's own plan first, all timelines in their own seconds, and machines."""
    profile, plan = toy
    profile.save(tmp_path / "toy.profile.json", force=False)
    others = [planned(profile, balance, 8, "gpipe") for balance in ((3, 3, 4), (10,))]
    paths = [tmp_path / f"{name}.plan.json" for name in ("gpipe", "one")]
    for path, own in zip(paths, others, strict=True):
        reference = own.profile.model_copy(update={"file": "toy.profile.json"})
        own.model_copy(update={"profile": reference}).save(path, force=False)
    tree = parse(report(plan, profile, others=paths).html)
    (table,) = [own for own in tree.findall(".//table") if texts(own.find("caption")) == "Plans side by side"]
    assert [texts(cell) for cell in table.findall("thead/tr/th")] == [
        "",
        "plan 0",
        "gpipe.plan.json",
        "one.plan.json",
    ]
    rows = {texts(row[0]): [texts(cell) for cell in row[1:]] for row in table.findall("tbody/tr")}
    every = [plan, *others]
    assert rows["step"] == [format_seconds(own.prediction.step_seconds) for own in every]
    assert rows["schedule"] == ["1f1b", "gpipe", "gpipe"]
    assert rows["GPUs"] == ["3", "3", "1"]
    assert rows["machine"] == [own.topology for own in every]
    assert "MFU" not in rows
    plans = json.loads(tree.find(".//script").text)["plans"]
    assert [own["timeline"]["step"] for own in plans] == pytest.approx(
        [own.prediction.step_seconds for own in every]
    )
    assert texts(tree.find(".//h2")) == "Answer: plan 0"


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


def test_a_plan_of_a_configuration_has_a_timeline_and_mfu(tmp_path: Path) -> None:
    """From the seconds of its stages: the step is the plan's."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = pplan.solve(tmp_path / "config.json", gpus=8, gpu="h100", mini_batch=32, pp=(4,), virtual_stages=2)
    tree = parse(report(plan).html)
    timeline = json.loads(tree.find(".//script").text)["timeline"]
    assert timeline["step"] == pytest.approx(plan.prediction.step_seconds)
    assert len(timeline["devices"]) == 4
    figures = {texts(box[0]): texts(box[1]) for box in tree.findall(".//dl/div")}
    assert figures["MFU"] == percent(plan.prediction.mfu or 0)
    assert plan.prediction.tflops_per_gpu == pytest.approx(989 * (plan.prediction.mfu or 0), rel=0.01)


def colours(dark: bool) -> dict[str, str]:
    css = (Path(page_content.__file__).parent / "report.css").read_text()
    light, night = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    pairs = dict(re.findall(r"--([\w-]+): *(#\w+)", light))
    return pairs | (dict(re.findall(r"--([\w-]+): *(#\w+)", night)) if dark else {})


def luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2.1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_text(dark: bool) -> None:
    """At least 4.5 to 1; and no stage has the colour of an action."""
    own = colours(dark)
    actions = ["forward", "backward", "weight"]
    pairs = [(text, ground) for text in ("text", "soft", "accent", "over") for ground in ("page", "panel")]
    pairs += [("warn", "warn-page"), ("text", "idle"), ("on-stage", "stage-0"), ("on-stage", "stage-1")]
    pairs += [("on-action", action) for action in actions]
    for text, ground in pairs:
        one, other = sorted(luminance(own[name]) for name in (text, ground))
        assert (other + 0.05) / (one + 0.05) >= 4.5, (text, ground)
    assert not {own["stage-0"], own["stage-1"]} & {own[name] for name in (*actions, "transfer", "sum")}


def test_what_can_be_used_is_reached_by_keys(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    tree = parse(report(toy[1], toy[0], others=[toy[1]]).html)
    scrolled = [own for own in tree.iter("div") if own.get("class") == "scroll"]
    assert scrolled
    assert all(own.get("tabindex") == "0" and own.get("aria-label") for own in scrolled)
    assert all(own.get("tabindex") == "0" for own in tree.iter("canvas"))
    assert 'make("canvas", { tabindex: "0"' in texts(tree)


def test_names_of_options_are_marked_as_code(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    odd = toy[1].model_copy(update={"warnings": ["`memory` gives it, <b>`a` & `b`</b>"]})
    tree = parse(report(odd).html)
    (warning,) = tree.findall(".//p[@class='warning']/bdi")
    assert texts(warning) == "memory gives it, <b>a & b</b>"
    assert [texts(code) for code in warning.findall("code")] == ["memory", "a", "b"]
    assert "explain" in [texts(code) for code in tree.findall(".//section[@id='origin']//code")]
    assert "`" not in texts(tree.find(".//main"))


@pytest.mark.slow
def test_a_large_plan_is_a_small_page() -> None:
    """64 stages x 256 micro-batches; a zero-bubble schedule has half as many actions again as 1F1B."""
    profile = profile_of([f"layers.{number}" for number in range(256)])
    html = report(planned(profile, [4] * 64, 256, "zb-h1"), profile).html
    assert len(html.encode()) < 3_000_000
    data = json.loads(parse(html).find(".//script").text)
    assert data["timeline"]["shown"] == 256


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[str, str], Any]:
    """Opens a page in Chromium, runs a script behind the page's own, and returns what it puts in `result`."""
    browser = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no browser")

    def run(html: str, script: str) -> Any:
        policy = "default-src 'none'"
        assert policy in html
        page = tmp_path / "page.html"
        # The policy is for the page's scripts alone. Frames are drawn in real time while the timers run in
        # virtual time, which on a loaded machine ends before the first frame: here a frame is a timer too.
        frames = "<head><script>window.requestAnimationFrame = (draw) => setTimeout(draw, 16);</script>"
        page.write_text(
            html.replace('http-equiv="Content-Security-Policy"', 'name="policy"')
            .replace("<head>", frames, 1)
            .replace(
                "</body>",
                f"<script>setTimeout(() => {{ const result = (() => {{{script}}})();"
                "document.body.replaceChildren(JSON.stringify(result)); }, 500);</script></body>",
            )
        )
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        done = subprocess.run(
            [*command, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(texts(html5lib.parse(done.stdout, namespaceHTMLElements=False).find("body")))

    return run


@pytest.mark.slow
def test_cuts_move_by_the_keyboard_and_all_follows(
    toy: tuple[pplan.Profile, pplan.Plan], browse: Callable[[str, str], Any]
) -> None:
    profile, plan = toy
    result = browse(
        report(plan, profile).html,
        """
        const text = (id) => document.getElementById(id).textContent;
        const before = text("editor-answer"), cut = document.querySelector(".cut");
        const press = (key) => cut.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        press("ArrowRight");
        const moved = [document.getElementById("editor-balance").value, text("editor-answer"),
            cut.getAttribute("aria-valuetext"),
            document.getElementById("timeline-canvas").getAttribute("aria-label")];
        press("Home");
        const first = document.getElementById("editor-balance").value;
        const type = (list) => {
            const field = document.getElementById("editor-balance");
            field.value = list;
            field.dispatchEvent(new Event("change"));
            return [field.value, text("editor-answer"), text("memory-text")];
        };
        const typed = ["5, 2 3", "3,7", "3,3,5", "0,6,4", "x,3,3"].map(type);
        document.getElementById("editor-reset").click();
        const canvas = document.getElementById("timeline-canvas");
        canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        const heading = [...document.querySelectorAll("table[data-sortable] th button")][4];
        heading.click();
        const rows = [...document.querySelectorAll("table[data-sortable] tbody tr")];
        return {before, moved, first, typed, after: text("editor-answer"), action: text("timeline-text"),
            sorted: rows.map((row) => Number(row.cells[0].textContent)),
            wide: document.documentElement.scrollWidth <= innerWidth};
        """,
    )
    other = pplan.simulate(planned(profile, (4, 2, 4), 8), profile)
    assert result["before"].startswith(f"Step {format_seconds(plan.prediction.step_seconds)} (the plan)")
    balance, answer, cut, label = result["moved"]
    assert balance == "4,2,4"
    assert answer.startswith(f"Step {format_seconds(other.step_seconds)} (")
    assert cut == "after layer 3 layers.3"
    assert format_seconds(other.step_seconds) in label
    assert result["first"] == "1,5,4"
    taken, *refused = result["typed"]
    typed = planned(profile, (5, 2, 3), 8)
    step = format_seconds(pplan.simulate(typed, profile).step_seconds)
    assert taken[0] == "5,2,3"
    assert taken[1].startswith(f"Step {step} (")
    assert f"at most {format_bytes(typed.stages[0].memory_bytes)} over" in taken[2]
    for (_, answer, _), words in zip(
        refused, ("3 numbers", "10 layers, not 11", "numbers of", "numbers of"), strict=True
    ):
        assert answer.startswith("The balance needs ")
        assert words in answer
    assert result["after"] == result["before"]
    first = next(span for span in pplan.simulate(plan, profile).spans if span.stage == 0)
    assert result["action"].startswith(
        f"Stage 0: forward of micro-batch 0, {format_seconds(first.end - first.start)}, from 0 s"
    )
    assert result["sorted"] == list(range(9, -1, -1))
    assert result["wide"]


def _rows(tree: Any, caption: str) -> dict[str, list[str]]:
    table = next(
        own for own in tree.findall(".//table[caption]") if texts(own.find("caption")).startswith(caption)
    )
    return {texts(row[0]): [texts(cell) for cell in row] for row in table.findall("tbody/tr")}


def test_a_schedule_for_which_memory_is_too_small_says_so() -> None:
    profile = profile_of([f"layers.{number}" for number in range(6)])
    plan = pplan.solve(profile, gpus=2, mini_batch=16, micro_batches=16, memory_bytes=5 * 2**23, max_stages=2)
    assert (plan.schedule, len(plan.stages)) == ("1f1b", 2)
    rows = _rows(parse(report(plan, profile).html), "Other schedules")
    simulated = pplan.simulate(plan, profile, schedule="gpipe")
    assert not all(own.bytes <= (own.limit_bytes or 0) for own in simulated.simulation.memory or ())
    assert rows["gpipe"][-1].startswith("it does not fit: stage ")
    assert rows["naive"][-1] == ""


def test_an_explanation_of_another_plan_is_refused(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    profile, plan = toy
    explanation = pplan.explain(planned(profile, (5, 5), 8), profile)
    with pytest.raises(pplan.UsageError, match="explanation: it is of another plan than this one"):
        report(plan, profile, explanation=explanation)


def test_a_faster_plan_stands_among_the_runners_up(toy: tuple[pplan.Profile, pplan.Plan]) -> None:
    """As `pplan explain` says it of a plan that is not the best for its options."""
    profile, plan = toy
    explanation = pplan.explain(plan, profile)
    assert explanation.better is not None
    rows = _rows(parse(report(plan, profile, explanation=explanation).html), "Runner-up plans")
    assert rows["the best for its options"][1] == format_seconds(explanation.better.step_seconds)
    assert rows["the best for its options"][-1] == "-"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"device": "cuda", "device_name": "H100"}, "measured, float32, on H100"),
        ({"device": "cpu"}, "measured, float32, on cpu"),
        (
            {"device": "analytic", "device_name": "H100", "estimated": True},
            "estimated, not measured, float32, on H100",
        ),
        (
            {"device": "unknown"},
            "from a file that pplan did not measure, float32, on a device that it does not say",
        ),
        ({}, "measured, float32, on an unknown device"),
    ],
)
def test_costs_that_were_imported_are_not_called_measured(keys: dict[str, object], words: str) -> None:
    assert _costs_origin(ProfileReference(file="", sha256="", **keys)) == words  # type: ignore[arg-type]
