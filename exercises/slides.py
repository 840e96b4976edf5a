"""Make slides of the workshop from its pages: Markdown for Marp (https://marp.app).

    python -m exercises.slides                   build/slides.md
    make slides                                  also build/slides.html and build/slides.pdf, by Marp, which needs node

All texts are taken from the pages: of a stage Symptom, Predict, Hypothesis, Evidence, Fix and Remember, of an exercise
the first paragraph, the table and the parts. It is an error if a page lacks one of them, or if a text does not fit.
Exit codes: 0 done, 2 the slides cannot be made.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.slides", file=sys.stderr)
    sys.exit(2)
from measure.command_line import Failure, Parser, program, replacing
from measure.results import ROOT

STAGES = "exercises/performance_debugging/README.md"
EXERCISES = (
    "exercises/exercise1_triton_basics.md",
    "exercises/exercise2_swiglu_optimization.md",
    "exercises/exercise3_flash_attention.md",
)
WORKSHOP, TRAINER = "README_WORKSHOP.md", "docs/trainer.md"

# The size of a slide, 1280 x 720 points, in STYLE: columns of text, of a table's row and of code, and lines.
TEXT_COLUMNS, TABLE_COLUMNS, CODE_COLUMNS, LINES = 76, 108, 84, 14
PICTURE_LINES = 11
STYLE = """---
marp: true
paginate: true
title: A tiny LLaMA on Triton kernels
style: |
  section { font: 30px/1.35 system-ui, sans-serif; place-content: start; padding: 45px 60px; }
  h1 { font-size: 40px; margin: 0 0 16px; }
  pre { font-size: 22px; line-height: 1.3; }
  table { font-size: 21px; }
  p, ul, pre, table { margin: 0 0 14px; }
  img { display: block; margin: 0 auto; max-height: 470px; }
---
"""


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def section(page, heading):
    """The text below a heading of a page, up to a rule or the next heading of its level or a higher one."""
    lines, level, in_code = [], 0, False
    for line in read(page).splitlines():
        in_code ^= line.startswith("```")
        found = None if in_code else re.match(r"(#+) (.*)", line)
        if level and (line == "---" or found and len(found[1]) <= level):
            break
        if level:
            lines.append(line)
        elif found and found[2] == heading:
            level = len(found[1])
    if not level:
        raise Failure(f"{page} has no heading {heading!r}: name another one in exercises/slides.py")
    return "\n".join(lines).strip()


def labelled(text):
    """{label: text} of the paragraphs that begin with a label such as **Fix.**, with the text up to the next label."""
    parts = re.split(r"^\*\*([\w ]+)\.\*\*\s+", text, flags=re.M)
    return {label: part.strip() for label, part in zip(parts[1::2], parts[2::2], strict=True)}


def plain(text):
    """Text for a slide: each paragraph in a line, links replaced by their text."""
    text = re.sub(r"(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"(?<=\S)\n(?=[^\s|`#-])(?!\d+\. )", " ", text)


def first_paragraph(text):
    return plain(text.split("\n\n")[0])


def code_of(text, page, heading):
    block = re.search(r"```\w+\n.*?```", text, flags=re.S)
    if not block:
        raise Failure(f"{page}, {heading}: there is no block to show")
    return "\n".join(map(folded, block[0].splitlines()))


def folded(command):
    """Splits a command that is too long for a slide into lines, before options."""
    cut = command.rfind(" --", 0, CODE_COLUMNS)
    if len(command) <= CODE_COLUMNS or cut <= 0:
        return command
    return f"{command[:cut]} \\\n{folded('   ' + command[cut:])}"


def table_of(text, page, heading):
    table = re.search(r"^\|.*?(?=\n[^|]|\Z)", text, flags=re.M | re.S)
    if not table:
        raise Failure(f"{page}, {heading}: there is no table to show")
    return plain(table[0])


def slide(title, *parts):
    """Markdown of a slide; Failure if it does not fit."""
    text = f"# {title}\n\n" + "\n\n".join(part for part in parts if part)
    if (lines := lines_of(text)) > LINES:
        raise Failure(f"the slide {title!r} has {lines} lines, and {LINES} fit: shorten its page, or split it")
    return text


def lines_of(text):
    """The number of lines of a slide's Markdown below its title."""
    lines, in_code = 0, False
    for line in text.split("\n")[2:]:
        if line.startswith("```"):
            in_code = not in_code
        elif in_code:
            lines += max(1, -(-len(line) // CODE_COLUMNS))
        elif line.startswith("!["):
            lines += PICTURE_LINES
        elif line.startswith("|"):
            cells = [textwrap.wrap(cell, TABLE_COLUMNS // (line.count("|") - 1)) for cell in line.split("|")]
            lines += 0.75 * max(map(len, cells)) if "---" not in line else 0  # tables have smaller letters
        else:
            lines += max(1, len(textwrap.wrap(line, TEXT_COLUMNS))) if line else 0.5
    return lines


# ----------------------------------------------------------------------------------------------------------------------
# The deck


def opening():
    text = read(WORKSHOP)
    title = re.match(r"# (.*)", text)[1]
    yield slide(title, *(plain(part) for part in text.split("\n\n")[1:3]))
    concept = section(WORKSHOP, "Triton")
    kernel = re.search(r"@triton\.jit\n.*?\n\n", code_of(concept, WORKSHOP, "Triton"), flags=re.S)[0].strip()
    yield slide("Triton", first_paragraph(concept), f"```python\n{kernel}\n```")
    yield slide("Kernels for what?", plain(concept.split("```")[-1].strip()))


def stages(folder):
    """Yields three slides of a stage, with question, evidence and fix, and its picture if there is one."""
    shown = pictures(folder)
    for heading in re.findall(r"^## (Stage \d+: .*)", read(STAGES), flags=re.M):
        parts = labelled(section(STAGES, heading))
        sign = next((name for name in ("Symptom", "What to see") if name in parts), None)
        if not sign or "Predict" not in parts:
            raise Failure(f"{STAGES}, {heading}: a stage has a Symptom (or What to see) and a Predict")
        said = {name: f"**{name}.** {first_paragraph(part)}" for name, part in parts.items()}
        evidence = parts.get("Evidence", parts["Predict"])
        after = first_paragraph(evidence.split("```")[-1].strip())  # for a stage without a fix
        yield slide(heading, said[sign], said["Predict"])
        yield slide(f"{heading}: evidence", said.get("Hypothesis"), code_of(evidence, STAGES, heading))
        yield slide(f"{heading}: what to do", said.get("Fix", after), said.get("Remember"))
        if picture := shown.pop(int(re.search(r"\d+", heading)[0]), None):
            yield picture
    if shown:
        raise Failure(f"{TRAINER} has pictures of stages that {STAGES} has not: {', '.join(map(str, shown))}")


def pictures(folder):
    """{stage: slide} of the trainer's page; paths of pictures are relative to folder."""
    shown, found = section(TRAINER, "Pictures of recorded steps"), {}
    for title, caption, alt, name in re.findall(
        r"^\*\*(.*?)\*\* \(.*?\)\. (.*?)\n\n!\[(.*?)\]\((.*?)\)", shown, flags=re.M | re.S
    ):
        path, stage = (ROOT / TRAINER).parent / name, re.search(r"stage(\d)", name)
        if not (stage and path.exists()):
            raise Failure(
                f"{TRAINER} shows {name}, which is no picture of a stage: python -m benchmarks.pages.publish draws them"
            )
        found[int(stage[1])] = slide(title, f"![{alt}]({os.path.relpath(path, folder)})", plain(caption))
    return found


def exercises():
    for page in EXERCISES:
        text = read(page)
        title = re.match(r"# (.*)", text)[1]
        parts = re.findall(r"^## (Part .*)", text, flags=re.M)
        facts = [
            f"**{name}**: {plain(fact)}"
            for name, fact in re.findall(r"^\| \*\*(Time|Hardware)\*\* \| (.*) \|", text, flags=re.M)
        ]
        yield slide(title, plain(text.split("\n\n")[1]), *facts, "\n".join(f"- {part}" for part in parts))


def closing():
    heading = "What the published 5.5x was made of"
    yield slide(heading, table_of(section(WORKSHOP, heading), WORKSHOP, heading))
    heading = "What the eight have in common"
    yield slide(heading, table_of(section(STAGES, heading), STAGES, heading))
    yield slide("Lessons", plain(section(WORKSHOP, "Lessons")))


def deck(folder):
    """The Markdown of all slides; paths of pictures are relative to folder."""
    slides = [*opening(), *exercises(), *stages(folder), *closing()]
    return STYLE + "\n\n---\n\n".join(slides) + "\n"


@program("slides.py")
def main(argv):
    parser = Parser("slides.py", __doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "slides.md", metavar="FILE")
    options = parser.parse_args(argv)
    text = deck(options.output.resolve().parent)
    with replacing(options.output) as page:
        page.write_text(text, encoding="utf-8")
    print(f"Slides: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
