"""Reads the JSON of rocprofv3, whose records have numbers in the place of names."""

import pandas as pd

from profilers.readers.files import OtherFormat, read_json

FILES, ROOT = "*_results.json", "rocprofiler-sdk-tool"
RECORDS = {"dispatches": "kernel_dispatch", "markers": "marker_api"}
PATTERNS = dict.fromkeys(RECORDS, FILES)


def read(path, content):
    if ROOT not in read_json(path):
        raise OtherFormat(f"{path} is no JSON of rocprofv3: give another name")
    rows = []
    for number, process in enumerate(read_json(path)[ROOT]):
        kernels = {kernel["kernel_id"]: kernel.get("formatted_kernel_name") for kernel in process["kernel_symbols"]}
        ranges = {text["key"]: text["value"] for text in process["strings"]["marker_api"]}
        for record in process["buffer_records"].get(RECORDS[content], []):
            of_kernel = record.get("dispatch_info", {})
            name = kernels[of_kernel["kernel_id"]] if of_kernel else ranges.get(record["correlation_id"]["internal"])
            agent, queue = (of_kernel.get(field, {}).get("handle", "") for field in ("agent_id", "queue_id"))
            stream = record.get("stream_id", {}).get("handle", "")
            rows.append((name, record["start_timestamp"], record["end_timestamp"], number, agent, queue, stream))
    columns = ["Name", "Start", "End", "Pid", "Agent", "Queue", "Stream"]
    return pd.DataFrame(rows, columns=columns, dtype=object)  # integers keep their digits
