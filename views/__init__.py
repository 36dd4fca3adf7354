"""What people look at: the report, the dashboard, notebooks, `show` and `compare`."""
