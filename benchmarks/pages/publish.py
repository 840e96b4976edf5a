"""Write the newest results into the pages.

    python -m benchmarks.pages.publish            replace the text between markers, and draw the pictures
    python -m benchmarks.pages.publish --check    print what would change, and exit with 1 if anything would

The markers are <!-- begin: NAME --> and <!-- end: NAME -->, with the names of SECTIONS; a page may have any of them.
For steps and sweeps each size is taken from the newest result that has it, and for the stages each precision and length
of sequence. A result of the stages is the summary.json of run_all_stages.sh, kept as stages_<device>_<name>.json.

Exit codes: 0 done, 1 a page is out of date, 2 the request cannot be met.
"""

import difflib
import functools
import os
import re
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m benchmarks.pages.publish", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.pages import (
    compiled,
    emulated,
    front,
    kernel_costs,
    kernel_tables,
    pictures,
    replays,
    scaling_tables,
    traces,
    training_runs,
    training_steps,
)
from measure.command_line import Parser, program, replacing
from measure.results import RESULTS, ROOT, damage_reported
from measure.tables import NOT_MEASURED

SECTION = re.compile(r"<!-- begin: ([\w-]+) -->(.*?)<!-- end: \1 -->", re.DOTALL)
SECTIONS = {  # {marker: function of the folder of results that returns Markdown, with links from the top folder}
    "steps": training_steps.steps_section,
    "sweeps": training_steps.sweeps_section,
    "shapes": training_steps.shapes_section,
    "micro-batches": training_steps.micro_batches_section,
    "longest": training_steps.longest_section,
    "kernels": kernel_tables.kernels_section,
    "kernel-costs": kernel_costs.kernel_costs_section,
    "stages": replays.stages_section,
    "layer_norm": kernel_tables.layer_norm_section,
    "heads-128": kernel_tables.heads_128_section,
    "hopper-steps": kernel_tables.hopper_steps_section,
    "product-steps": kernel_tables.product_steps_section,
    "swiglu-product": kernel_tables.swiglu_product_section,
    "gpt": training_steps.gpt_section,
    "scaling": scaling_tables.scaling_section,
    "message-sums": scaling_tables.sums_section,
    "fp8-speed": training_steps.fp8_speed_section,
    "fp8-layer": kernel_tables.fp8_layer_section,
    "training": training_runs.training_section,
    "front": front.front_section,
    "published": replays.published_section,
    "claims": replays.claims_section,
    "others": emulated.others_section,
    "compilers": compiled.compilers_section,
}
# The pages that have markers; a test compares them with the results.
NAMES = "README README_WORKSHOP docs/measured docs/fp8 docs/scaling docs/hopper docs/emulator docs/rocm"
PAGES = [ROOT / f"{name}.md" for name in NAMES.split()]
PICTURES = {  # {picture in docs/: function of the folder of results and the path, which draws it}
    "front_page.png": pictures.draw_front_page,
    "learning.png": pictures.draw_learning,
    "training.svg": pictures.draw_training,
    **{f"{name}.png": functools.partial(traces.draw, name=name) for name in traces.PICTURES},
}


def rewrite(page, text, folder):
    """Return the text of a page with the newest results in the folder between its markers."""
    names = [name for name, _ in SECTION.findall(text)]
    if not names or text.count("<!-- begin: ") != len(names):
        pair = "<!-- begin: NAME --> and <!-- end: NAME -->"
        raise llama.UsageError(f"{page} needs {pair} where a table goes, and after each begin its end")
    if unknown := set(names) - SECTIONS.keys():
        raise llama.UsageError(f"{page} has markers of {min(unknown)}: choose from {', '.join(SECTIONS)}")
    # Sections have links from the top folder.
    to_top = os.path.relpath(ROOT, page.parent)

    def replaced(match):
        name, old = match[1], match[2].strip()
        with damage_reported(f"--results {folder}: a result of {name}"):
            new = SECTIONS[name](folder).replace("](benchmarks/", f"]({to_top}/benchmarks/").replace("](./", "](")
        # Whoever removes a result by mistake should notice.
        if new == NOT_MEASURED and old not in ("", NOT_MEASURED):
            raise llama.UsageError(f"{page} has a table of {name}, but there is no result of it: empty the table")
        return f"<!-- begin: {name} -->\n\n{new}\n\n<!-- end: {name} -->"

    return SECTION.sub(replaced, text)


@program("publish.py")
def main(argv):
    parser = Parser("publish.py", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    parser.add_argument("--pages", type=Path, nargs="+", metavar="FILE", help="what to rewrite (default: all pages)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    if not any(options.results.glob("*.json")):
        raise llama.UsageError(f"--results {options.results} holds no results: give a folder that the benchmarks wrote")
    old = {page: page.read_text(encoding="utf-8") for page in options.pages or PAGES}
    new = {page: rewrite(page, text, options.results) for page, text in old.items()}
    changed = {page: text for page, text in new.items() if text != old[page]}
    if options.check:
        for page, text in changed.items():
            texts = old[page].splitlines(True), text.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*texts, str(page), "what the results say"))
        return int(bool(changed))
    for path, text in changed.items():
        with replacing(path, follow=True) as page:
            page.write_text(text, encoding="utf-8")
    if not options.pages:
        for name, draw in PICTURES.items():
            with damage_reported(f"--results {options.results}: a result of {name}"):
                draw(options.results, ROOT / "docs" / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
