"""Write the table of other people's kernels on emulated GPUs."""

from benchmarks.pages.long_table import markdown, newest, of_each_device, paragraphs, provenance, texts
from measure.tables import number


@of_each_device("others", "rows {row}")
def others_section(rows):
    """Show the verdict on each kernel and the seconds of its case, and below why one is not right."""
    rows = newest(rows, "arch", "kernel")
    rows = rows.assign(
        kernel="`" + rows["kernel"] + "`",
        text=rows["verdict"] + texts(rows["seconds"], lambda seconds: f", {number(seconds, 2)} s").fillna(""),
    )
    table = rows.pivot_table("text", ["kernel", "dtype", "passes"], "arch", aggfunc="first", sort=False)
    failed = rows[rows["error"].notna()]
    reasons = "- " + failed["kernel"] + " on " + failed["arch"] + ", " + failed["verdict"] + ": " + failed["error"]
    packages = rows.drop_duplicates("file")["packages"]
    versions = dict(item for each in packages[::-1] for item in each.items())
    return paragraphs(
        markdown(table.reset_index()),
        "\n".join(reasons),
        "Of " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".",
        provenance(rows),
    )
