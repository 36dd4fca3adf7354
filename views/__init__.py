"""The views of a run: the report, the dashboard, notebooks and `show`."""
