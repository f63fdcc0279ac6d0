"""What happened? The report package reads a run directory and tells it to a person.

Four ways of telling:

- `text_block(summary, run)`: a few lines of plain text that can be quoted; the trainer prints them at the end.
- `write_report(run_dir)`: one HTML file with that block on top and the figures below. It needs no network and no other
  file, so it can be mailed, and it is readable on a phone, on a desktop, in the dark and in print.
- `write_comparison(first, second)`: two runs on one such page.
- `write_profile(run_dir)`: a page like it about one step that `carpool profile` recorded.

What is measured and what is predicted never look alike: a prediction (made before the run, from shapes and from the
assumption of uniform routing) is dashed or hatched and says "predicted".

It reads files only. It imports neither torch nor transformers, so it also works where a run was merely copied to.
"""

from __future__ import annotations

from carpool.report.comparison import write_comparison
from carpool.report.headline import text_block
from carpool.report.page import write_report
from carpool.report.profile_page import write_profile

__all__ = ["text_block", "write_comparison", "write_profile", "write_report"]
