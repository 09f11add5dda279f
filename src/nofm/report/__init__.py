"""From run folders to one HTML file: `write_report([run, ...], "report.html")`.

Files in, files out: nothing here knows a model, a method or a tensor of torch, so a run folder copied to a laptop is enough. No
module of this room imports torch, and a test writes a report without it; that holds as long as `nofm/__init__.py`, which any
import of a subpackage runs, loads torch lazily. matplotlib and jinja2 (the extra `report`, and the numpy that comes with
matplotlib) are imported when a report is written.

    read      a run folder -> Run (resumed runs put in order, errors that name file and line)
    start     from which step on the network of a run is as sparse as it will be
    curves    Run -> {step: value} of losses, metrics, SAD
    compare   runs -> groups that differ in nothing but the seed; mean and sample standard deviation
    measured_on    test data, or training images held out
    kernels   masks/ -> the kernel shapes of the paper's appendix A.2
    numbers   all numbers as plain data, for JSON and CSV
    figures   numbers -> SVG
    sections, details, notices    what the page says, top to bottom
    html      all of it -> the page
    terminal  the comparison as plain text
    picture   the curves as one PNG
"""

from .errors import ReportError
from .html import files_of, write_report
from .terminal import table

__all__ = ["ReportError", "files_of", "table", "write_report"]
